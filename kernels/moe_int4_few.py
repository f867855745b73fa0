"""INT4 experts on few tokens: each expert's weights read once, from memory to the matrix units.

The two products are those of int4_gemv.py (registers, order of the features: int4_layout) with an
expert to each program. Two forms, by FewConfig.m:

    m = 0   a program serves one pair (token, expert), and its second product one token's experts
            one after the other: no sorting, no combining; for one token or two
    m >= 8  a program serves up to m pairs of one expert (moe_tiles)

`inner` is bf16 [planes, pairs, intermediate] and holds weight * silu(gate x) * up x. For fp16 x,
whose products pass 65504, it has two planes: high and low part, 16 bits together.
The second kernel asks for its first weights before it waits for `inner`: routing and tiles are
older than the first kernel's own wait. Groups are a multiple of 128 features (`reads`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from seekforge.kernels.int4_gemv import _add, _last_index, _row_index, _unit_index
from seekforge.kernels.int4_layout import UNIT, supports
from seekforge.kernels.moe_config import FewConfig
from seekforge.kernels.moe_int4_gemm import as_words
from seekforge.kernels.moe_tiles import moe_combine_triton, moe_tiles_triton
from seekforge.kernels.triton_support import gl, gluon_jit, tl


@gluon_jit
def _words(at, index, UNIT_0: gl.constexpr, K_WARPS: gl.constexpr, UNITS: gl.constexpr):  # type: ignore[no-untyped-def]
    """The words of a unit of each warp, from UNIT_0 on; zeros behind the last."""
    if UNIT_0 + K_WARPS <= UNITS:
        words = gl.load(at + UNIT_0 * 32)
    else:
        words = gl.load(at + UNIT_0 * 32, mask=index < UNITS - UNIT_0, other=0)
    return words


@gluon_jit
def gate_up_few_kernel(  # type: ignore[no-untyped-def]
    x, weights, indices, pairs, tiles, qweight, scales, zeros, inner, plane,
    HIDDEN: gl.constexpr, INTERMEDIATE: gl.constexpr, GROUP: gl.constexpr, TOP_K: gl.constexpr,
    ZEROS: gl.constexpr, BF16: gl.constexpr, SORTED: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, ROW_WARPS: gl.constexpr, K_WARPS: gl.constexpr, UNROLL: gl.constexpr,
):  # fmt: skip
    """x as int64, qweight as int16 words. plane: elements of one plane of inner."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[K_WARPS, ROW_WARPS, 1], instr_shape=[1, 16, 8]
    )
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 8)
    B: gl.constexpr = gl.DotOperandLayout(1, ACC, 8)
    S: gl.constexpr = gl.SliceLayout(2, ACC)
    Z: gl.constexpr = gl.SliceLayout(2, A)
    WORDS: gl.constexpr = HIDDEN // 4
    UNITS: gl.constexpr = HIDDEN // 128
    PER: gl.constexpr = GROUP // 128
    GROUPS: gl.constexpr = UNITS // PER
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    if SORTED:
        entry = tiles + gl.program_id(1) * 4
        expert = gl.load(entry).to(gl.int64)
        first = gl.load(entry + 1)
        count = gl.load(entry + 2)
        if count == 0:
            return
        slot = first + gl.minimum(_last_index(BLOCK_M, B), count - 1)
        x_at = x + gl.load(pairs + slot) // TOP_K * WORDS + _row_index(32, B)
    else:
        first = gl.program_id(1)
        count = 1
        expert = gl.load(indices + first).to(gl.int64)
        x_at = x + first // TOP_K * WORDS + _row_index(32, B) + _last_index(BLOCK_M, B)
    unit_a = _unit_index(K_WARPS, A)
    unit_s = _unit_index(K_WARPS, S)
    unit_z = _unit_index(K_WARPS, Z)
    unit_b = _unit_index(K_WARPS, B)
    x_at += unit_b * 32
    begin = gl.program_id(0) * BLOCK_N
    n = begin + _row_index(BLOCK_N, A)
    q_at = (
        qweight
        + expert * (2 * INTERMEDIATE * WORDS)
        + (n * WORDS + unit_a * 32 + _last_index(32, A))
    )
    n = begin + _row_index(BLOCK_N, S)
    s_at = scales + expert * (2 * INTERMEDIATE * GROUPS) + n * GROUPS
    n = begin + _row_index(BLOCK_N, Z)
    z_at = zeros + expert * (2 * INTERMEDIATE * GROUPS) + n * GROUPS
    gate = gl.zeros([K_WARPS, BLOCK_N, BLOCK_M], gl.float32, layout=ACC)
    up = gl.zeros([K_WARPS, BLOCK_N, BLOCK_M], gl.float32, layout=ACC)
    MORE: gl.constexpr = INTERMEDIATE * GROUPS
    for step in gl.static_range(0, UNITS, K_WARPS * UNROLL):
        g = ()
        u = ()
        for i in gl.static_range(UNROLL):
            g = g + (_words(q_at, unit_a, step + i * K_WARPS, K_WARPS, UNITS),)  # type: ignore[assignment]  # noqa: RUF005
            up_at = q_at + INTERMEDIATE * WORDS
            u = u + (_words(up_at, unit_a, step + i * K_WARPS, K_WARPS, UNITS),)  # type: ignore[assignment]  # noqa: RUF005
        if SORTED:
            tl.debug_barrier()  # all loads are asked for before one is used; else ptxas sinks them
        for i in gl.static_range(UNROLL):
            if step + i * K_WARPS < UNITS:
                a = _words(x_at, unit_b, step + i * K_WARPS, K_WARPS, UNITS)
                of_s = gl.minimum(step + i * K_WARPS + unit_s, UNITS - 1) // PER
                of_z = gl.minimum(step + i * K_WARPS + unit_z, UNITS - 1) // PER
                g_scale = gl.load(s_at + of_s)
                u_scale = gl.load(s_at + MORE + of_s)
                g_zero = g_scale
                u_zero = u_scale
                if ZEROS:
                    g_zero = gl.load(z_at + of_z)
                    u_zero = gl.load(z_at + MORE + of_z)
                gate = _add(gate, g[i], g_scale, g_zero, a, ZEROS, 1, 0, BF16)
                up = _add(up, u[i], u_scale, u_zero, a, ZEROS, 1, 0, BF16)
    gate = gl.sum(gate, axis=0)
    made = gate / (1.0 + gl.exp(-gate)) * gl.sum(up, axis=0)
    n = begin + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, gl.SliceLayout(0, ACC)))[:, None]
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, gl.SliceLayout(0, ACC)))[None, :]
    pair = first + gl.minimum(m, count - 1)
    if SORTED:
        pair = gl.load(pairs + pair)
    made *= gl.load(weights + pair)
    high = made.to(gl.bfloat16)
    at = inner + (first + m) * INTERMEDIATE + n
    gl.store(at, high, mask=m < count)
    if not BF16:
        gl.store(at + plane, (made - high.to(gl.float32)).to(gl.bfloat16), mask=m < count)


@gluon_jit
def down_few_kernel(  # type: ignore[no-untyped-def]
    inner, indices, pairs, tiles, qweight, scales, zeros, y, plane,
    HIDDEN: gl.constexpr, INTERMEDIATE: gl.constexpr, GROUP: gl.constexpr, TOP_K: gl.constexpr,
    ZEROS: gl.constexpr, BF16: gl.constexpr, SORTED: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, ROW_WARPS: gl.constexpr, K_WARPS: gl.constexpr, UNROLL: gl.constexpr,
):  # fmt: skip
    """inner as int64, qweight as int16 words. plane: words of one plane of inner. y: of pairs in
    fp32 where SORTED, else of tokens."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[K_WARPS, ROW_WARPS, 1], instr_shape=[1, 16, 8]
    )
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 8)
    B: gl.constexpr = gl.DotOperandLayout(1, ACC, 8)
    S: gl.constexpr = gl.SliceLayout(2, ACC)
    Z: gl.constexpr = gl.SliceLayout(2, A)
    WORDS: gl.constexpr = INTERMEDIATE // 4
    EACH: gl.constexpr = INTERMEDIATE // 128  # units of an expert
    UNITS: gl.constexpr = EACH if SORTED else EACH * TOP_K
    PER: gl.constexpr = GROUP // 128
    GROUPS: gl.constexpr = EACH // PER
    tl.extra.cuda.gdc_launch_dependents()
    row_index = gl.program_id(1)
    chosen = indices
    first = 0
    count = 1
    if SORTED:
        entry = tiles + row_index * 4
        chosen = entry
        first = gl.load(entry + 1)
        count = gl.load(entry + 2)
        if count == 0:
            tl.extra.cuda.gdc_wait()
            return
        slot = first + gl.minimum(_last_index(BLOCK_M, B), count - 1)
        x_at = inner + slot * WORDS + _row_index(32, B)
    else:
        chosen = indices + row_index * TOP_K
        x_at = inner + row_index * TOP_K * WORDS + _row_index(32, B) + _last_index(BLOCK_M, B)
    unit_a = _unit_index(K_WARPS, A)
    unit_s = _unit_index(K_WARPS, S)
    unit_z = _unit_index(K_WARPS, Z)
    unit_b = _unit_index(K_WARPS, B)
    x_at += unit_b * 32
    begin = gl.program_id(0) * BLOCK_N
    n = begin + _row_index(BLOCK_N, A)
    q_at = n * WORDS + _last_index(32, A)
    s_n = (begin + _row_index(BLOCK_N, S)) * GROUPS
    z_n = (begin + _row_index(BLOCK_N, Z)) * GROUPS
    acc = gl.zeros([K_WARPS, BLOCK_N, BLOCK_M], gl.float32, layout=ACC)
    for step in gl.static_range(0, UNITS, K_WARPS * UNROLL):
        q = ()
        s = ()
        z = ()
        for i in gl.static_range(UNROLL):
            # A unit behind the last is the last one here, and meets zeros of `inner`.
            unit = gl.minimum(step + i * K_WARPS + unit_a, UNITS - 1)
            at = gl.load(chosen + unit // EACH).to(gl.int64) * (HIDDEN * WORDS) + unit % EACH * 32
            q = q + (gl.load(qweight + (at + q_at)),)  # type: ignore[assignment]  # noqa: RUF005
            unit = gl.minimum(step + i * K_WARPS + unit_s, UNITS - 1)
            at = (
                gl.load(chosen + unit // EACH).to(gl.int64) * (HIDDEN * GROUPS) + unit % EACH // PER
            )
            scale = gl.load(scales + (at + s_n))
            s = s + (scale,)  # type: ignore[assignment]  # noqa: RUF005
            zero = scale
            if ZEROS:
                unit = gl.minimum(step + i * K_WARPS + unit_z, UNITS - 1)
                at = gl.load(chosen + unit // EACH).to(gl.int64) * (HIDDEN * GROUPS)
                zero = gl.load(zeros + (at + unit % EACH // PER + z_n))
            z = z + (zero,)  # type: ignore[assignment]  # noqa: RUF005
        if step == 0:
            tl.extra.cuda.gdc_wait()  # routing and weights are older than the launch before
        for i in gl.static_range(UNROLL):
            if step + i * K_WARPS < UNITS:
                a = _words(x_at, unit_b, step + i * K_WARPS, K_WARPS, UNITS)
                acc = _add(acc, q[i], s[i], z[i], a, ZEROS, 1, 0, True)
                if not BF16:
                    a = _words(x_at + plane, unit_b, step + i * K_WARPS, K_WARPS, UNITS)
                    acc = _add(acc, q[i], s[i], z[i], a, ZEROS, 1, 0, True)
    total = gl.sum(acc, axis=0)
    n = begin + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, gl.SliceLayout(0, ACC)))[:, None]
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, gl.SliceLayout(0, ACC)))[None, :]
    row = row_index + m
    if SORTED:
        row = gl.load(pairs + first + gl.minimum(m, count - 1))
    at = y + row * HIDDEN + n
    gl.store(at, total.to(y.dtype.element_ty), mask=m < count)


def moe_int4_few_triton(
    x: Tensor, weights: Tensor, indices: Tensor,
    gate_up_q: Tensor, gate_up_scales: Tensor, gate_up_zeros: Tensor | None,
    down_q: Tensor, down_scales: Tensor, down_zeros: Tensor | None, config: FewConfig,
) -> Tensor:  # fmt: skip
    """All contiguous; x [tokens, hidden], weights in fp32. See `reads` for the shapes taken."""
    tokens, hidden = x.shape
    top_k, intermediate = indices.shape[-1], 2 * down_q.shape[-1]
    is_sorted, bf16 = config.m > 0, x.dtype is torch.bfloat16
    pairs = tiles = indices
    programs = tokens * top_k
    if is_sorted:
        pairs, tiles = moe_tiles_triton(indices, gate_up_q.shape[0], config.m)
        programs = tiles.shape[0]
    inner = x.new_empty(1 if bf16 else 2, tokens * top_k, intermediate, dtype=torch.bfloat16)
    y = torch.empty_like(x)
    parts = x.new_empty(tokens, top_k, hidden, dtype=torch.float32) if is_sorted else y
    shared = {
        "HIDDEN": hidden, "INTERMEDIATE": intermediate, "TOP_K": top_k, "BF16": bf16,
        "SORTED": is_sorted, "BLOCK_M": max(1, config.m), "launch_pdl": True,
    }  # fmt: skip
    gate_up_few_kernel[(intermediate // config.n, programs)](
        as_words(x, torch.int64), weights, indices, pairs, tiles, as_words(gate_up_q, torch.int16),
        gate_up_scales, gate_up_scales if gate_up_zeros is None else gate_up_zeros, inner,
        inner[0].numel(), GROUP=hidden // gate_up_scales.shape[-1],
        ZEROS=gate_up_zeros is not None, BLOCK_N=config.n, ROW_WARPS=config.row_warps,
        K_WARPS=config.k_warps, UNROLL=config.unroll,
        num_warps=config.k_warps * config.row_warps, **shared,
    )  # fmt: skip
    down_few_kernel[(hidden // config.down_n, programs if is_sorted else tokens)](
        as_words(inner, torch.int64), indices, pairs, tiles, as_words(down_q, torch.int16),
        down_scales, down_scales if down_zeros is None else down_zeros, parts,
        inner[0].numel() // 4, GROUP=intermediate // down_scales.shape[-1],
        ZEROS=down_zeros is not None, BLOCK_N=config.down_n, ROW_WARPS=config.down_row_warps,
        K_WARPS=config.down_k_warps, UNROLL=config.down_unroll,
        num_warps=config.down_k_warps * config.down_row_warps, **shared,
    )  # fmt: skip
    if is_sorted:
        moe_combine_triton(parts, y)
    return y


def reads(x: Tensor, *group_sizes: int) -> bool:
    """Whether the kernels here serve x and groups of these sizes."""
    return supports(x, UNIT) and all(size % UNIT == 0 for size in group_sizes)
