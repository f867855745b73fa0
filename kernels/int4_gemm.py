"""An INT4 linear layer for some dozens to hundreds of tokens, on Hopper's warpgroup products.

    x [rows, in_features], weight as in kernels/int4 -> y [rows, out_features], or parts

y^T = W x^T: a warpgroup decodes its weights (kernels/int4_layout) into the registers from which the
matrix unit takes its first operand; the second, x, lies in shared memory, with the features of each
unit of 128 in the order in which a lane has its weights. Weights and x arrive by asynchronous
copies, `stages` - 2 units ahead. While a unit is multiplied the next is decoded. Written in Gluon:
plain Triton decodes into shared memory, and waits for each product. Elsewhere int4_linear's plain
kernel serves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seekforge.kernels.int4_gemm_merge import merge_parts
from seekforge.kernels.int4_layout import UNIT, decode, fragment_order
from seekforge.kernels.triton_support import async_load, constexpr_function, gl, gluon_jit, tl


@dataclass(frozen=True, slots=True)
class Many:
    """block_n: out_features of a program, 64 or 128 for each of its warpgroups (warps / 4);
    block_m: tokens; stages: units in shared memory; scaled: weights are scaled, not sums;
    splits: programs that share the input features and merge their parts."""

    block_n: int
    block_m: int
    warps: int
    stages: int
    scaled: bool
    splits: int = 1


@constexpr_function
def _words_layout(block_n: int, warps: int, groups: int = 0) -> Any:
    """Words [block_n, 32] of units, or [block_n, groups, words of a group]: a lane has 8 words of
    each of its rows."""
    each = 32 // max(groups, 1)

    def at(n: int, j: int) -> list[int]:
        return [n, j // each, j % each] if groups else [n, j]

    rows = [at(n, 0) for n in (8, *(16 * warps * 2**i for i in range(4))) if n < block_n]
    return gl.DistributedLinearLayout(
        reg_bases=[at(0, 1), at(0, 2), at(0, 4), *rows],
        lane_bases=[at(0, 8), at(0, 16), at(1, 0), at(2, 0), at(4, 0)],
        warp_bases=[at(16 * 2**i, 0) for i in range(warps.bit_length() - 1)],
        block_bases=[], shape=[block_n, groups, each] if groups else [block_n, 32],
    )  # fmt: skip


@gluon_jit
def _spread(values, words, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Values of each group [block_n, groups], one for each word. LAYOUT: the words', by groups."""
    FLAT: gl.constexpr = words.type.layout
    GROUPS: gl.constexpr = values.shape[1]
    SHAPE: gl.constexpr = [words.shape[0], GROUPS, 32 // GROUPS]
    wide, _ = gl.broadcast(gl.expand_dims(values, 2), gl.full(SHAPE, 0, gl.int8, layout=LAYOUT))
    return gl.convert_layout(wide.reshape(words.shape), FLAT, assert_trivial=True)


@gluon_jit
def _copy_weights(  # type: ignore[no-untyped-def]
    q_tiles, q_at, word, unit, words, units, STAGES: gl.constexpr, EVEN: gl.constexpr
):
    """Starts the copy of a unit into its stage; of the last unit again where there is none."""
    at = gl.minimum(unit, units - 1) * 32
    if EVEN:
        async_load(q_tiles.index(unit % STAGES), q_at + at)
    else:
        async_load(q_tiles.index(unit % STAGES), q_at + at, mask=at + word < words)


@gluon_jit
def _copy_x(x_tiles, x_at, unit, units, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """The same for x; what was started since the last call is one group of copies."""
    async_load(x_tiles.index(unit % STAGES), x_at + gl.minimum(unit, units - 1) * 128)
    gl.nvidia.ampere.async_copy.commit_group()


@gluon_jit
def many_tokens_kernel(  # type: ignore[no-untyped-def]
    x, qweight, scales, zeros, bias, y, parts, rows, out_features, words8, groups, units, each,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    SCALED: gl.constexpr, ZEROS: gl.constexpr, BIAS: gl.constexpr, EVEN: gl.constexpr,
    SPLIT: gl.constexpr,
):  # fmt: skip
    """x [rows, 128 * units] in the order of fragments; qweight in 16-bit words, 8 * words8 a row;
    each: units of a split; EVEN: the last unit is full."""
    WARPS: gl.constexpr = gl.num_warps()
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BLOCK_M, 16]
    )
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    LOAD_Q: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [WARPS, 1], [1, 0])
    LOAD_X: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    STORE: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, WARPS], [0, 1])
    GROUPS: gl.constexpr = 128 // GROUP if GROUP < 128 else 1  # of a unit
    PER_GROUP: gl.constexpr = GROUP // 128 if GROUP > 128 else 1
    WORDS: gl.constexpr = _words_layout(BLOCK_N, WARPS)
    BY_GROUP: gl.constexpr = _words_layout(BLOCK_N, WARPS, GROUPS)
    OF_GROUP: gl.constexpr = gl.SliceLayout(2, BY_GROUP)
    BF16: gl.constexpr = y.dtype.element_ty == gl.bfloat16
    dtype: gl.constexpr = y.dtype.element_ty
    OFFSET: gl.constexpr = 128 if BF16 else 1024
    AHEAD: gl.constexpr = STAGES - 2
    tl.extra.cuda.gdc_launch_dependents()
    begin = 0
    end = units
    if SPLIT:
        begin = gl.program_id(2) * each
        end = gl.minimum(begin + each, units)
    words = words8 * 8
    n0 = gl.program_id(0) * BLOCK_N
    m0 = gl.program_id(1) * BLOCK_M
    # Rows behind the last are read as the last, and not stored.
    n = gl.minimum(n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, LOAD_Q)), out_features - 1)
    word = gl.arange(0, 32, layout=gl.SliceLayout(0, LOAD_Q))[None, :]
    q_at = qweight + n.to(gl.int64)[:, None] * words + word
    m = gl.minimum(m0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, LOAD_X)), rows - 1)
    feature = gl.arange(0, 128, layout=gl.SliceLayout(0, LOAD_X))[None, :]
    x_at = x + m.to(gl.int64)[:, None] * (units * 128) + feature
    q_tiles = gl.allocate_shared_memory(
        gl.int16, [STAGES, BLOCK_N, 32], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    x_tiles = gl.allocate_shared_memory(
        dtype,
        [STAGES, BLOCK_M, 128],
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2),
    )

    n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, OF_GROUP))
    row_groups = gl.minimum(n0 + n, out_features - 1).to(gl.int64)[:, None] * groups
    group_z = gl.arange(0, GROUPS, layout=gl.SliceLayout(0, OF_GROUP))[None, :]
    z_at = zeros + row_groups
    if SCALED:
        s_at = scales + row_groups
        group_s = group_z
    else:
        n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, ACC))
        s_at = scales + gl.minimum(n0 + n, out_features - 1).to(gl.int64) * groups
        group_s = 0
    group = begin // PER_GROUP * GROUPS
    scale = gl.load(s_at + gl.minimum(group + group_s, groups - 1))
    scale_before = scale
    if ZEROS:
        zero = gl.load(z_at + gl.minimum(group + group_z, groups - 1))

    for i in gl.static_range(AHEAD):
        _copy_weights(q_tiles, q_at, word, begin + i, words, end, STAGES, EVEN)
    tl.extra.cuda.gdc_wait()  # weights are older than the launch before; x is not
    for i in gl.static_range(AHEAD):
        _copy_x(x_tiles, x_at, begin + i, end, STAGES)
    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=ACC)
    product = gl.nvidia.hopper.warpgroup_mma_init(acc)
    for unit in range(begin, end):
        group = gl.minimum(unit + 1, end - 1) // PER_GROUP * GROUPS
        scale_next = gl.load(s_at + gl.minimum(group + group_s, groups - 1))
        gl.nvidia.ampere.async_copy.wait_group(AHEAD - 1)
        gl.nvidia.hopper.fence_async_shared()
        packed = q_tiles.index(unit % STAGES).load(WORDS)
        _copy_weights(q_tiles, q_at, word, unit + AHEAD, words, end, STAGES, EVEN)
        _copy_x(x_tiles, x_at, unit + AHEAD, end, STAGES)
        if ZEROS:
            offset = (zero.to(gl.int32) + OFFSET).to(gl.float32).to(dtype)
            offset = _spread(offset, packed, BY_GROUP)
            zero = gl.load(z_at + gl.minimum(group + group_z, groups - 1))
        else:
            offset = gl.full([BLOCK_N, 32], OFFSET + 8, dtype, layout=WORDS)
        if SCALED:
            by = _spread(scale, packed, BY_GROUP)
            w0, w1, w2, w3 = decode(packed, offset, by, BF16, True)
        else:
            w0, w1, w2, w3 = decode(packed, offset, offset, BF16, False)
        w = gl.join(gl.join(w0, w2), gl.join(w1, w3))  # words, then bit 1 and bit 0 of the nibble
        w = w.reshape([BLOCK_N, 4, 2, 2, 2, 2, 2]).permute([0, 5, 6, 2, 3, 1, 4])
        w = gl.convert_layout(w.reshape([BLOCK_N, 128]), A, assert_trivial=True)
        x_tile = x_tiles.index(unit % STAGES).permute([1, 0])
        before = gl.nvidia.hopper.warpgroup_mma_wait(0, [product])
        if SCALED:
            product = gl.nvidia.hopper.warpgroup_mma(w, x_tile, before, is_async=True)
        else:
            acc += before * scale_before.to(gl.float32)[:, None]
            product = gl.nvidia.hopper.warpgroup_mma(
                w, x_tile, before, use_acc=False, is_async=True
            )
        scale_before = scale
        scale = scale_next
    before = gl.nvidia.hopper.warpgroup_mma_wait(0, [product])
    if SCALED:
        acc = before
    else:
        acc += before * scale_before.to(gl.float32)[:, None]

    n = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, STORE))
    m = m0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, STORE))
    mask = (n < out_features)[:, None] & (m < rows)[None, :]
    at = m.to(gl.int64)[None, :] * out_features + n[:, None]
    if SPLIT:
        target = parts + gl.program_id(2).to(gl.int64) * rows * out_features
        gl.store(target + at, gl.convert_layout(acc, STORE), mask=mask)
    else:
        if BIAS:
            n = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, ACC))
            b = gl.load(bias + gl.minimum(n, out_features - 1))
            acc += b.to(gl.float32)[:, None]
        gl.store(y + at, gl.convert_layout(acc.to(dtype), STORE), mask=mask)


def many_tokens(
    x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None,
    y: Tensor, config: Many,
) -> None:  # fmt: skip
    """Fills y [..., out_features]. x is `readable`, the others contiguous (see int4_layout).

    Starts before the launch before it has ended; weights and bias must be older than that.
    """
    rows, in_features = x.shape
    out_features, groups = scales.shape
    units = -(-in_features // UNIT)
    each = -(-units // config.splits)
    splits = -(-units // each)
    parts = y
    if splits > 1:
        parts = y.new_empty(splits, rows, out_features, dtype=torch.float32)
    group_size = in_features // groups
    grid = (-(-out_features // config.block_n), -(-rows // config.block_m), splits)
    many_tokens_kernel[grid](
        fragment_order(x), qweight.view(torch.int16), scales,
        scales if zeros is None else zeros, scales if bias is None else bias, y, parts,
        rows, out_features, in_features // 32, groups, units, each,
        GROUP=group_size, BLOCK_M=config.block_m, BLOCK_N=config.block_n, STAGES=config.stages,
        SCALED=config.scaled or group_size < UNIT, ZEROS=zeros is not None, BIAS=bias is not None,
        EVEN=in_features % UNIT == 0, SPLIT=splits > 1, num_warps=config.warps, launch_pdl=True,
    )  # fmt: skip
    if splits > 1:
        merge_parts(parts, bias, y)
