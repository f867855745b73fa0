"""RMSNorm: y = weight * (x / sqrt(mean(x^2) + eps)), the mean over the last dimension.

    x       [..., hidden]  float32, bfloat16 or float16
    weight  [hidden]
    y       [..., hidden]  dtype of x

The order of the casts is that of transformers' `LlamaRMSNorm`: normalise in fp32, cast to the dtype
of x, then multiply by the weight. Multiplying in fp32 first changes a quarter of the bf16 results.
Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seekforge.kernels.ops import register
from seekforge.kernels.triton_support import jit, next_power_of_2, tl


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


@jit
def rms_norm_kernel(x, weight, y, hidden, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    value = tl.load(x + row * hidden + column, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / hidden + eps)
    normed = (wide * scale).to(value.dtype)
    gain = tl.load(weight + column, mask=inside, other=0.0)
    product = gain.to(tl.float32) * normed.to(tl.float32)  # exact, so it is rounded once
    tl.store(y + row * hidden + column, product.to(value.dtype), mask=inside)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    hidden = x.shape[-1]
    rows = x.numel() // hidden
    rms_norm_kernel[(rows,)](x, weight.contiguous(), y, hidden, eps, BLOCK=next_power_of_2(hidden))
    return y


def _fake(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


rms_norm = register(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    reference=rms_norm_reference,
    fake=_fake,
    cuda=rms_norm_triton,
)
