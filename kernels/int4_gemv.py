"""An INT4 linear layer for few tokens (1 to about 32), bound by reading the weight once.

    x [rows, in_features], weight as in kernels/int4 -> y [rows, out_features], or parts

y^T = W x^T on the matrix units, which need one instruction for eight weights of a lane where plain
arithmetic needs three for one. Weights go from global memory straight into the registers in which
the matrix unit wants them (kernels/int4_layout): no shared memory, and every load under way before
the first is used. The warps of a program share the input features, and meet in one sum at the end.
Written in Gluon, which lets the registers be named; in plain Triton the weights take a way through
shared memory. Elsewhere int4_linear's plain kernel serves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seekforge.kernels.int4_gemm_merge import merge_parts
from seekforge.kernels.int4_layout import UNIT, decode, split
from seekforge.kernels.triton_support import (
    constexpr_function,
    gl,
    gluon_jit,
    next_power_of_2,
    tl,
)


@dataclass(frozen=True, slots=True)
class Few:
    """block_n: out_features of a program, 16 or more for each of row_warps; k_warps: warps that
    share the input features, `unroll` units of 128 each at a time; prefetch: loads run one step
    ahead of the products; splits: programs that share the input features and merge their parts."""

    block_n: int
    row_warps: int
    k_warps: int
    unroll: int
    prefetch: bool
    splits: int = 1


@constexpr_function
def _groups_layout(block_n: int, k_warps: int, row_warps: int, groups: int) -> Any:
    """The weights' registers seen as [k_warps, block_n, groups of a unit, words of a group]."""
    each = 32 // groups

    def word(j: int) -> list[int]:
        return [0, 0, j // each, j % each]

    rows = [[0, n, 0, 0] for n in (8, *(16 * row_warps * 2**i for i in range(8))) if n < block_n]
    warps = [[0, 16 * 2**i, 0, 0] for i in range(row_warps.bit_length() - 1)]
    warps += [[2**i, 0, 0, 0] for i in range(k_warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[word(1), word(2), word(4), *rows],
        lane_bases=[word(8), word(16), *([0, n, 0, 0] for n in (1, 2, 4))],
        warp_bases=warps, block_bases=[], shape=[k_warps, block_n, groups, each],
    )  # fmt: skip


@gluon_jit
def _unit_index(K_WARPS: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """0..K_WARPS along the first dimension of a layout of rank 2 or 3."""
    if LAYOUT.rank == 2:
        index = gl.arange(0, K_WARPS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    else:
        INNER: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
        index = gl.arange(0, K_WARPS, layout=INNER)[:, None, None]
    return index


@gluon_jit
def _row_index(BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """0..BLOCK_N along the second dimension."""
    if LAYOUT.rank == 2:
        index = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    else:
        INNER: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))
        index = gl.arange(0, BLOCK_N, layout=INNER)[None, :, None]
    return index


@gluon_jit
def _last_index(SIZE: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """0..SIZE along the third dimension; 0 where there is none."""
    index = 0
    if LAYOUT.rank == 3:
        INNER: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))
        index = gl.arange(0, SIZE, layout=INNER)[None, None, :]
    return index


@gluon_jit
def _load(  # type: ignore[no-untyped-def]
    q_at, s_at, z_at, word, unit_s, unit_z, group_s, group_z, unit, words, groups,
    K_WARPS: gl.constexpr, UNROLL: gl.constexpr, ZEROS: gl.constexpr, PER_GROUP: gl.constexpr,
    GROUPS: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """Weights, scales and zeros of the next UNROLL units of each warp."""
    q = ()
    s = ()
    z = ()
    for u in gl.static_range(UNROLL):
        at = unit + u * K_WARPS
        of_s = (at + unit_s) // PER_GROUP * GROUPS + group_s
        of_z = (at + unit_z) // PER_GROUP * GROUPS + group_z
        if MASK:
            weights = gl.load(q_at + at * 32, mask=at * 32 + word < words, other=0)
            scale = gl.load(s_at + of_s, mask=of_s < groups, other=0.0)
        else:
            weights = gl.load(q_at + at * 32)
            scale = gl.load(s_at + of_s)
        zero = scale
        if ZEROS:
            zero = gl.load(z_at + of_z, mask=of_z < groups, other=0)
        q = q + (weights,)  # type: ignore[assignment]  # noqa: RUF005
        s = s + (scale,)  # type: ignore[assignment]  # noqa: RUF005
        z = z + (zero,)  # type: ignore[assignment]  # noqa: RUF005
    return q, s, z


@gluon_jit
def _spread(values, words, GROUPS: gl.constexpr, WIDE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Values of each group, one for each word. WIDE: the words' layout with groups apart."""
    if GROUPS == 1:
        wide, _ = gl.broadcast(values[:, :, None], words)
    else:
        FLAT: gl.constexpr = words.type.layout
        SHAPE: gl.constexpr = [words.shape[0], words.shape[1], GROUPS, 32 // GROUPS]
        wide, _ = gl.broadcast(gl.expand_dims(values, 3), gl.full(SHAPE, 0, gl.int8, layout=WIDE))
        wide = gl.convert_layout(wide.reshape(words.shape), FLAT, assert_trivial=True)
    return wide


@gluon_jit
def _add(  # type: ignore[no-untyped-def]
    acc, words, scale, zero, x, ZEROS: gl.constexpr, GROUPS: gl.constexpr, WIDE: gl.constexpr,
    BF16: gl.constexpr,
):  # fmt: skip
    """acc plus the products of one unit of each warp."""
    ACC: gl.constexpr = acc.type.layout
    LAYOUT: gl.constexpr = words.type.layout
    OFFSET: gl.constexpr = 128 if BF16 else 1024
    dtype: gl.constexpr = gl.bfloat16 if BF16 else gl.float16
    if ZEROS:
        offset = (zero.to(gl.int32) + OFFSET).to(gl.float32).to(dtype)
        offset = _spread(offset, words, GROUPS, WIDE)
    else:
        offset = gl.full(words.shape, OFFSET + 8, dtype, layout=LAYOUT)
    x0, x1, x2, x3 = split(x, BF16)
    if GROUPS == 1:
        w0, w1, w2, w3 = decode(words, offset, offset, BF16, False)
        part = gl.zeros(acc.shape, gl.float32, layout=ACC)
    else:
        w0, w1, w2, w3 = decode(words, offset, _spread(scale, words, GROUPS, WIDE), BF16, True)
        part = acc
    part = gl.nvidia.ampere.mma_v2(w0, x0, part)
    part = gl.nvidia.ampere.mma_v2(w1, x1, part)
    part = gl.nvidia.ampere.mma_v2(w2, x2, part)
    part = gl.nvidia.ampere.mma_v2(w3, x3, part)
    if GROUPS == 1:
        part = acc + part * scale.to(gl.float32)[:, :, None]
    return part


@gluon_jit
def few_tokens_kernel(  # type: ignore[no-untyped-def]
    x, qweight, scales, zeros, bias, y, parts, rows, out_features, words8, groups, units, x_row,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, ROW_WARPS: gl.constexpr,
    K_WARPS: gl.constexpr, UNROLL: gl.constexpr, PREFETCH: gl.constexpr, ZEROS: gl.constexpr,
    BIAS: gl.constexpr, EVEN: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """x in 64-bit words, qweight in 16-bit words (8 * words8 in a row of either); units: of a
    split. EVEN: every unit of every step is there and full."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[K_WARPS, ROW_WARPS, 1], instr_shape=[1, 16, 8]
    )
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 8)
    B: gl.constexpr = gl.DotOperandLayout(1, ACC, 8)
    GROUPS: gl.constexpr = 128 // GROUP if GROUP < 128 else 1  # of a unit
    PER_GROUP: gl.constexpr = GROUP // 128 if GROUP > 128 else 1
    WIDE: gl.constexpr = _groups_layout(BLOCK_N, K_WARPS, ROW_WARPS, GROUPS)
    S: gl.constexpr = gl.SliceLayout(2, ACC) if GROUPS == 1 else gl.SliceLayout(3, WIDE)
    Z: gl.constexpr = gl.SliceLayout(2, A) if GROUPS == 1 else gl.SliceLayout(3, WIDE)
    BF16: gl.constexpr = y.dtype.element_ty == gl.bfloat16
    words = words8 * 8
    first = gl.program_id(0) * BLOCK_N
    unit_a = _unit_index(K_WARPS, A)
    word = unit_a * 32 + _last_index(32, A)
    unit_s = _unit_index(K_WARPS, S)
    unit_z = _unit_index(K_WARPS, Z)
    group_s = _last_index(GROUPS, S)
    group_z = _last_index(GROUPS, Z)
    # Rows behind the last are read as the last, and not stored.
    n = gl.minimum(first + _row_index(BLOCK_N, A), out_features - 1).to(gl.int64)
    q_at = qweight + n * words + word
    n = gl.minimum(first + _row_index(BLOCK_N, S), out_features - 1).to(gl.int64)
    s_at = scales + n * groups
    n = gl.minimum(first + _row_index(BLOCK_N, Z), out_features - 1).to(gl.int64)
    z_at = zeros + n * groups
    word_x = _unit_index(K_WARPS, B) * 32 + _row_index(32, B)
    x_at = x + gl.minimum(_last_index(BLOCK_M, B), rows - 1) * x_row + word_x

    begin = 0
    end = units
    if SPLIT:
        begin = gl.program_id(1) * units
        end = gl.minimum(begin + units, (words + 31) // 32)
        words = gl.minimum(words, end * 32)
    STEP: gl.constexpr = K_WARPS * UNROLL
    acc = gl.zeros([K_WARPS, BLOCK_N, BLOCK_M], gl.float32, layout=ACC)
    if PREFETCH:
        q, s, z = _load(
            q_at, s_at, z_at, word, unit_s, unit_z, group_s, group_z, begin, words, groups,
            K_WARPS, UNROLL, ZEROS, PER_GROUP, GROUPS, not EVEN,
        )  # fmt: skip
    for unit in range(begin, end, STEP):
        if PREFETCH:
            q_next, s_next, z_next = _load(
                q_at, s_at, z_at, word, unit_s, unit_z, group_s, group_z, unit + STEP, words,
                groups, K_WARPS, UNROLL, ZEROS, PER_GROUP, GROUPS, True,
            )  # fmt: skip
        else:
            q, s, z = _load(
                q_at, s_at, z_at, word, unit_s, unit_z, group_s, group_z, unit, words, groups,
                K_WARPS, UNROLL, ZEROS, PER_GROUP, GROUPS, not EVEN,
            )  # fmt: skip
        if unit == begin:
            tl.extra.cuda.gdc_wait()  # weights are older than the launch before; x may not be
            tl.extra.cuda.gdc_launch_dependents()
        for u in gl.static_range(UNROLL):
            at = (unit + u * K_WARPS) * 32
            if EVEN:
                x_words = gl.load(x_at + at)
            else:
                x_words = gl.load(x_at + at, mask=at + word_x < words, other=0)
            acc = _add(acc, q[u], s[u], z[u], x_words, ZEROS, GROUPS, WIDE, BF16)
        if PREFETCH:
            q = q_next
            s = s_next
            z = z_next

    total = gl.sum(acc, axis=0)
    n = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, gl.SliceLayout(0, ACC)))[:, None]
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, gl.SliceLayout(0, ACC)))[None, :]
    mask = (n < out_features) & (m < rows)
    if SPLIT:
        gl.store(parts + (gl.program_id(1) * rows + m) * out_features + n, total, mask=mask)
    else:
        if BIAS:
            total += gl.load(bias + n, mask=n < out_features, other=0.0).to(gl.float32)
        gl.store(y + m * out_features + n, total.to(y.dtype.element_ty), mask=mask)


def few_tokens(
    x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None,
    y: Tensor, config: Few,
) -> None:  # fmt: skip
    """Fills y [..., out_features]. x is `readable`, the others contiguous (see int4_layout).

    Starts before the launch before it has ended, and waits for it before it reads x; weights and
    bias must be older.
    """
    rows, in_features = x.shape
    out_features, groups = scales.shape
    group_size = in_features // groups
    units = -(-in_features // UNIT)
    step = config.k_warps * config.unroll
    each = -(-units // (step * config.splits)) * step if config.splits > 1 else units
    splits = -(-units // each)
    parts = y
    if splits > 1:
        parts = y.new_empty(splits, rows, out_features, dtype=torch.float32)
    few_tokens_kernel[(-(-out_features // config.block_n), splits)](
        x.view(torch.int64), qweight.view(torch.int16), scales,
        scales if zeros is None else zeros, scales if bias is None else bias, y, parts,
        rows, out_features, in_features // 32, groups, each, x.stride(0) // 4,
        GROUP=group_size, BLOCK_M=1 if rows == 1 else max(8, next_power_of_2(rows)),
        BLOCK_N=config.block_n, ROW_WARPS=config.row_warps, K_WARPS=config.k_warps,
        UNROLL=config.unroll, PREFETCH=config.prefetch and each > step, ZEROS=zeros is not None,
        BIAS=bias is not None, EVEN=in_features % UNIT == 0 and units % step == 0,
        SPLIT=splits > 1, num_warps=config.k_warps * config.row_warps, launch_pdl=True,
    )  # fmt: skip
    if splits > 1:
        merge_parts(parts, bias, y)
