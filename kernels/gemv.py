"""One row times a matrix: y = x W^T for a single token, as a loop that Inductor writes itself
(CPU).

    x  [..., in_features], one row in all
    W  [out_features, in_features], or INT4 (kernels/int4)
    y  [..., out_features]

MKL's one-row product reads the weights at about a quarter of the memory bandwidth on the processors
measured (docs/cpu.md); the loop that Inductor generates from a multiply and a sum reads them two to
three times as fast, and decoding one sequence is nothing but reading weights. Used only in graphs
whose token count is 1.

`in_memory` is for torch code that Inductor compiles: the loops behind it read its result, where
Inductor would compute the norm or the activation again for every row of the matrix. (Inductor
stores sums anyway.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from seekforge.kernels.int4 import SYMMETRIC_ZERO, grouped
from seekforge.kernels.ops import register


def in_memory_reference(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


in_memory = register(
    "in_memory(Tensor x) -> Tensor",
    reference=in_memory_reference,
    fake=lambda x: torch.empty_like(x, memory_format=torch.contiguous_format),
)


def gemv_reference(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, weight)


def _fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


gemv = register("gemv(Tensor x, Tensor weight) -> Tensor", reference=gemv_reference, fake=_fake)


def int4_gemv_reference(
    x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor | None, chosen: Tensor | None
) -> Tensor:
    """x [rows, in_features], each row times an INT4 weight: [rows, out_features], fp32.

    chosen: [rows], which of the matrices [experts, out_features, ...] each row is for; None: rows
    is 1 and the weight is one matrix. Sums over (groups, bytes of a group).
    """
    parts = [qweight, scales] if zeros is None else [qweight, scales, zeros]
    q, scale, *zero = [part[None] if chosen is None else part[chosen] for part in parts]
    groups = scale.shape[-1]
    even, odd = (grouped(x[:, None, i::2].float(), groups) for i in (0, 1))
    q = grouped(q, groups).int()
    z = zero[0][..., None].int() if zero else SYMMETRIC_ZERO
    products = ((q & 15) - z).float() * even + ((q >> 4) - z).float() * odd
    return (products * scale[..., None].float()).sum((-1, -2))


def _int4_fake(
    x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor | None, chosen: Tensor | None
) -> Tensor:
    return x.new_empty(x.shape[0], qweight.shape[-2], dtype=torch.float32)


int4_gemv = register(
    "int4_gemv(Tensor x, Tensor qweight, Tensor scales, Tensor? zeros, Tensor? chosen) -> Tensor",
    reference=int4_gemv_reference,
    fake=_int4_fake,
)


def one_token_int4_linear(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    group_size: int,
) -> Tensor:
    """`int4_linear` for exactly one token in all, written for a compiler."""
    y: Tensor = int4_gemv(x.reshape(1, -1), qweight, scales, zeros, None)
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype).view(*x.shape[:-1], qweight.shape[0])
