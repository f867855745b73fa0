"""What to build: the options of `build` and `check`, and what follows from them for one engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from seekforge.compile.bundle import TOKENIZER_FILES
from seekforge.compile.check_costs import Plan
from seekforge.compile.check_model import Subject
from seekforge.compile.export import DTYPES
from seekforge.compile.quantise import QUANTISATIONS
from seekforge.kernels.errors import InputError
from seekforge.models.checkpoint import INT4, Checkpoint
from seekforge.models.spec import check_max_len
from seekforge.passes.int4 import Int4Options
from seekforge.runtime.manifest import BACKENDS, Limits

FORMS = {
    "inductor": "ragged",
    "onnxruntime": "padded",
    "tensorrt": "padded",
    "tensorrt-rtx": "padded",
}
DEFAULT_MAX_LEN = 2048


@dataclass(frozen=True, slots=True)
class Options:
    """What to build.

    dtype "auto": float32 on the CPU, the checkpoint's own on a GPU, float16 for TensorRT.

    max_len: tokens of a sequence; None: the model's own, at most 2048. max_chunk: prefill tokens of
    a step. target: compute capability of tensorrt-rtx engines. quant: one of QUANTISATIONS, with
    the details in `int4`. calib: text (file or folder) for awq-int4; None: the built-in text.
    """

    backends: tuple[str, ...] = ("inductor", "onnxruntime", "tensorrt-rtx")
    dtype: str = "auto"
    device: str = "cpu"
    max_batch: int = 8
    max_len: int | None = None
    max_chunk: int = 512
    block_size: int = 16
    target: str = "8.9"
    verify: bool = True
    quant: str | None = None
    calib: Path | None = None
    int4: Int4Options = field(default_factory=Int4Options)

    def __post_init__(self) -> None:
        for backend in self.backends:
            if backend not in BACKENDS:
                raise InputError(f"--backend {backend}: unknown; one of {', '.join(BACKENDS)}")
        if not self.backends:
            raise InputError("no backend named; give at least one with --backend")
        if self.dtype not in ("auto", *DTYPES):
            raise InputError(f"--dtype {self.dtype}: unknown; one of auto, {', '.join(DTYPES)}")
        if self.device not in ("cpu", "cuda"):
            raise InputError(f"--device {self.device}: unknown; cpu or cuda")
        if self.quant not in (None, *QUANTISATIONS):
            raise InputError(f"--quant {self.quant}: unknown; one of {', '.join(QUANTISATIONS)}")
        if self.calib is not None and self.quant != "awq-int4":
            raise InputError(f"--calib {self.calib}: only --quant awq-int4 looks at text")
        for name in ("max_batch", "max_len", "max_chunk", "block_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"--{name.replace('_', '-')} is {value}; at least 1 was expected")


def limits_of(config: PreTrainedConfig, options: Options) -> Limits:
    """Raises InputError for a length that the model has not."""
    max_len = options.max_len or min(DEFAULT_MAX_LEN, config.max_position_embeddings)
    check_max_len(config, max_len)
    return Limits(max_len, options.max_batch, min(options.max_chunk, max_len))


def engine_dtype(config: PreTrainedConfig, options: Options, backend: str) -> str:
    if options.dtype != "auto":
        return options.dtype
    if backend.startswith("tensorrt"):
        return "float16"
    if options.device == "cpu":
        return "float32"
    stored = str(config.dtype).removeprefix("torch.")
    return stored if stored in DTYPES else "bfloat16"


def int4_options(checkpoint: Checkpoint | None, options: Options) -> Int4Options | None:
    """How weights become INT4: as the checkpoint has them, or as asked for; None: not at all.
    Raises InputError where both are said."""
    quant = checkpoint.quant if checkpoint is not None else None
    if quant is None or checkpoint is None:
        return None if options.quant is None else options.int4
    if options.quant is not None:
        raise InputError(
            f"--quant {options.quant}: {checkpoint.path} holds INT4 weights already "
            f"({quant.method}); leave --quant out, or give the unquantised checkpoint"
        )
    stored = frozenset(n for n, t in checkpoint.tensors.items() if t.dtype == INT4)
    # A group size of -1 is the whole row: larger than any.
    size = quant.group_size if quant.group_size > 0 else 1 << 30
    return Int4Options(size, quant.symmetric, (), stored)


def plan_of(subject: Subject, options: Options, backend: str) -> Plan:
    """The engine for one backend, as the predictions see it."""
    quant = subject.checkpoint.quant if subject.checkpoint else None
    files = [subject.path / name for name in TOKENIZER_FILES] if subject.checkpoint else []
    return Plan(
        backend=backend,
        device=options.device,
        dtype=engine_dtype(subject.config, options, backend),
        limits=limits_of(subject.config, options),
        int4=options.quant or (quant.method if quant else None),
        executed=options.verify
        and (not backend.startswith("tensorrt") or torch.cuda.is_available()),
        spec=subject.spec,
        tokenizer_bytes=sum(file.stat().st_size for file in files if file.is_file()),
    )
