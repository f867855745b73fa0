"""A linear layer with an INT4 weight (format: kernels/int4): y = x W^T + bias.

    x        [..., in_features]                           float32, bfloat16 or float16
    qweight  [out_features, in_features / 2]              uint8
    scales   [out_features, in_features / group_size]     dtype of x
    zeros    like scales, uint8, or None: symmetric
    bias     [out_features] or None
    y        [..., out_features]                          dtype of x

W is rounded once to the dtype of x, the products are summed in fp32. The even and the odd input
features (low and high nibbles) are multiplied apart, which is the same sum in another order: no
loop has to weave two streams of nibbles into one. On Hopper and later, int4_gemm_plan chooses
among kernels for few rows (int4_gemv), many (int4_gemm_hopper) and a decoded weight
(int4_gemm_dense); elsewhere, in fp32 and for odd group sizes the kernel here serves.

torch's own INT4 product for the CPU is not used: its packing depends on the processor, its fp32
form is scalar code (0.1 GB/s of weights), and its bf16 form takes twice the time of a plain bf16
product at 512 rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from seekforge.kernels.int4 import SYMMETRIC_ZERO, Int4, grouped
from seekforge.kernels.int4_gemm_dense import dense
from seekforge.kernels.int4_gemm_hopper import many_tokens
from seekforge.kernels.int4_gemm_plan import Plan, plan
from seekforge.kernels.int4_gemv import Few, few_tokens
from seekforge.kernels.int4_layout import readable, supports
from seekforge.kernels.ops import register
from seekforge.kernels.triton_support import jit, next_power_of_2, tl

CHUNK = 1 << 20  # weights decoded at a time on the CPU: 4 MB in fp32, which stay in its caches


def even_odd(x: Tensor) -> Tensor:
    """The last dimension reordered: even features, then odd ones."""
    return torch.cat((x[..., 0::2], x[..., 1::2]), -1)


def decode_even_odd(
    qweight: Tensor, scales: Tensor, zeros: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The weight in `dtype`, [out_features, in_features], columns in the order of `even_odd`."""
    q = grouped(torch.stack((qweight & 15, qweight >> 4), -2), scales.shape[-1])
    # In bytes that wrap around, read as signed: two passes over fp32 values fewer.
    q = q - (SYMMETRIC_ZERO if zeros is None else zeros[..., None, :, None])
    wide = q.view(torch.int8).float().mul_(scales[..., None, :, None].float())
    return wide.flatten(-3).to(dtype)


def inlined_int4_linear(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    group_size: int,
) -> Tensor:
    """The formula without loops, for a compiler: one pass that decodes, then one product."""
    return linear(even_odd(x), decode_even_odd(qweight, scales, zeros, x.dtype), bias)


def int4_linear_reference(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    group_size: int,
) -> Tensor:
    rows = even_odd(x.reshape(-1, x.shape[-1]))
    y = rows.new_empty(rows.shape[0], qweight.shape[0])
    step = max(1, CHUNK // x.shape[-1])
    for start in range(0, qweight.shape[0], step):
        part = slice(start, start + step)
        zero = None if zeros is None else zeros[part]
        decoded = decode_even_odd(qweight[part], scales[part], zero, x.dtype)
        y[:, part] = linear(rows, decoded, None if bias is None else bias[part])
    return y.view(*x.shape[:-1], qweight.shape[0])


@jit
def int4_linear_kernel(  # type: ignore[no-untyped-def]
    x, qweight, scales, zeros, bias, y, rows, out_features, in_features, group_size,
    ZEROS: tl.constexpr, BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    packed, groups = in_features // 2, in_features // group_size
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, packed, BLOCK_K):
        byte = start + tl.arange(0, BLOCK_K)
        inside = byte < packed
        at = row[:, None] * in_features + 2 * byte[None, :]
        mask = (row < rows)[:, None] & inside[None, :]
        even = tl.load(x + at, mask=mask, other=0.0)
        odd = tl.load(x + at + 1, mask=mask, other=0.0)
        mask = inside[:, None] & (column < out_features)[None, :]
        q = tl.load(qweight + column[None, :] * packed + byte[:, None], mask=mask, other=0)
        q = q.to(tl.int32)
        group = column[None, :] * groups + (2 * byte // group_size)[:, None]
        scale = tl.load(scales + group, mask=mask, other=0.0).to(tl.float32)
        zero = tl.full((BLOCK_K, BLOCK_N), 8, tl.int32)
        if ZEROS:
            zero = tl.load(zeros + group, mask=mask, other=0).to(tl.int32)
        low = (((q & 15) - zero).to(tl.float32) * scale).to(even.dtype)
        high = (((q >> 4) - zero).to(tl.float32) * scale).to(even.dtype)
        acc = tl.dot(even, low, acc, input_precision="ieee")
        acc = tl.dot(odd, high, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + column, mask=column < out_features, other=0.0).to(tl.float32)[None, :]
    mask = (row < rows)[:, None] & (column < out_features)[None, :]
    at = row[:, None] * out_features + column[None, :]
    tl.store(y + at, acc.to(y.dtype.element_ty), mask=mask)


def int4_linear_plain(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    group_size: int,
) -> Tensor:
    """The kernel above: any group size, dtype and GPU. All tensors contiguous."""
    out_features, in_features = qweight.shape[0], x.shape[-1]
    y = x.new_empty(*x.shape[:-1], out_features)
    rows = y.numel() // out_features
    if not rows:
        return y
    block_m = min(64, max(16, next_power_of_2(rows)))  # tl.dot takes 16 rows at least
    block_n, block_k = 64, 32
    grid = (-(-rows // block_m), -(-out_features // block_n))
    int4_linear_kernel[grid](
        x, qweight, scales, qweight if zeros is None else zeros, x if bias is None else bias,
        y, rows, out_features, in_features, group_size,
        ZEROS=zeros is not None, BIAS=bias is not None,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
    )  # fmt: skip
    return y


def int4_linear_planned(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    config: Plan,
) -> Tensor:
    """With the kernel told; those that int4_layout `supports`. All but x contiguous."""
    if config is not None:
        rows = readable(x.reshape(-1, x.shape[-1]))
        y = x.new_empty(*x.shape[:-1], qweight.shape[0])
        if isinstance(config, Few):
            few_tokens(rows, qweight, scales, zeros, bias, y, config)
            return y
        if many_tokens(rows, qweight, scales, zeros, bias, y, config):
            return y
    return dense(x, Int4(qweight, scales, zeros), bias)


def int4_linear_triton(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    group_size: int,
) -> Tensor:
    qweight, scales = qweight.contiguous(), scales.contiguous()
    zeros = None if zeros is None else zeros.contiguous()
    bias = None if bias is None else bias.contiguous()
    rows, in_features = x.numel() // x.shape[-1], x.shape[-1]
    if not rows or not supports(x, group_size):
        return int4_linear_plain(x.contiguous(), qweight, scales, zeros, bias, group_size)
    config = plan(rows, qweight.shape[0], in_features)
    return int4_linear_planned(x, qweight, scales, zeros, bias, config)


def _fake(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    group_size: int,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], qweight.shape[0])


int4_linear = register(
    "int4_linear(Tensor x, Tensor qweight, Tensor scales, Tensor? zeros, Tensor? bias, "
    "int group_size) -> Tensor",
    reference=int4_linear_reference,
    fake=_fake,
    cuda=int4_linear_triton,
)
