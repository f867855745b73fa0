"""What quantisation costs: perplexities of fp32, plain rounding and AWQ on one text.

Everything is transformers' eager model in fp32 with the weights that INT4 decodes to, so the
figures are those of the numbers, whatever engine runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from seekforge.compile.export import export_checkpoint
from seekforge.compile.perplexity import perplexity
from seekforge.compile.reference import load_dequantised
from seekforge.compile.weights import Source
from seekforge.models.checkpoint import Checkpoint
from seekforge.models.module import load_eager
from seekforge.passes.int4 import Int4Options, insert_int4, int4_tensors
from seekforge.passes.pipeline import run_fusions


@dataclass(frozen=True, slots=True)
class Quality:
    """Perplexities on `tokens` predicted tokens. awq: None where there is no calibration."""

    tokens: int
    full: float
    rtn: float
    awq: float | None

    @property
    def recovered(self) -> float | None:
        """Share of plain rounding's loss that AWQ takes back."""
        if self.awq is None or self.rtn == self.full:
            return None
        return (self.rtn - self.awq) / (self.rtn - self.full)


def tensors_to_quantise(checkpoint: Checkpoint, options: Int4Options) -> dict[str, int]:
    """Group size of each checkpoint tensor that an engine would hold in INT4."""
    program = export_checkpoint(checkpoint, "float32", 64)
    run_fusions(program, 64)
    insert_int4(program, options)
    return int4_tensors(program)


def quality(
    checkpoint: Checkpoint,
    sizes: dict[str, int],
    symmetric: bool,
    dtype: torch.dtype,
    awq: Source | None,
    cut: Sequence[list[int]],
) -> Quality:
    """The perplexities on windows of tokens. dtype: of the stored scales."""
    quantization: dict[str, Any] = {"tensors": sizes, "symmetric": symmetric}

    def score(module: nn.Module) -> tuple[float, int]:
        return perplexity(partial(_logits, module), cut)

    full, tokens = score(load_eager(checkpoint.path, torch.float32))
    rtn, _ = score(load_dequantised(checkpoint, checkpoint, quantization, dtype))
    found = None
    if awq is not None:
        found, _ = score(load_dequantised(checkpoint, awq, quantization, dtype))
    return Quality(tokens, full, rtn, found)


@torch.inference_mode()
def _logits(module: nn.Module, tokens: list[int]) -> Tensor:
    logits: Tensor = module(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits
