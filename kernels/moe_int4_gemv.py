"""INT4 experts on few tokens as matrix-vector products: moe_gemv.py with weights of kernels/int4.

Weights are read as words of eight nibbles and decoded to exact integers in fp32: a nibble stands in
the low mantissa bits of a power of two, from which the power is subtracted. That is one logical
operation and one subtraction for a weight, and the nibbles 5-7 share a shift. Sums of integer
times x are multiplied by the group's scale, SHARE words at a time.

`inner` is fp32 [tokens, 8, top_k * intermediate / 8]: the values that meet the nibbles of one place
are neighbours, so that the second kernel loads them as it loads the words. It reads the experts of
a token as one row of words; a block of them lies in two experts at most.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seekforge.kernels.moe_config import GemvConfig
from seekforge.kernels.moe_gemv import chunk_sums, silu
from seekforge.kernels.moe_int4_gemm import as_words
from seekforge.kernels.triton_support import jit, tl
from seekforge.kernels.tuning import overlaps_launches


@jit
def nibble(words, PLACE: tl.constexpr, BIAS: tl.constexpr, COMPILED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Nibble PLACE of int32 words, less BIAS, as fp32. COMPILED: one instruction where two
    constants would else make two."""
    near: tl.constexpr = PLACE if PLACE < 5 else PLACE - 3
    moved = words if PLACE < 5 else words >> 12
    power: tl.constexpr = (150 - 4 * near) << 23  # 2^(23 - 4 near): its last place is bit 4 near
    mask: tl.constexpr = 15 << (4 * near)
    if COMPILED:
        bits = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xea;", "=r,r,r,r", [moved, mask, power], tl.int32,
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        bits = (moved & mask) | power
    return bits.to(tl.float32, bitcast=True) - (2.0 ** (23 - 4 * near) + BIAS)


@jit
def word_sums(  # type: ignore[no-untyped-def]
    words, a, at, scales, zeros, mask, ZEROS: tl.constexpr, ROWS: tl.constexpr,
    WORDS: tl.constexpr, SHARE: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """words [ROWS, WORDS], a: 8 of [WORDS] fp32 -> [ROWS, WORDS / SHARE], sums of weight * a.

    at: [ROWS, WORDS / SHARE], where in `scales` and `zeros` each sum's group is.
    """
    BIAS: tl.constexpr = 0.0 if ZEROS else 8.0
    sums = nibble(words, 0, BIAS, COMPILED) * a[0][None, :]
    for place in tl.static_range(1, 8):
        sums += nibble(words, place, BIAS, COMPILED) * a[place][None, :]
    sums = chunk_sums(sums, ROWS, WORDS, SHARE)
    scale = tl.load(scales + at, mask=mask, other=0.0).to(tl.float32)
    if ZEROS:
        total = (a[0] + a[1]) + (a[2] + a[3]) + ((a[4] + a[5]) + (a[6] + a[7]))
        zero = tl.load(zeros + at, mask=mask, other=0).to(tl.float32)
        sums -= zero * chunk_sums(total[None, :], 1, WORDS, SHARE)
    return sums * scale


@jit
def eight(a, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """[8 * WORDS] -> 8 of [WORDS]: every eighth value."""
    even, odd = tl.split(tl.reshape(a, (WORDS, 2, 2, 2)))
    a0, a2 = tl.split(even)
    a1, a3 = tl.split(odd)
    b0, b4 = tl.split(a0)
    b1, b5 = tl.split(a1)
    b2, b6 = tl.split(a2)
    b3, b7 = tl.split(a3)
    return b0, b1, b2, b3, b4, b5, b6, b7


@jit
def gate_up_int4_gemv_kernel(  # type: ignore[no-untyped-def]
    x, weights, indices, qweight, scales, zeros, inner, top_k,
    HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr, GROUP_WORDS: tl.constexpr,
    ZEROS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SHARE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1).to(tl.int64)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(indices + pair).to(tl.int64)
    WORDS: tl.constexpr = HIDDEN // 8
    GROUPS: tl.constexpr = WORDS // GROUP_WORDS
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < INTERMEDIATE
    row = expert * (2 * INTERMEDIATE) + n[:, None]
    x_row = x + pair // top_k * HIDDEN
    gate = tl.zeros((BLOCK_N, BLOCK_K // SHARE), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_K // SHARE), tl.float32)
    for start in tl.static_range(0, WORDS, BLOCK_K):
        word = start + tl.arange(0, BLOCK_K)[None, :]
        mask = inside[:, None] & (word < WORDS)
        g = tl.load(qweight + row * WORDS + word, mask=mask, other=0)
        u = tl.load(qweight + (row + INTERMEDIATE) * WORDS + word, mask=mask, other=0)
        k = 8 * start + tl.arange(0, 8 * BLOCK_K)
        a = eight(tl.load(x_row + k, mask=k < HIDDEN, other=0.0).to(tl.float32), BLOCK_K)
        share = start + tl.arange(0, BLOCK_K // SHARE)[None, :] * SHARE
        mask = inside[:, None] & (share < WORDS)
        at = row * GROUPS + share // GROUP_WORDS
        gate += word_sums(g, a, at, scales, zeros, mask, ZEROS, BLOCK_N, BLOCK_K, SHARE, OVERLAP)
        at += INTERMEDIATE * GROUPS
        up += word_sums(u, a, at, scales, zeros, mask, ZEROS, BLOCK_N, BLOCK_K, SHARE, OVERLAP)
    activated = silu(tl.sum(gate, axis=1)) * tl.sum(up, axis=1) * tl.load(weights + pair)
    width = top_k * (INTERMEDIATE // 8)
    at = (pair // top_k * 8 + n % 8) * width + pair % top_k * (INTERMEDIATE // 8) + n // 8
    tl.store(inner + at, activated, mask=inside)


@jit
def down_int4_gemv_kernel(  # type: ignore[no-untyped-def]
    inner, indices, qweight, scales, zeros, y,
    HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr, GROUP_WORDS: tl.constexpr,
    TOP_K: tl.constexpr, ZEROS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SHARE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    WORDS: tl.constexpr = INTERMEDIATE // 8
    WIDTH: tl.constexpr = TOP_K * WORDS
    GROUPS: tl.constexpr = WORDS // GROUP_WORDS
    k = tl.arange(0, BLOCK_K)
    share = tl.arange(0, BLOCK_K // SHARE)[None, :] * SHARE
    acc = tl.zeros((BLOCK_N, BLOCK_K // SHARE), tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for start in tl.static_range(0, WIDTH, BLOCK_K):
        # The block begins in expert `slot` and may end in the next one.
        slot = start // WORDS
        other = tl.minimum(slot + 1, TOP_K - 1)
        end = (slot + 1) * WORDS - start  # where the next one begins
        row = tl.load(indices + token * TOP_K + slot).to(tl.int64) * HIDDEN + n
        next_row = tl.load(indices + token * TOP_K + other).to(tl.int64) * HIDDEN + n
        first = row * WORDS + (start - slot * WORDS)
        second = next_row * WORDS - end
        at = tl.where((k < end)[None, :], first, second) + k[None, :]
        at = tl.max_contiguous(tl.multiple_of(at, (1, SHARE)), (1, SHARE))
        mask = (n < HIDDEN) & (start + k < WIDTH)[None, :]
        words = tl.load(qweight + at, mask=mask, other=0)
        a_at = inner + token * (8 * WIDTH) + start + k
        valid = start + k < WIDTH
        a = (
            tl.load(a_at, mask=valid, other=0.0), tl.load(a_at + WIDTH, mask=valid, other=0.0),
            tl.load(a_at + 2 * WIDTH, mask=valid, other=0.0),
            tl.load(a_at + 3 * WIDTH, mask=valid, other=0.0),
            tl.load(a_at + 4 * WIDTH, mask=valid, other=0.0),
            tl.load(a_at + 5 * WIDTH, mask=valid, other=0.0),
            tl.load(a_at + 6 * WIDTH, mask=valid, other=0.0),
            tl.load(a_at + 7 * WIDTH, mask=valid, other=0.0),
        )  # fmt: skip
        own = share < end
        group = tl.where(own, share + (start - slot * WORDS), share - end) // GROUP_WORDS
        at = tl.where(own, row * GROUPS, next_row * GROUPS) + group
        mask = (n < HIDDEN) & (start + share < WIDTH)
        acc += word_sums(words, a, at, scales, zeros, mask, ZEROS, BLOCK_N, BLOCK_K, SHARE, OVERLAP)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.sum(acc, axis=1).to(y.dtype.element_ty)
    tl.store(y + token * HIDDEN + n, total, mask=n < HIDDEN)


def moe_int4_gemv_triton(
    x: Tensor, weights: Tensor, indices: Tensor,
    gate_up_q: Tensor, gate_up_scales: Tensor, gate_up_zeros: Tensor | None,
    down_q: Tensor, down_scales: Tensor, down_zeros: Tensor | None, config: GemvConfig,
) -> Tensor:  # fmt: skip
    """All contiguous; x [tokens, hidden], weights in fp32. See `in_words` for the shapes taken."""
    tokens, hidden = x.shape
    top_k, intermediate = indices.shape[-1], 2 * down_q.shape[-1]
    inner = x.new_empty(tokens, 8, top_k * intermediate // 8, dtype=torch.float32)
    y = torch.empty_like(x)
    overlap = overlaps_launches(x.device)
    shared = {
        "HIDDEN": hidden, "INTERMEDIATE": intermediate, "OVERLAP": overlap,
        **({"launch_pdl": True} if overlap else {}),
    }  # fmt: skip
    words = hidden // gate_up_scales.shape[-1] // 8
    gate_up_int4_gemv_kernel[(-(-intermediate // config.n), tokens * top_k)](
        x, weights, indices, as_words(gate_up_q, torch.int32), gate_up_scales,
        gate_up_scales if gate_up_zeros is None else gate_up_zeros, inner, top_k,
        GROUP_WORDS=words, ZEROS=gate_up_zeros is not None, BLOCK_N=config.n, BLOCK_K=config.k,
        SHARE=share(words, hidden), num_warps=config.warps, **shared,
    )  # fmt: skip
    words = intermediate // down_scales.shape[-1] // 8
    block = config.down_k
    while block > intermediate // 8:
        block //= 2
    down_int4_gemv_kernel[(-(-hidden // config.down_n), tokens)](
        inner, indices, as_words(down_q, torch.int32), down_scales,
        down_scales if down_zeros is None else down_zeros, y,
        GROUP_WORDS=words, TOP_K=top_k, ZEROS=down_zeros is not None, BLOCK_N=config.down_n,
        BLOCK_K=block, SHARE=min(block, share(words, intermediate)), num_warps=config.down_warps,
        **shared,
    )  # fmt: skip
    return y


def share(group_words: int, columns: int) -> int:
    """Words that one load may take and that lie in one group and one row: 4, 2 or 1."""
    return next(n for n in (4, 2, 1) if group_words % n == 0 and columns // 8 % n == 0)


def in_words(hidden: int, intermediate: int, gate_up_groups: int, down_groups: int) -> bool:
    """Whether rows and groups are whole words of eight weights."""
    return hidden % (8 * gate_up_groups) == 0 and intermediate % (8 * down_groups) == 0
