"""Residual add and RMSNorm in one pass: sum = x + residual, y = rms_norm(sum, weight, eps).

    x, residual  [..., hidden]  one shape, one dtype
    weight       [hidden]
    y, sum       [..., hidden]  dtype of x

The sum is rounded to the dtype of x before it is normalised, as transformers' decoder layers do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seekforge.kernels.ops import register
from seekforge.kernels.rms_norm import Tile, normalise, rms_norm_reference, tuned_tile
from seekforge.kernels.triton_support import jit, next_power_of_2, tl
from seekforge.kernels.tuning import overlaps_launches


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm_reference(total, weight, eps), total


@jit
def add_rms_norm_kernel(  # type: ignore[no-untyped-def]
    x, residual, weight, y, total, rows, eps, weight_step, HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None]
    if HIDDEN != BLOCK:
        inside = inside & (column < HIDDEN)[None, :]
    gain = tl.load(weight + column * weight_step, mask=column < HIDDEN, other=0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = row[:, None] * HIDDEN + column[None, :]
    left = tl.load(x + at, mask=inside, other=0.0)
    right = tl.load(residual + at, mask=inside, other=0.0)
    value = (left.to(tl.float32) + right.to(tl.float32)).to(left.dtype)
    tl.store(total + at, value, mask=inside)
    tl.store(y + at, normalise(value, gain, eps, HIDDEN), mask=inside)


def add_rms_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """Starts before the launch before it has ended; the weight must be older than that one."""
    x, residual = x.contiguous(), residual.contiguous()
    y, total = torch.empty_like(x), torch.empty_like(x)
    hidden = x.shape[-1]
    if x.numel() == 0:
        return y, total
    rows = x.numel() // hidden
    tile = tile or tuned_tile("add_rms_norm", rows, hidden)
    overlap = overlaps_launches(x.device)
    add_rms_norm_kernel[(-(-rows // tile.rows),)](
        x, residual, weight, y, total, rows, eps, weight.stride(0), HIDDEN=hidden,
        BLOCK=next_power_of_2(hidden), ROWS=tile.rows, OVERLAP=overlap, num_warps=tile.warps,
        **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip
    return y, total


def _fake(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        torch.empty_like(x, memory_format=torch.contiguous_format),
    )


add_rms_norm = register(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    reference=add_rms_norm_reference,
    fake=_fake,
    cuda=add_rms_norm_triton,
)
