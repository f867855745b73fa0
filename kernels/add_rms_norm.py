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
from seekforge.kernels.rms_norm import rms_norm_reference
from seekforge.kernels.triton_support import jit, next_power_of_2, tl


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm_reference(total, weight, eps), total


@jit
def add_rms_norm_kernel(x, residual, weight, y, total, hidden, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    at = row * hidden + column
    left = tl.load(x + at, mask=inside, other=0.0)
    right = tl.load(residual + at, mask=inside, other=0.0)
    value = (left.to(tl.float32) + right.to(tl.float32)).to(left.dtype)
    tl.store(total + at, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / hidden + eps)
    normed = (wide * scale).to(value.dtype)
    gain = tl.load(weight + column, mask=inside, other=0.0)
    product = gain.to(tl.float32) * normed.to(tl.float32)
    tl.store(y + at, product.to(value.dtype), mask=inside)


def add_rms_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    x, residual = x.contiguous(), residual.contiguous()
    y, total = torch.empty_like(x), torch.empty_like(x)
    hidden = x.shape[-1]
    rows = x.numel() // hidden
    add_rms_norm_kernel[(rows,)](
        x, residual, weight.contiguous(), y, total, hidden, eps, BLOCK=next_power_of_2(hidden)
    )
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
