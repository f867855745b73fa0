"""RMSNorm: y = weight * (x / sqrt(mean(x^2) + eps)), the mean over the last dimension.

    x       [..., hidden]  float32, bfloat16 or float16
    weight  [hidden]
    y       [..., hidden]  dtype of x

The order of the casts is that of transformers' `LlamaRMSNorm`: normalise in fp32, cast to the dtype
of x, then multiply by the weight. Multiplying in fp32 first changes a quarter of the bf16 results.
Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from seekforge.kernels.ops import register
from seekforge.kernels.triton_support import jit, next_power_of_2, tl
from seekforge.kernels.tuning import first, overlaps_launches


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


@jit
def normalise(value, gain, eps, HIDDEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """value [rows, columns], zero beyond HIDDEN columns; gain [columns]."""
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / HIDDEN + eps)
    normed = (wide * scale[:, None]).to(value.dtype)
    product = gain.to(tl.float32)[None, :] * normed.to(tl.float32)  # exact, so it is rounded once
    return product.to(value.dtype)


@jit
def rms_norm_kernel(  # type: ignore[no-untyped-def]
    x, weight, y, rows, eps, x_outer, x_inner, weight_step, INNER: tl.constexpr,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
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
    x_row = row // INNER * x_outer + row % INNER * x_inner
    value = tl.load(x + x_row[:, None] + column[None, :], mask=inside, other=0.0)
    result = normalise(value, gain, eps, HIDDEN)
    tl.store(y + row[:, None] * HIDDEN + column[None, :], result, mask=inside)


@dataclass(frozen=True, slots=True)
class Tile:
    """A program's tile of an elementwise kernel: rows, Triton's num_warps."""

    rows: int
    warps: int


def norm_tile(op: str, rows: int, hidden: int, row: Mapping[str, int] | None = None) -> Tile:
    """Of a row of h200.json, found by the number of rows, or of the one given: `per_thread` values
    in each thread, and rows together up to `block` values. Without one 8 values and 1024."""
    row = row or first(op, rows=rows) or {"per_thread": 8, "block": 1024}
    width = next_power_of_2(hidden)
    together = max(1, min(row["block"] // width, next_power_of_2(rows)))
    warps = max(1, min(32, width * together // (32 * row["per_thread"])))
    return Tile(together, warps)


@functools.lru_cache(maxsize=4096)
def tuned_tile(op: str, rows: int, hidden: int) -> Tile:
    return norm_tile(op, rows, hidden)


def as_rows(x: Tensor) -> tuple[Tensor, int, int, int]:
    """x, or where need be a contiguous copy, whose row i starts at
    i // inner * outer + i % inner * step: -> (x, inner, outer, step).

    The heads of a fused projection are such rows, read in place.
    """
    if not x.is_contiguous():
        strides, shape = x.stride(), x.shape
        if x.dim() == 2 and strides[1] == 1:
            return x, 1, strides[0], 0
        even = (
            shape[i] == 1 or strides[i] == strides[i + 1] * shape[i + 1] for i in range(x.dim() - 3)
        )
        if x.dim() > 2 and strides[-1] == 1 and all(even):
            return x, shape[-2], strides[-3], strides[-2]
        x = x.contiguous()
    return x, 1, x.shape[-1], 0


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float, tile: Tile | None = None) -> Tensor:
    """Starts before the launch before it has ended; the weight must be older than that one."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    hidden = x.shape[-1]
    if y.numel() == 0:
        return y
    rows = x.numel() // hidden
    x, inner, x_outer, x_inner = as_rows(x)
    tile = tile or tuned_tile("rms_norm", rows, hidden)
    overlap = overlaps_launches(x.device)
    rms_norm_kernel[(-(-rows // tile.rows),)](
        x, weight, y, rows, eps, x_outer, x_inner, weight.stride(0), INNER=inner, HIDDEN=hidden,
        BLOCK=next_power_of_2(hidden), ROWS=tile.rows, OVERLAP=overlap, num_warps=tile.warps,
        **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip
    return y


def _fake(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


rms_norm = register(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    reference=rms_norm_reference,
    fake=_fake,
    cuda=rms_norm_triton,
)
