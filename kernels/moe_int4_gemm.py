"""INT4 experts on tiles of tokens: moe_gemm.py with weights of kernels/int4.

Weights are read as 16-bit words of four nibbles: the nibbles of one place are a matrix of their own
whose columns are every fourth feature, so four products with every fourth x make one, and no loop
weaves nibbles. A nibble's integer, less its zero point, is exact in 16 bits; a group's sum is
multiplied by its scale in fp32. x is read as words of four values for the same reason.

inner is bf16 [planes, pairs, intermediate]; for fp16 x, whose 65504 products pass, two planes (high
and low part, 16 bits together, exact beside small integers in bf16).
Groups must be 64, 128 or another 4 * 2^i >= 64 features, and x of 16 bits: `takes` tells. What it
refuses is served by moe_int4_plain.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seekforge.kernels.moe_config import GemmConfig
from seekforge.kernels.moe_gemv import silu
from seekforge.kernels.moe_tiles import moe_combine_triton, moe_tiles_triton
from seekforge.kernels.triton_support import jit, next_power_of_2, tl
from seekforge.kernels.tuning import overlaps_launches


@jit
def four(words, offset, KIND: tl.constexpr, COMPILED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The nibbles of int16 words, each less its zero point: 4 tensors of bf16 or fp16 ("fp16").

    A nibble in the low bits of 128 (bf16) or 1024 (fp16) is that number plus the nibble; offset is
    the same number plus the zero point. COMPILED: in PTX, two words at a time.
    """
    if COMPILED:
        if KIND == "fp16":
            a, b, c, d = tl.inline_asm_elementwise(
                """{ .reg .b32 t, m; mov.b32 m, 0x64006400;
                lop3.b32 $0, $4, 0x000f000f, m, 0xea; sub.f16x2 $0, $0, $5;
                shr.b32 t, $4, 4; lop3.b32 $1, t, 0x000f000f, m, 0xea; sub.f16x2 $1, $1, $5;
                shr.b32 t, $4, 8; lop3.b32 $2, t, 0x000f000f, m, 0xea; sub.f16x2 $2, $2, $5;
                shr.b32 t, $4, 12; lop3.b32 $3, t, 0x000f000f, m, 0xea; sub.f16x2 $3, $3, $5; }""",
                "=&r,=&r,=&r,=&r,r,r", [words, offset],
                (tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            a, b, c, d = tl.inline_asm_elementwise(
                """{ .reg .b32 t, m; mov.b32 m, 0x43004300;
                lop3.b32 $0, $4, 0x000f000f, m, 0xea; sub.bf16x2 $0, $0, $5;
                shr.b32 t, $4, 4; lop3.b32 $1, t, 0x000f000f, m, 0xea; sub.bf16x2 $1, $1, $5;
                shr.b32 t, $4, 8; lop3.b32 $2, t, 0x000f000f, m, 0xea; sub.bf16x2 $2, $2, $5;
                shr.b32 t, $4, 12; lop3.b32 $3, t, 0x000f000f, m, 0xea; sub.bf16x2 $3, $3, $5; }""",
                "=&r,=&r,=&r,=&r,r,r", [words, offset],
                (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
    else:
        less = offset.to(tl.float32) - (1024.0 if KIND == "fp16" else 128.0)
        a = ((words & 15).to(tl.float32) - less).to(offset.dtype)
        b = (((words >> 4) & 15).to(tl.float32) - less).to(offset.dtype)
        c = (((words >> 8) & 15).to(tl.float32) - less).to(offset.dtype)
        d = (((words >> 12) & 15).to(tl.float32) - less).to(offset.dtype)
    return a, b, c, d


@jit
def fourth(words, place, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """The value of one place in int64 words of four, [m, k] -> [k, m]."""
    return tl.trans((words >> (16 * place)).to(tl.int16).to(dtype, bitcast=True))


@jit
def group_dot(nibbles, words, acc, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """acc [n, m] + nibbles (4 of [n, k]) times the values of words [m, k]."""
    acc = tl.dot(nibbles[0], fourth(words, 0, dtype), acc)
    acc = tl.dot(nibbles[1], fourth(words, 1, dtype), acc)
    acc = tl.dot(nibbles[2], fourth(words, 2, dtype), acc)
    return tl.dot(nibbles[3], fourth(words, 3, dtype), acc)


@jit
def group_of(scales, zeros, at, inside, dtype: tl.constexpr, ZEROS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A group's scales in fp32 and offsets (see `four`) of the rows `at`."""
    base: tl.constexpr = 1024.0 if dtype == tl.float16 else 128.0
    scale = tl.load(scales + at, mask=inside, other=0.0).to(tl.float32)
    if ZEROS:
        zero = tl.load(zeros + at, mask=inside, other=0).to(tl.float32)
        offset = (zero + base).to(dtype)
    else:
        offset = tl.full((at.shape[0],), base + 8.0, dtype)
    return scale, offset


@jit
def gate_up_int4_kernel(  # type: ignore[no-untyped-def]
    x, pairs, tiles, qweight, scales, zeros, inner, top_k, plane,
    HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr, GROUPS: tl.constexpr, ZEROS: tl.constexpr,
    KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """x as int64, qweight as int16 words. plane: elements of one plane of inner."""
    entry = tiles + tl.program_id(1) * 4
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(entry).to(tl.int64)
    first = tl.load(entry + 1)
    count = tl.load(entry + 2)
    if count == 0:
        return
    dtype: tl.constexpr = tl.float16 if KIND == "fp16" else tl.bfloat16
    WORDS: tl.constexpr = HIDDEN // 4
    SIZE: tl.constexpr = WORDS // GROUPS
    m = tl.arange(0, BLOCK_M)
    pair = tl.load(pairs + first + tl.where(m < count, m, 0))
    x_row = x + (pair // top_k)[:, None].to(tl.int64) * WORDS + tl.arange(0, SIZE)[None, :]
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < INTERMEDIATE
    row = expert * (2 * INTERMEDIATE) + tl.where(inside, n, 0)
    g_row = qweight + row[:, None] * WORDS + tl.arange(0, SIZE)[None, :]
    u_row = g_row + INTERMEDIATE * WORDS
    gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    at = row * GROUPS
    beyond: tl.constexpr = INTERMEDIATE * GROUPS
    # Scales are asked for one step ahead: they are too small for the pipeline.
    next_g, next_g0 = group_of(scales, zeros, at, inside, dtype, ZEROS)
    next_u, next_u0 = group_of(scales, zeros, at + beyond, inside, dtype, ZEROS)
    for group in range(GROUPS):
        g = tl.load(g_row + group * SIZE)
        u = tl.load(u_row + group * SIZE)
        a = tl.load(x_row + group * SIZE)
        g_scale, g_offset, u_scale, u_offset = next_g, next_g0, next_u, next_u0
        more = inside & (group + 1 < GROUPS)
        next_g, next_g0 = group_of(scales, zeros, at + group + 1, more, dtype, ZEROS)
        next_u, next_u0 = group_of(scales, zeros, at + beyond + group + 1, more, dtype, ZEROS)
        none = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        nibbles = four(g, tl.broadcast_to(g_offset[:, None], g.shape), KIND, OVERLAP)
        gate += group_dot(nibbles, a, none, dtype) * g_scale[:, None]
        nibbles = four(u, tl.broadcast_to(u_offset[:, None], u.shape), KIND, OVERLAP)
        up += group_dot(nibbles, a, none, dtype) * u_scale[:, None]
    made = silu(gate) * up
    at = inner + (first + m)[None, :].to(tl.int64) * INTERMEDIATE + n[:, None]
    mask = inside[:, None] & (m < count)[None, :]
    high = made.to(tl.bfloat16)
    tl.store(at, high, mask=mask)
    if KIND == "fp16":
        tl.store(at + plane, (made - high.to(tl.float32)).to(tl.bfloat16), mask=mask)


@jit
def down_int4_kernel(  # type: ignore[no-untyped-def]
    inner, weights, pairs, tiles, qweight, scales, zeros, parts, plane,
    HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr, GROUPS: tl.constexpr, ZEROS: tl.constexpr,
    KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """inner as int64, qweight as int16 words. plane: words of one plane of inner."""
    entry = tiles + tl.program_id(1) * 4
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert = tl.load(entry).to(tl.int64)
    first = tl.load(entry + 1)
    count = tl.load(entry + 2)
    if count == 0:
        return
    WORDS: tl.constexpr = INTERMEDIATE // 4
    SIZE: tl.constexpr = WORDS // GROUPS
    m = tl.arange(0, BLOCK_M)
    slot = first + tl.where(m < count, m, 0)
    a_row = inner + slot[:, None].to(tl.int64) * WORDS + tl.arange(0, SIZE)[None, :]
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < HIDDEN
    row = expert * HIDDEN + tl.where(inside, n, 0)
    w_row = qweight + row[:, None] * WORDS + tl.arange(0, SIZE)[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    at = row * GROUPS
    next_scale, next_offset = group_of(scales, zeros, at, inside, tl.bfloat16, ZEROS)
    for group in range(GROUPS):
        w = tl.load(w_row + group * SIZE)
        a = tl.load(a_row + group * SIZE)
        scale, offset = next_scale, next_offset
        more = inside & (group + 1 < GROUPS)
        next_scale, next_offset = group_of(scales, zeros, at + group + 1, more, tl.bfloat16, ZEROS)
        nibbles = four(w, tl.broadcast_to(offset[:, None], w.shape), "bf16", OVERLAP)
        part = group_dot(nibbles, a, tl.zeros((BLOCK_N, BLOCK_M), tl.float32), tl.bfloat16)
        if KIND == "fp16":
            part = group_dot(nibbles, tl.load(a_row + plane + group * SIZE), part, tl.bfloat16)
        acc += part * scale[:, None]
    pair = tl.load(pairs + slot)
    acc *= tl.load(weights + pair)[None, :]
    at = parts + pair[None, :].to(tl.int64) * HIDDEN + n[:, None]
    tl.store(at, acc, mask=inside[:, None] & (m < count)[None, :])


def moe_int4_gemm_triton(
    x: Tensor, weights: Tensor, indices: Tensor,
    gate_up_q: Tensor, gate_up_scales: Tensor, gate_up_zeros: Tensor | None,
    down_q: Tensor, down_scales: Tensor, down_zeros: Tensor | None, config: GemmConfig,
) -> Tensor:  # fmt: skip
    """All contiguous; x [tokens, hidden], weights in fp32. A step takes one group: config.k is not
    used."""
    tokens, hidden = x.shape
    top_k, intermediate = indices.shape[-1], 2 * down_q.shape[-1]
    pairs, tiles = moe_tiles_triton(indices, gate_up_q.shape[0], config.m)
    kind = "fp16" if x.dtype is torch.float16 else "bf16"
    planes = 2 if kind == "fp16" else 1
    inner = x.new_empty(planes, tokens * top_k, intermediate, dtype=torch.bfloat16)
    parts = x.new_empty(tokens, top_k, hidden, dtype=torch.float32)
    y = torch.empty_like(x)
    overlap = overlaps_launches(x.device)
    shared = {
        "HIDDEN": hidden, "INTERMEDIATE": intermediate, "KIND": kind, "BLOCK_M": config.m,
        "OVERLAP": overlap, **({"launch_pdl": True} if overlap else {}),
    }  # fmt: skip
    gate_up_int4_kernel[(-(-intermediate // config.n), tiles.shape[0])](
        as_words(x, torch.int64), pairs, tiles, as_words(gate_up_q, torch.int16), gate_up_scales,
        gate_up_scales if gate_up_zeros is None else gate_up_zeros, inner, top_k,
        tokens * top_k * intermediate, GROUPS=gate_up_scales.shape[-1],
        ZEROS=gate_up_zeros is not None, BLOCK_N=config.n, num_warps=config.warps,
        num_stages=config.stages, **shared,
    )  # fmt: skip
    down_int4_kernel[(-(-hidden // config.down_n), tiles.shape[0])](
        as_words(inner, torch.int64), weights, pairs, tiles, as_words(down_q, torch.int16),
        down_scales, down_scales if down_zeros is None else down_zeros, parts,
        tokens * top_k * intermediate // 4, GROUPS=down_scales.shape[-1],
        ZEROS=down_zeros is not None, BLOCK_N=config.down_n, num_warps=config.down_warps,
        num_stages=config.down_stages, **shared,
    )  # fmt: skip
    moe_combine_triton(parts, y)
    return y


def as_words(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor's last dimension in wider words; copied where it lies between two."""
    return (tensor.clone() if tensor.data_ptr() % dtype.itemsize else tensor).view(dtype)


def takes(dtype: torch.dtype, *group_sizes: int) -> bool:
    """Whether the kernels here serve x of this dtype and groups of these sizes."""
    return dtype in (torch.bfloat16, torch.float16) and all(
        size >= 64 and size == next_power_of_2(size) for size in group_sizes
    )
