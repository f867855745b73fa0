"""What quantisation costs: perplexities of fp32, plain rounding and AWQ on one text.

Plain rounding is measured twice where it is symmetric: with the scales that elsewhere are the rule,
a group's largest magnitude / 7, and with those of kernels/int4, which use all sixteen values.
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
from seekforge.kernels.int4 import SYMMETRIC_ZERO, Int4, clipped_groups, pack
from seekforge.models.checkpoint import Checkpoint
from seekforge.models.module import load_eager
from seekforge.passes.int4 import Int4Options, insert_int4, int4_tensors
from seekforge.passes.pipeline import run_fusions


@dataclass(frozen=True, slots=True)
class Quality:
    """Perplexities on `tokens` predicted tokens. common: of plain rounding with the common scales,
    None where it is asymmetric (the common scales are ours). awq: None without calibration."""

    tokens: int
    full: float
    common: float | None
    rtn: float
    awq: float | None

    def recovered(self, plain: float | None) -> float | None:
        """Share of what plain rounding lost that AWQ takes back."""
        if self.awq is None or plain is None or plain == self.full:
            return None
        return (plain - self.awq) / (plain - self.full)


@dataclass(frozen=True, slots=True)
class CommonRounding:
    """A checkpoint rounded symmetrically with scales of a group's largest magnitude / 7."""

    checkpoint: Checkpoint

    def digest(self) -> str:
        return self.checkpoint.digest()

    def read(self, name: str) -> Tensor:
        return self.checkpoint.read(name)

    def int4(self, name: str, group_size: int, symmetric: bool, dtype: torch.dtype) -> Int4:
        assert symmetric, "asymmetric scales are the common ones"
        values = clipped_groups(self.read(name), group_size)
        scales = (values.abs().amax(-1) / 7).to(dtype)
        scales = torch.where(scales > 0, scales, 1.0)
        q = (values / scales[..., None].float()).round().clamp(-8, 7) + SYMMETRIC_ZERO
        return Int4(pack(q.to(torch.uint8).flatten(-2)), scales)


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
    common = None
    if symmetric:
        common, _ = score(
            load_dequantised(checkpoint, CommonRounding(checkpoint), quantization, dtype)
        )
    rtn, _ = score(load_dequantised(checkpoint, checkpoint, quantization, dtype))
    found = None
    if awq is not None:
        found, _ = score(load_dequantised(checkpoint, awq, quantization, dtype))
    return Quality(tokens, full, common, rtn, found)


@torch.inference_mode()
def _logits(module: nn.Module, tokens: list[int]) -> Tensor:
    logits: Tensor = module(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits
