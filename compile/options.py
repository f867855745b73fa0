"""What to build: the options of `build` and `check`. Plain values: needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from seekforge.compile.tensorrt_options import TensorRTOptions, parse_streaming, parse_targets
from seekforge.kernels.errors import InputError
from seekforge.passes.int4_options import QUANTISATIONS, Int4Options
from seekforge.runtime.manifest import BACKENDS, DTYPE_BYTES

FORMS = {
    "inductor": "ragged",
    "onnxruntime": "padded",
    "tensorrt": "padded",
    "tensorrt-rtx": "padded",
}
LEVELS = ("none", "cheap", "full")  # of verification (compile/verify_level.py)
# Packages of pyproject.toml whose version matters to a backend, beside torch and transformers.
PACKAGES: dict[str, tuple[str, ...]] = {
    "inductor": (),
    "onnxruntime": ("onnx", "onnxruntime"),
    "tensorrt": ("onnx", "tensorrt"),
    "tensorrt-rtx": ("onnx", "tensorrt-rtx"),
}


@dataclass(frozen=True, slots=True)
class Options:
    """What to build.

    dtype "auto": float32 on the CPU, the checkpoint's own on a GPU, float16 for TensorRT.

    max_len: tokens of a sequence; None: the model's own, at most 2048. max_chunk: prefill tokens of
    a step. target: compute capabilities of tensorrt-rtx engines; strip, weight_streaming (GiB of
    weights on the GPU): see tensorrt_options.py. quant: one of QUANTISATIONS, with the details in
    `int4`. calib: text (file or folder) for awq-int4; None: the built-in text. cache: what is there
    already, or was kept by an earlier build, is taken, and what is made is kept. verify: one of
    LEVELS.
    """

    backends: tuple[str, ...] = ("inductor", "onnxruntime", "tensorrt-rtx")
    dtype: str = "auto"
    device: str = "cpu"
    max_batch: int = 8
    max_len: int | None = None
    max_chunk: int = 512
    block_size: int = 16
    target: str = "8.9"
    strip: bool = False
    weight_streaming: float | None = None
    verify: str = "cheap"
    quant: str | None = None
    calib: Path | None = None
    int4: Int4Options = field(default_factory=Int4Options)
    cache: bool = True

    def __post_init__(self) -> None:
        for backend in self.backends:
            if backend not in BACKENDS:
                raise InputError(f"--backend {backend}: unknown; one of {', '.join(BACKENDS)}")
        if not self.backends:
            raise InputError("no backend named; give at least one with --backend")
        if self.dtype not in ("auto", *DTYPE_BYTES):
            raise InputError(
                f"--dtype {self.dtype}: unknown; one of auto, {', '.join(DTYPE_BYTES)}"
            )
        if self.device not in ("cpu", "cuda"):
            raise InputError(f"--device {self.device}: unknown; cpu or cuda")
        if self.verify not in LEVELS:
            raise InputError(f"--verify {self.verify}: unknown; one of {', '.join(LEVELS)}")
        if self.quant not in (None, *QUANTISATIONS):
            raise InputError(f"--quant {self.quant}: unknown; one of {', '.join(QUANTISATIONS)}")
        if self.calib is not None and self.quant != "awq-int4":
            raise InputError(f"--calib {self.calib}: only --quant awq-int4 looks at text")
        if (self.strip or self.weight_streaming is not None) and not any(
            backend.startswith("tensorrt") for backend in self.backends
        ):
            option = "--strip" if self.strip else "--weight-streaming"
            raise InputError(
                f"{option}: only TensorRT engines have it; --backend is {', '.join(self.backends)}"
            )
        # Refuses what can't be read; one spelling, so that another is no change.
        object.__setattr__(self, "target", ",".join(self.tensorrt.targets))
        for name in ("max_batch", "max_len", "max_chunk", "block_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"--{name.replace('_', '-')} is {value}; at least 1 was expected")

    @property
    def tensorrt(self) -> TensorRTOptions:
        streaming = parse_streaming(self.weight_streaming)
        return TensorRTOptions(parse_targets(self.target), self.strip, streaming)
