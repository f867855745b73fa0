"""INT4 experts on tiles of tokens, for every group size and dtype; the slow form.

Serves what moe_int4_gemm.py and moe_int4_gemv.py refuse: groups that are not a power of two, rows
that are not whole words, fp32. Weights are decoded byte by byte and rounded once to bf16, or kept
in fp32 where x is fp16 or fp32, as the reference does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seekforge.kernels.moe_tiles import moe_combine_triton, moe_tiles_triton
from seekforge.kernels.swiglu import swiglu_reference
from seekforge.kernels.triton_support import jit, tl


@jit
def plain_product_kernel(  # type: ignore[no-untyped-def]
    a, pairs, tiles, weights, qweight, scales, zeros, out, top_k,
    ROWS: tl.constexpr, BYTES: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
    FIRST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """FIRST: a by token and out [pairs by expert]; else a so and out by pair, times its weight."""
    entry = tiles + tl.program_id(1) * 4
    expert = tl.load(entry).to(tl.int64)
    first = tl.load(entry + 1)
    count = tl.load(entry + 2)
    if count == 0:
        return
    m = tl.arange(0, BLOCK_M)
    slot = first + tl.where(m < count, m, 0)
    pair = tl.load(pairs + slot)
    a_row = (pair // top_k if FIRST else slot).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (n < ROWS)[:, None]
    row = expert * ROWS + n[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, BYTES, BLOCK_K):
        byte = start + tl.arange(0, BLOCK_K)
        a_at = a + a_row[None, :] * (2 * BYTES) + 2 * byte[:, None]
        even = tl.load(a_at, mask=(byte < BYTES)[:, None], other=0.0)
        odd = tl.load(a_at + 1, mask=(byte < BYTES)[:, None], other=0.0)
        if even.dtype != tl.bfloat16:
            even = even.to(tl.float32)
            odd = odd.to(tl.float32)
        mask = inside & (byte < BYTES)[None, :]
        q = tl.load(qweight + row * BYTES + byte[None, :], mask=mask, other=0).to(tl.int32)
        for high in tl.static_range(2):
            k = 2 * byte[None, :] + high
            at = row * (2 * BYTES // GROUP) + k // GROUP
            scale = tl.load(scales + at, mask=mask, other=0.0).to(tl.float32)
            value = ((q >> (4 * high)) & 15).to(tl.float32)
            if ZEROS:
                value -= tl.load(zeros + at, mask=mask, other=0).to(tl.float32)
            else:
                value -= 8.0
            w = (value * scale).to(even.dtype)
            acc = tl.dot(w, odd if high else even, acc, input_precision="ieee")
    if FIRST:
        at = slot
    else:
        at = pair
        acc *= tl.load(weights + pair)[None, :]
    mask = inside & (m < count)[None, :]
    tl.store(out + at[None, :].to(tl.int64) * ROWS + n[:, None], acc, mask=mask)


def moe_int4_plain_triton(
    x: Tensor, weights: Tensor, indices: Tensor,
    gate_up_q: Tensor, gate_up_scales: Tensor, gate_up_zeros: Tensor | None,
    down_q: Tensor, down_scales: Tensor, down_zeros: Tensor | None,
) -> Tensor:  # fmt: skip
    """All contiguous; x [tokens, hidden], weights in fp32."""
    tokens, hidden = x.shape
    top_k = indices.shape[-1]
    tile = 16
    pairs, tiles = moe_tiles_triton(indices, gate_up_q.shape[0], tile)

    def product(a: Tensor, q: Tensor, scales: Tensor, zeros: Tensor | None, first: bool) -> Tensor:
        out = x.new_empty(tokens * top_k, q.shape[1], dtype=torch.float32)
        plain_product_kernel[(-(-q.shape[1] // 64), tiles.shape[0])](
            a, pairs, tiles, weights, q, scales, scales if zeros is None else zeros, out, top_k,
            ROWS=q.shape[1], BYTES=q.shape[2], GROUP=2 * q.shape[2] // scales.shape[-1],
            ZEROS=zeros is not None, FIRST=first, BLOCK_M=tile, BLOCK_N=64, BLOCK_K=32, num_warps=2,
        )  # fmt: skip
        return out

    inner = swiglu_reference(product(x, gate_up_q, gate_up_scales, gate_up_zeros, True))
    if x.dtype is torch.bfloat16:
        inner = inner.to(x.dtype)
    parts = product(inner, down_q, down_scales, down_zeros, False)
    y = torch.empty_like(x)
    moe_combine_triton(parts.view(tokens, top_k, hidden), y)
    return y
