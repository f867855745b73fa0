"""INT4 experts on few tokens: each expert's weights read once, from memory to the matrix units.

The two products are those of int4_gemv.py (registers, order of the features: int4_layout) with an
expert to each program. Two forms, by FewConfig.m:

    m = 0   a program serves one pair (token, expert), and its second product one token's experts
            one after the other: no sorting, no combining; for one token or two
    m >= 8  a program serves up to m pairs of one expert (moe_tiles)

`inner` is bf16 [planes, pairs, intermediate] and holds weight * silu(gate x) * up x. For fp16 x,
whose products pass 65504, it has two planes: high and low part, 16 bits together. With m = 0
shared experts (kernels/shared_experts), `slices` times as wide, can be taken along: `inner` holds
slices of theirs behind a token's pairs, and the second product sums their units behind the others.
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

Packed = tuple[Tensor, Tensor, Tensor | None]  # qweight, scales, zeros


@gluon_jit
def _words(at, index, UNIT_0: gl.constexpr, K_WARPS: gl.constexpr, UNITS: gl.constexpr):  # type: ignore[no-untyped-def]
    """The words of a unit of each warp, from UNIT_0 on; zeros behind the last."""
    if UNIT_0 + K_WARPS <= UNITS:
        words = gl.load(at + UNIT_0 * 32)
    else:
        words = gl.load(at + UNIT_0 * 32, mask=index < UNITS - UNIT_0, other=0)
    return words


@gluon_jit
def _place(  # type: ignore[no-untyped-def]
    routed, shared, chosen, unit, n, word, UNIT_0: gl.constexpr, K_WARPS: gl.constexpr,
    EACH: gl.constexpr, TOP_K: gl.constexpr, SLICES: gl.constexpr, ROWS: gl.constexpr,
    STEP: gl.constexpr, PER: gl.constexpr, SHARED_PER: gl.constexpr,
):  # fmt: skip
    """Where units of `down` are, UNIT_0 the first of them all. Each of a matrix's ROWS has STEP
    elements for PER units (SHARED_PER in the shared experts' matrix)."""
    ROW: gl.constexpr = EACH // PER * STEP
    if SLICES == 0:
        expert = gl.load(chosen + unit // EACH).to(gl.int64)
        at = routed + (expert * (ROWS * ROW) + unit % EACH // PER * STEP + (n * ROW + word))
    else:
        SHARED_ROW: gl.constexpr = SLICES * EACH // SHARED_PER * STEP
        BEFORE: gl.constexpr = EACH * TOP_K
        if UNIT_0 >= BEFORE:
            at = shared + ((unit - BEFORE) // SHARED_PER * STEP + (n * SHARED_ROW + word))
        else:
            expert = gl.load(chosen + gl.minimum(unit // EACH, TOP_K - 1)).to(gl.int64)
            at = routed + (expert * (ROWS * ROW) + unit % EACH // PER * STEP + (n * ROW + word))
            if UNIT_0 + K_WARPS > BEFORE:
                behind = gl.maximum(unit - BEFORE, 0) // SHARED_PER * STEP
                other = shared + (behind + (n * SHARED_ROW + word))
                at = gl.where(unit < BEFORE, at, other)
    return at


@gluon_jit
def gate_up_few_kernel(  # type: ignore[no-untyped-def]
    x, weights, indices, pairs, tiles, qweight, scales, zeros, shared_q, shared_s, shared_z, inner,
    plane,
    HIDDEN: gl.constexpr, INTERMEDIATE: gl.constexpr, GROUP: gl.constexpr, TOP_K: gl.constexpr,
    ZEROS: gl.constexpr, BF16: gl.constexpr, SORTED: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, ROW_WARPS: gl.constexpr, K_WARPS: gl.constexpr, UNROLL: gl.constexpr,
    SLICES: gl.constexpr,
):  # fmt: skip
    """x as int64, qweight as int16 words. plane: elements of one plane of inner. shared_*: the
    shared experts' weight, with the same groups; not read where SLICES is 0."""
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
    MORE: gl.constexpr = INTERMEDIATE * GROUPS
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
        token = first // (TOP_K + SLICES)
        chosen = first - token * SLICES  # of the routing's pairs
        if SLICES:
            chosen = gl.minimum(chosen, token * TOP_K + TOP_K - 1)
        expert = gl.load(indices + chosen).to(gl.int64)
        x_at = x + token * WORDS + _row_index(32, B) + _last_index(BLOCK_M, B)
    qweight += expert * (2 * INTERMEDIATE * WORDS)
    scales += expert * (2 * MORE)
    zeros += expert * (2 * MORE)
    up_q = INTERMEDIATE * WORDS
    up_s = MORE
    if SLICES:
        part = first - token * (TOP_K + SLICES) - TOP_K  # of the shared experts, if not negative
        qweight = gl.where(part < 0, qweight, shared_q + part * (INTERMEDIATE * WORDS))
        scales = gl.where(part < 0, scales, shared_s + part * MORE)
        zeros = gl.where(part < 0, zeros, shared_z + part * MORE)
        up_q = gl.where(part < 0, INTERMEDIATE * WORDS, SLICES * INTERMEDIATE * WORDS)
        up_s = gl.where(part < 0, MORE, SLICES * MORE)
        weight = gl.where(part < 0, gl.load(weights + chosen), 1.0)
    unit_a = _unit_index(K_WARPS, A)
    unit_s = _unit_index(K_WARPS, S)
    unit_z = _unit_index(K_WARPS, Z)
    unit_b = _unit_index(K_WARPS, B)
    x_at += unit_b * 32
    begin = gl.program_id(0) * BLOCK_N
    n = begin + _row_index(BLOCK_N, A)
    q_at = qweight + (n * WORDS + unit_a * 32 + _last_index(32, A))
    s_at = scales + (begin + _row_index(BLOCK_N, S)) * GROUPS
    z_at = zeros + (begin + _row_index(BLOCK_N, Z)) * GROUPS
    gate = gl.zeros([K_WARPS, BLOCK_N, BLOCK_M], gl.float32, layout=ACC)
    up = gl.zeros([K_WARPS, BLOCK_N, BLOCK_M], gl.float32, layout=ACC)
    for step in gl.static_range(0, UNITS, K_WARPS * UNROLL):
        g = ()
        u = ()
        for i in gl.static_range(UNROLL):
            g = g + (_words(q_at, unit_a, step + i * K_WARPS, K_WARPS, UNITS),)  # type: ignore[assignment]  # noqa: RUF005
            u = u + (_words(q_at + up_q, unit_a, step + i * K_WARPS, K_WARPS, UNITS),)  # type: ignore[assignment]  # noqa: RUF005
        if SORTED:
            tl.debug_barrier()  # all loads are asked for before one is used; else ptxas sinks them
        for i in gl.static_range(UNROLL):
            if step + i * K_WARPS < UNITS:
                a = _words(x_at, unit_b, step + i * K_WARPS, K_WARPS, UNITS)
                of_s = gl.minimum(step + i * K_WARPS + unit_s, UNITS - 1) // PER
                of_z = gl.minimum(step + i * K_WARPS + unit_z, UNITS - 1) // PER
                g_scale = gl.load(s_at + of_s)
                u_scale = gl.load(s_at + up_s + of_s)
                g_zero = g_scale
                u_zero = u_scale
                if ZEROS:
                    g_zero = gl.load(z_at + of_z)
                    u_zero = gl.load(z_at + up_s + of_z)
                gate = _add(gate, g[i], g_scale, g_zero, a, ZEROS, 1, 0, BF16)
                up = _add(up, u[i], u_scale, u_zero, a, ZEROS, 1, 0, BF16)
    gate = gl.sum(gate, axis=0)
    made = gate / (1.0 + gl.exp(-gate)) * gl.sum(up, axis=0)
    n = begin + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, gl.SliceLayout(0, ACC)))[:, None]
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, gl.SliceLayout(0, ACC)))[None, :]
    pair = first + gl.minimum(m, count - 1)
    if SORTED:
        pair = gl.load(pairs + pair)
    if SLICES == 0:
        weight = gl.load(weights + pair)
    made *= weight
    high = made.to(gl.bfloat16)
    at = inner + (first + m) * INTERMEDIATE + n
    gl.store(at, high, mask=m < count)
    if not BF16:
        gl.store(at + plane, (made - high.to(gl.float32)).to(gl.bfloat16), mask=m < count)


@gluon_jit
def down_few_kernel(  # type: ignore[no-untyped-def]
    inner, indices, pairs, tiles, qweight, scales, zeros, shared_q, shared_s, shared_z, y, plane,
    HIDDEN: gl.constexpr, INTERMEDIATE: gl.constexpr, GROUP: gl.constexpr, TOP_K: gl.constexpr,
    ZEROS: gl.constexpr, BF16: gl.constexpr, SORTED: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, ROW_WARPS: gl.constexpr, K_WARPS: gl.constexpr, UNROLL: gl.constexpr,
    SLICES: gl.constexpr, SHARED_GROUP: gl.constexpr,
):  # fmt: skip
    """inner as int64, qweight as int16 words. plane: words of one plane of inner. y: of pairs in
    fp32 where SORTED, else of tokens. shared_*: the shared experts' weight; not read where SLICES
    is 0."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[K_WARPS, ROW_WARPS, 1], instr_shape=[1, 16, 8]
    )
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 8)
    B: gl.constexpr = gl.DotOperandLayout(1, ACC, 8)
    S: gl.constexpr = gl.SliceLayout(2, ACC)
    Z: gl.constexpr = gl.SliceLayout(2, A)
    WORDS: gl.constexpr = INTERMEDIATE // 4
    EACH: gl.constexpr = INTERMEDIATE // 128  # units of an expert
    UNITS: gl.constexpr = EACH if SORTED else EACH * (TOP_K + SLICES)
    PER: gl.constexpr = GROUP // 128
    SHARED_PER: gl.constexpr = SHARED_GROUP // 128
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
        x_at = inner + row_index * ((TOP_K + SLICES) * WORDS)
        x_at += _row_index(32, B) + _last_index(BLOCK_M, B)
    unit_a = _unit_index(K_WARPS, A)
    unit_s = _unit_index(K_WARPS, S)
    unit_z = _unit_index(K_WARPS, Z)
    unit_b = _unit_index(K_WARPS, B)
    x_at += unit_b * 32
    begin = gl.program_id(0) * BLOCK_N
    n_a = begin + _row_index(BLOCK_N, A)
    n_s = begin + _row_index(BLOCK_N, S)
    n_z = begin + _row_index(BLOCK_N, Z)
    word = _last_index(32, A)
    acc = gl.zeros([K_WARPS, BLOCK_N, BLOCK_M], gl.float32, layout=ACC)
    for step in gl.static_range(0, UNITS, K_WARPS * UNROLL):
        q = ()
        s = ()
        z = ()
        for i in gl.static_range(UNROLL):
            # A unit behind the last is the last one here, and meets zeros of `inner`.
            unit = gl.minimum(step + i * K_WARPS + unit_a, UNITS - 1)
            at = _place(
                qweight, shared_q, chosen, unit, n_a, word, step + i * K_WARPS, K_WARPS, EACH,
                TOP_K, SLICES, HIDDEN, 32, 1, 1,
            )  # fmt: skip
            q = q + (gl.load(at),)  # type: ignore[assignment]  # noqa: RUF005
            unit = gl.minimum(step + i * K_WARPS + unit_s, UNITS - 1)
            at = _place(
                scales, shared_s, chosen, unit, n_s, 0, step + i * K_WARPS, K_WARPS, EACH, TOP_K,
                SLICES, HIDDEN, 1, PER, SHARED_PER,
            )  # fmt: skip
            scale = gl.load(at)
            s = s + (scale,)  # type: ignore[assignment]  # noqa: RUF005
            zero = scale
            if ZEROS:
                unit = gl.minimum(step + i * K_WARPS + unit_z, UNITS - 1)
                at = _place(
                    zeros, shared_z, chosen, unit, n_z, 0, step + i * K_WARPS, K_WARPS, EACH,
                    TOP_K, SLICES, HIDDEN, 1, PER, SHARED_PER,
                )  # fmt: skip
                zero = gl.load(at)
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
    shared: tuple[Packed, Packed] | None = None,
) -> Tensor:  # fmt: skip
    """All contiguous; x [tokens, hidden], weights in fp32. See `reads` for the shapes taken.
    shared: gate_up and down of shared experts (shared_experts.py says which); only where m = 0."""
    tokens, hidden = x.shape
    top_k, intermediate = indices.shape[-1], 2 * down_q.shape[-1]
    is_sorted, bf16 = config.m > 0, x.dtype is torch.bfloat16
    gate_up = _words_of(gate_up_q, gate_up_scales, gate_up_zeros)
    down = _words_of(down_q, down_scales, down_zeros)
    shared_gate_up, shared_down = gate_up, down
    slices, unroll = 0, config.down_unroll
    if shared:
        shared_gate_up, shared_down = _words_of(*shared[0]), _words_of(*shared[1])
        slices = 2 * shared[1][0].shape[-1] // intermediate
        # As many steps as without them, each with more loads under way.
        units = intermediate // UNIT * top_k
        steps = -(-units // (config.down_k_warps * unroll))
        units += intermediate // UNIT * slices
        unroll = -(-units // (config.down_k_warps * steps))
    pairs = tiles = indices
    programs = tokens * (top_k + slices)
    if is_sorted:
        pairs, tiles = moe_tiles_triton(indices, gate_up_q.shape[0], config.m)
        programs = tiles.shape[0]
    planes, rows = 1 if bf16 else 2, tokens * (top_k + slices)
    inner = x.new_empty(planes, rows, intermediate, dtype=torch.bfloat16)
    y = torch.empty_like(x)
    parts = x.new_empty(tokens, top_k, hidden, dtype=torch.float32) if is_sorted else y
    both = {
        "HIDDEN": hidden, "INTERMEDIATE": intermediate, "TOP_K": top_k, "BF16": bf16,
        "SORTED": is_sorted, "BLOCK_M": max(1, config.m), "SLICES": slices, "launch_pdl": True,
    }  # fmt: skip
    gate_up_few_kernel[(intermediate // config.n, programs)](
        as_words(x, torch.int64), weights, indices, pairs, tiles, *gate_up, *shared_gate_up, inner,
        inner[0].numel(), GROUP=hidden // gate_up_scales.shape[-1],
        ZEROS=gate_up_zeros is not None, BLOCK_N=config.n, ROW_WARPS=config.row_warps,
        K_WARPS=config.k_warps, UNROLL=config.unroll,
        num_warps=config.k_warps * config.row_warps, **both,
    )  # fmt: skip
    down_few_kernel[(hidden // config.down_n, programs if is_sorted else tokens)](
        as_words(inner, torch.int64), indices, pairs, tiles, *down, *shared_down, parts,
        inner[0].numel() // 4, GROUP=intermediate // down_scales.shape[-1],
        SHARED_GROUP=max(1, slices) * intermediate // shared_down[1].shape[-1],
        ZEROS=down_zeros is not None, BLOCK_N=config.down_n, ROW_WARPS=config.down_row_warps,
        K_WARPS=config.down_k_warps, UNROLL=unroll,
        num_warps=config.down_k_warps * config.down_row_warps, **both,
    )  # fmt: skip
    if is_sorted:
        moe_combine_triton(parts, y)
    return y


def _words_of(qweight: Tensor, scales: Tensor, zeros: Tensor | None) -> tuple[Tensor, ...]:
    return as_words(qweight, torch.int16), scales, scales if zeros is None else zeros


def reads(x: Tensor, *group_sizes: int) -> bool:
    """Whether the kernels here serve x and groups of these sizes."""
    return supports(x, UNIT) and all(size % UNIT == 0 for size in group_sizes)
