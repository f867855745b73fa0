"""Runs engines of TensorRT and TensorRT-RTX, which share one API, on a CUDA device.

In: an engine directory (`model.engine`) and its manifest. Out: a session. For each padded batch it
picks the profile by shape, binds torch tensors by address, runs, and scatters the new K and V into
the pools. It knows nothing of how an engine is built; `import_tensorrt` is the only import of
TensorRT. What can be checked without a GPU is pure: `select_profile`, `bindings`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seekforge.kernels.errors import EngineError
from seekforge.runtime.bindings import bindings
from seekforge.runtime.fit import unfit_reason
from seekforge.runtime.manifest import Manifest
from seekforge.runtime.padded import clear_blocks, free_bytes, make_pools, run_padded
from seekforge.runtime.profiles import largest, profile_from_json, select_profile
from seekforge.runtime.session import Chunk, Track
from seekforge.runtime.tensorrt_api import Log, capture, import_tensorrt, process_logger
from seekforge.runtime.tensorrt_cache import CACHE_NAME, cached_config, save_at_end
from seekforge.runtime.tensorrt_weights import MODEL_NAME, refit, stream_weights

ENGINE_NAME = "model.engine"
# TensorRT's DataType name -> the manifest's (and torch's) name.
DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT32": "int32",
    "INT64": "int64",
}


class TensorRTSession:
    """The `Session` of backends `tensorrt` and `tensorrt-rtx`.

    `engine` and `device` are for tests: an object with `ICudaEngine`'s methods whose context
    computes on that device. Raises `EngineError` where the engine cannot run on this machine, or
    is not the one its manifest describes.
    """

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        *,
        engine: Any = None,
        device: str = "cuda",
    ) -> None:
        self.manifest = manifest
        self.logits_device = torch.device("cpu")
        self.profiles = [profile_from_json(data) for data in manifest.profiles]
        self._directory = directory
        self._device = torch.device(device)
        self._engine = engine or load_engine(directory, manifest)
        check_tensors(self._engine, manifest, directory)
        self._save: Callable[[], Any] = lambda: None
        self._context = self._make_context()
        if self._context is None:
            raise EngineError(
                f"{directory / ENGINE_NAME}: no execution context could be made; its activations "
                f"need {self._engine.device_memory_size_v2 / 2**20:.0f} MiB of GPU memory: free "
                "some, or build with a smaller --max-batch or --max-len"
            )
        self._profile = -1
        self._pools: dict[str, Tensor] = {}

    def _make_context(self) -> Any:
        """With the weights in their places, which nothing may change afterwards."""
        engine, asked = self._engine, self.manifest.tensorrt or {}
        if asked.get("stripped"):
            refit(engine, self._directory / MODEL_NAME, self.manifest.backend)
        if asked.get("streaming_bytes") is not None:
            stream_weights(engine, asked["streaming_bytes"], self._directory)
        if self.manifest.backend != "tensorrt-rtx":
            return engine.create_execution_context()
        path = self._directory / CACHE_NAME
        self._config, cache = cached_config(engine, path)
        self._save = save_at_end(self, cache, path)
        return engine.create_execution_context(self._config)

    def close(self) -> None:
        """Writes the runtime cache, which else happens when the session goes."""
        self._save()

    def pool_bytes(self, max_batch: int, max_chunk: int, block_size: int) -> int:
        return free_bytes(self._device)

    def allocate(self, num_blocks: int, block_size: int) -> None:
        kv = self.manifest.kv
        if block_size != kv.block_size:
            raise EngineError(
                f"{self._directory}: block size {block_size} was asked for, but this engine has "
                f"{kv.block_size} built in; use that, or rebuild"
            )
        most = largest(self.profiles, kv.names[0], 0)
        if not 1 <= num_blocks <= most:
            raise EngineError(
                f"{self._directory}: {num_blocks} KV blocks were asked for; this engine takes 1 to "
                f"{most}"
            )
        self._pools = {}  # the old ones go before the new ones are made
        self._pools = make_pools(kv, num_blocks, block_size, self._device)

    def capture_all(self, track: Track = iter) -> None:
        """Nothing is captured here."""

    def clear(self, blocks: Sequence[int]) -> None:
        clear_blocks(self._pools.values(), blocks)

    def step(self, chunks: Sequence[Chunk], last: Tensor | None = None) -> Tensor:
        assert last is None, "tokens on the device"
        return run_padded(self.manifest, self._pools, chunks, self._run)

    def _run(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """One execution -> outputs by name, on the device, ordered by its current stream."""
        inputs = bindings(self.manifest.inputs, given, self._device)
        cuda = self._device.type == "cuda"
        stream = torch.cuda.current_stream(self._device).cuda_stream if cuda else 0
        index = select_profile(self.profiles, {name: t.shape for name, t in inputs.items()})
        if index != self._profile:
            self._check(self._context.set_optimization_profile_async(index, stream), "profile")
            self._profile = index
        for name, tensor in inputs.items():
            self._check(self._context.set_input_shape(name, tuple(tensor.shape)), name)
            self._check(self._context.set_tensor_address(name, tensor.data_ptr()), name)
        outputs = {}
        for spec in self.manifest.outputs:
            shape = tuple(self._context.get_tensor_shape(spec.name))
            tensor = torch.empty(shape, dtype=getattr(torch, spec.dtype), device=self._device)
            self._check(self._context.set_tensor_address(spec.name, tensor.data_ptr()), spec.name)
            outputs[spec.name] = tensor
        self._check(self._context.execute_async_v3(stream), "execution")
        return outputs

    def _check(self, accepted: bool, what: str) -> None:
        if not accepted:
            raise EngineError(f"{self._directory / ENGINE_NAME}: TensorRT refused {what} of a step")


def load_engine(directory: Path, manifest: Manifest) -> Any:
    """Deserialises `model.engine`. Raises one `EngineError`: why not, what it was built for, what
    this machine has, what to do."""
    path = directory / ENGINE_NAME
    trt = import_tensorrt(manifest.backend)
    reason = unfit_reason(manifest)
    if reason is None and trt.__version__ != manifest.backend_version:
        reason = f"the installed {manifest.backend} has version {trt.__version__}"
    with capture(manifest.backend) as log:
        if reason is None:
            runtime = trt.Runtime(process_logger(manifest.backend))
            engine = runtime.deserialize_cuda_engine(path.read_bytes())
            if engine is not None:
                return engine
            reason = _first_error(log)
    raise EngineError(
        f"{path}: cannot be loaded: {reason}. It was built by {manifest.backend} "
        f"{manifest.backend_version} for compute capability {manifest.compute_capability}; this "
        f"machine has {_machine()}. Run it on such a GPU, or build one for this machine: "
        f"seekforge build CHECKPOINT -o {directory.parent} --backend "
        f"{'inductor' if not torch.cuda.is_available() else manifest.backend}"
    )


def check_tensors(engine: Any, manifest: Manifest, directory: Path) -> None:
    """Raises `EngineError` unless the engine's inputs and outputs are those of its manifest."""
    found = {}
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        dtype = engine.get_tensor_dtype(name).name
        found[name] = DTYPES.get(dtype, dtype), len(engine.get_tensor_shape(name))
    expected = {s.name: (s.dtype, len(s.shape)) for s in (*manifest.inputs, *manifest.outputs)}
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise EngineError(
                f"{directory / ENGINE_NAME}: tensor {name!r} is {_kind(found.get(name))}, the "
                f"manifest says {_kind(expected.get(name))}; rebuild the engine"
            )


def _first_error(log: Log) -> str:
    return log.errors[0].splitlines()[0] if log.errors else "TensorRT gives no reason"


def _machine() -> str:
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return f"{torch.cuda.get_device_name()} (compute capability {major}.{minor})"
    build = (
        f"torch {torch.__version__} is a CPU build" if torch.version.cuda is None else "no driver"
    )
    return f"no CUDA device ({build})"


def _kind(value: tuple[str, int] | None) -> str:
    return "absent" if value is None else f"{value[0]} with {value[1]} dimensions"
