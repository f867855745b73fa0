"""A linear layer with a plain weight: y = x W^T + bias.

    x     [..., in_features]                float32, bfloat16 or float16
    W     [out_features, in_features]       dtype of x, or float32
    bias  [out_features] or None            dtype of W
    y     [..., out_features]               dtype of W

On the GPU one token goes through linear_one, which overlaps with the launch before it; a few tokens
through linear_few where that was found to be faster than torch's (cuBLAS), which computes the
others. It is an
operator so that this choice is made at each call and not when the graph is compiled, whose number
of tokens is dynamic; compile/inductor.py puts it in place of aten.linear in packages for the GPU.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from seekforge.kernels.hopper import is_hopper
from seekforge.kernels.linear_few import MOST, few_config, few_rows
from seekforge.kernels.linear_one import one_row
from seekforge.kernels.ops import register


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.to(weight.dtype), weight, bias)


def linear_triton(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.numel() // max(1, x.shape[-1])
    if not rows or rows > MOST or not (x.is_contiguous() and weight.is_contiguous()):
        return linear_reference(x, weight, bias)
    few = None
    if rows > 1:
        # Tiles were chosen for two bytes a value and Hopper's shared memory.
        fits = x.dtype == weight.dtype and x.element_size() == 2 and is_hopper(x.device)
        few = few_config(rows, x.shape[-1], weight.shape[0]) if fits else None
        if few is None:
            return linear_reference(x, weight, bias)
    y = weight.new_empty(*x.shape[:-1], weight.shape[0])
    if few is None:
        one_row(x, weight, bias, y)
    else:
        few_rows(x.view(rows, -1), weight, bias, y.view(rows, -1), few)
    return y


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return weight.new_empty(*x.shape[:-1], weight.shape[0])


linear = register(
    "linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    reference=linear_reference,
    fake=_fake,
    cuda=linear_triton,
)
