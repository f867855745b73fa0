"""Session of an ONNX Runtime engine: the padded form.

In: an engine directory with model.onnx and weights.safetensors beside it. The pools are torch
tensors; ONNX Runtime reads them in place through I/O binding.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seekforge.kernels.errors import EngineError
from seekforge.runtime.bindings import bindings
from seekforge.runtime.manifest import Manifest
from seekforge.runtime.padded import clear_blocks, free_bytes, make_pools, output_shapes, run_padded
from seekforge.runtime.session import Chunk, Track

# onnx.TensorProto's numbers for the dtypes that numpy has not, or has.
ELEMENT_TYPES = {"float32": 1, "int64": 7, "float16": 10, "bfloat16": 16}
MODEL_NAME = "model.onnx"


class OnnxRuntimeSession:
    """Runs the engine on the CPU (or with the CUDA execution provider, where the manifest says
    cuda)."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        import onnxruntime

        self.manifest = manifest
        self.logits_device = torch.device("cpu")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors; its warnings speak of its own optimiser
        providers = ["CPUExecutionProvider"]
        if manifest.device == "cuda":
            providers.insert(0, "CUDAExecutionProvider")
        try:
            self.session = onnxruntime.InferenceSession(
                str(directory / MODEL_NAME), options, providers=providers
            )
        except Exception as error:  # onnxruntime raises its own untyped kinds
            raise EngineError(
                f"{directory / MODEL_NAME}: onnxruntime {onnxruntime.__version__} refuses it: "
                f"{error}"
            ) from None
        self.device = torch.device(manifest.device)
        self.pools: dict[str, Tensor] = {}

    def pool_bytes(self, max_batch: int, max_chunk: int, block_size: int) -> int:
        return free_bytes(self.device)

    def allocate(self, num_blocks: int, block_size: int) -> None:
        self.pools = {}  # the old ones go before the new ones are made
        self.pools = make_pools(self.manifest.kv, num_blocks, block_size, self.device)

    def capture_all(self, track: Track = iter) -> None:
        """Nothing is captured here."""

    def clear(self, blocks: Sequence[int]) -> None:
        clear_blocks(self.pools.values(), blocks)

    def step(self, chunks: Sequence[Chunk], last: Tensor | None = None) -> Tensor:
        assert last is None, "tokens on the device"
        return run_padded(self.manifest, self.pools, chunks, self._run)

    def _run(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        inputs = bindings(self.manifest.inputs, given, self.device)
        binding: Any = self.session.io_binding()
        for spec in self.manifest.inputs:
            binding.bind_input(spec.name, *self._place(spec.dtype, inputs[spec.name]))
        outputs = {}
        shapes = output_shapes(self.manifest, inputs)
        for spec in self.manifest.outputs:
            shape = shapes[spec.name]
            outputs[spec.name] = torch.empty(
                shape, dtype=getattr(torch, spec.dtype), device=self.device
            )
            binding.bind_output(spec.name, *self._place(spec.dtype, outputs[spec.name]))
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self.session.run_with_iobinding(binding)
        return outputs

    def _place(self, dtype: str, tensor: Tensor) -> tuple[str, int, int, list[int], int]:
        """Arguments of bind_input and bind_output after the name."""
        shape = list(tensor.shape)
        return (
            self.device.type,
            self.device.index or 0,
            ELEMENT_TYPES[dtype],
            shape,
            tensor.data_ptr(),
        )
