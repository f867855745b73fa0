"""Session of an ONNX Runtime engine: the padded form.

In: an engine directory with model.onnx and weights.safetensors beside it. The pools are torch
tensors; ONNX Runtime reads them in place through I/O binding. On a GPU it works on a stream of
torch's, so that a step is ordered behind what torch did, and before what torch does next, without
the host waiting for either.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seekforge.kernels.errors import EngineError
from seekforge.runtime.bindings import bindings
from seekforge.runtime.fit import CUDA_PROVIDER
from seekforge.runtime.manifest import Manifest
from seekforge.runtime.padded import clear_blocks, free_bytes, make_pools, output_shapes, run_padded
from seekforge.runtime.session import Chunk, Track

# onnx.TensorProto's numbers for the dtypes that numpy has not, or has.
ELEMENT_TYPES = {"float32": 1, "int64": 7, "float16": 10, "bfloat16": 16}
MODEL_NAME = "model.onnx"
CPU_PROVIDER = "CPUExecutionProvider"


class OnnxRuntimeSession:
    """Runs the engine on the CPU, or with the CUDA execution provider where the manifest says cuda.
    Raises EngineError where ONNX Runtime refuses the model, or would run it elsewhere."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        import onnxruntime

        self.manifest = manifest
        self.logits_device = torch.device("cpu")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors; its warnings speak of its own optimiser
        self.device = torch.device(manifest.device)
        self.stream: torch.cuda.Stream | None = None
        self.run_options = onnxruntime.RunOptions()
        providers: list[Any] = [CPU_PROVIDER]
        if manifest.device == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
            self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            providers.insert(0, (CUDA_PROVIDER, cuda_options(self.device, self.stream)))
            self.run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        try:
            self.session = onnxruntime.InferenceSession(
                str(directory / MODEL_NAME), options, providers=providers, enable_fallback=0
            )
        except Exception as error:  # onnxruntime raises its own untyped kinds
            raise EngineError(
                f"{directory / MODEL_NAME}: onnxruntime {onnxruntime.__version__} refuses it: "
                f"{error}"
            ) from None
        if self.stream is not None and CUDA_PROVIDER not in self.session.get_providers():
            raise EngineError(
                f"{directory / MODEL_NAME}: onnxruntime {onnxruntime.__version__} cannot load its "
                f"{CUDA_PROVIDER} and would run the engine on the CPU: the CUDA libraries it wants "
                f"are not there (torch brings those of CUDA {torch.version.cuda}); pip install "
                "'onnxruntime-gpu[cuda,cudnn]' of that version"
            )
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
        if self.stream is None:
            self.session.run_with_iobinding(binding)
            return outputs
        # What is freed here is reused by torch's stream alone, so behind the step.
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        self.session.run_with_iobinding(binding, self.run_options)
        current.wait_stream(self.stream)
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


def cuda_options(device: torch.device, stream: torch.cuda.Stream) -> dict[str, str]:
    """Of the CUDA execution provider. The stream must not be the default one, whose address is 0
    and means none. TF32 is ONNX Runtime's default for products in fp32; an arena that doubles would
    take what the pools need."""
    return {
        "device_id": str(device.index),
        "user_compute_stream": str(stream.cuda_stream),
        "use_tf32": "0",
        "arena_extend_strategy": "kSameAsRequested",
    }
