"""What follows from the options of a build for one engine: limits, dtype, INT4, its plan."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig

from seekforge.compile.bundle import TOKENIZER_FILES
from seekforge.compile.check_costs import Plan
from seekforge.compile.check_model import Subject
from seekforge.compile.export import DTYPES
from seekforge.compile.options import Options
from seekforge.compile.verify_level import cheap_layers
from seekforge.kernels.errors import InputError
from seekforge.models.checkpoint import INT4, Checkpoint
from seekforge.models.spec import check_max_len
from seekforge.passes.int4_options import Int4Options
from seekforge.runtime.manifest import Limits

DEFAULT_MAX_LEN = 2048


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
        executed=options.verify != "none"
        and (not backend.startswith("tensorrt") or torch.cuda.is_available()),
        spec=subject.spec,
        tokenizer_bytes=sum(file.stat().st_size for file in files if file.is_file()),
        streaming_bytes=options.tensorrt.streaming_bytes
        if backend.startswith("tensorrt")
        else None,
        verify=options.verify,
        proven=_proven(subject, options.verify),
    )


def _proven(subject: Subject, level: str) -> int:
    count, _ = cheap_layers(subject)
    return count if level == "cheap" and count < subject.spec.num_layers else 0
