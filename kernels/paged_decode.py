"""Decode attention over a paged KV cache: one query token against its whole context.

    q               [tokens, heads, qk_dim]
    k_pool, v_pool  [blocks, block_size, kv_heads, qk_dim | v_dim]  q's dtype, int8, float8_e4m3fn
    k_scale         INT8 [blocks, block_size, kv_heads], FP8 [kv_heads], fp32; v_scale alike
    block_tables    [sequences, max_blocks]; context_lens [sequences]; query_start [sequences + 1]
    y               [tokens, heads, v_dim]

    y_h = sum_t softmax_t(scale * q_h . k_t) v_t        t over the visible tokens of the sequence

The query heads of one KV head are the rows of one tile, so K and V are read once. The context is
split into equal parts among programs, which split_merge.py merges, where there are few tiles.
Quantised values are widened exactly to fp16 and multiplied with fp16 queries (divided by their
largest value) and probabilities; scales are applied in fp32.
Nothing here waits for the device: grids come from shapes.
Source: Dao et al., "Flash-Decoding for long-context inference", 2023; Kwon et al., 2023.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seekforge.kernels.kv_write import pool_kind
from seekforge.kernels.split_merge import split_merge_triton
from seekforge.kernels.triton_support import jit, next_power_of_2, tl
from seekforge.kernels.tuning import Config, decode_config, multiprocessors, overlaps_launches

LOG2_E = 1.4426950408889634


@jit
def find_sequence(query_start, row, sequences):  # type: ignore[no-untyped-def]
    """The last sequence that starts at or before this row."""
    low = 0
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(query_start + middle) <= row
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@jit
def halves(words, KIND: tl.constexpr, PACKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The even and the odd values of stored 16-bit words, in fp16; exact.

    Words, since matrix units read pairs of bytes from shared memory, and single bytes one by one.
    INT8: 0x6480 is 1152 in fp16 with a last place of 1, so its lower bits take x + 128.
    FP8: the bits of E4M3 in the places of fp16 (its exponent's bias is 8 larger: times 256).
    PACKED: the same in PTX, two words at a time; for compiled kernels.
    """
    if PACKED:
        if KIND == "int8":
            low, high = tl.inline_asm_elementwise(
                """{ .reg .b32 t, c; mov.b32 c, 0x64806480;
                lop3.b32 $0, $2, 0x00ff00ff, c, 0x6a; sub.f16x2 $0, $0, c;
                shr.b32 t, $2, 8; lop3.b32 $1, t, 0x00ff00ff, c, 0x6a; sub.f16x2 $1, $1, c; }""",
                "=&r,=&r,r", [words], (tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            low, high = tl.inline_asm_elementwise(
                """{ .reg .b16 a, b; .reg .b32 t, u; mov.b32 {a, b}, $2;
                cvt.rn.f16x2.e4m3x2 t, a; cvt.rn.f16x2.e4m3x2 u, b;
                prmt.b32 $0, t, u, 0x5410; prmt.b32 $1, t, u, 0x7632; }""",
                "=&r,=&r,r", [words], (tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
    else:
        low = words & 0xFF
        high = (words >> 8) & 0xFF
        if KIND == "int8":
            low = (low ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0
            high = (high ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0
        else:
            low = (((low & 0x80) << 8) | ((low & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
            high = ((high & 0x80) << 8) | ((high & 0x7F) << 7)
            high = high.to(tl.float16, bitcast=True) * 256.0
    return low, high


@jit
def find_blocks(  # type: ignore[no-untyped-def]
    table, n, last, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """The pool blocks of the tokens n:n + BLOCK_N (one where they lie in one block); 0 from last
    on."""
    if BLOCK_SIZE % BLOCK_N == 0:
        block = tl.load(table + n // BLOCK_SIZE, mask=n < last, other=0)
    else:
        at = n + tl.arange(0, BLOCK_N)
        block = tl.load(table + at // BLOCK_SIZE, mask=at < last, other=0)
    return block.to(tl.int64)


@jit
def load_tile(base, rows, columns, inside, WIDTH: tl.constexpr, PAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """base + rows + columns; what lies beyond WIDTH columns, or outside, is zero."""
    if WIDTH != PAD:
        inside = inside & (columns < WIDTH)
    return tl.load(base + rows + columns, mask=inside, other=0)


@jit
def paged_decode_kernel(  # type: ignore[no-untyped-def]
    q, k_pool, v_pool, k_scale, v_scale, y, parts, logs,
    block_tables, context_lens, query_start, scale, sequences,
    q_token, q_head, k_block, k_slot, k_head, v_block, v_slot, v_head, table_stride, y_token,
    y_head,
    BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    QK_DIM: tl.constexpr, QK: tl.constexpr, V_DIM: tl.constexpr, V: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, BY_ROW: tl.constexpr, KIND: tl.constexpr,
    PACKED: tl.constexpr, OVERLAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """QK_DIM, V_DIM and the pools' strides count stored words: two values each where quantised."""
    head = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    entry = tl.program_id(2)
    splits = tl.num_programs(1)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    sequence = entry
    if BY_ROW:
        sequence = tl.minimum(entry, sequences - 1)
    start = tl.load(query_start + sequence)
    end = tl.load(query_start + sequence + 1)
    context = tl.load(context_lens + sequence)
    row = start
    if BY_ROW:
        row = start * 0 + entry
        if (start != entry) | (end != entry + 1):  # not one token in each sequence
            sequence = find_sequence(query_start, row, sequences)
            end = tl.load(query_start + sequence + 1)
            context = tl.load(context_lens + sequence)
        served = row < end  # else a padding row
    else:
        served = end - start == 1
    visible = tl.where(served, context - (end - 1 - row), 0).to(tl.int32)
    each = tl.cdiv(tl.cdiv(visible, splits), BLOCK_N) * BLOCK_N
    first = split * each
    group = tl.arange(0, ROWS)
    valid = group < GROUP
    own = ((entry * tl.num_programs(0) + head) * GROUP + group) * splits + split
    if first >= visible:
        if SPLIT:
            if OVERLAP:
                tl.extra.cuda.gdc_wait()
            tl.store(logs + own, tl.full([ROWS], float("-inf"), tl.float32), mask=valid)
        return
    last = tl.minimum(first + each, visible)
    table = block_tables + sequence.to(tl.int64) * table_stride
    # One step ahead: a load that waits for a load of its own step would halve the pipeline's depth.
    upcoming = find_blocks(table, first, last, BLOCK_N, BLOCK_SIZE)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # for the new tokens in the pools

    d = tl.arange(0, QK)[None, :]
    dv = tl.arange(0, V)[None, :]
    q_at = row * q_token + (head * GROUP + group)[:, None] * q_head
    in_query = valid[:, None] & (tl.arange(0, QK) < QK_DIM)[None, :]
    if KIND == "plain":
        query = tl.load(q + q_at + tl.arange(0, QK)[None, :], mask=in_query, other=0.0)
    else:
        even = tl.load(q + q_at + 2 * tl.arange(0, QK)[None, :], mask=in_query, other=0.0)
        odd = tl.load(q + q_at + 2 * tl.arange(0, QK)[None, :] + 1, mask=in_query, other=0.0)
        even = even.to(tl.float32)
        odd = odd.to(tl.float32)
        top = tl.maximum(tl.max(tl.abs(even), axis=1), tl.max(tl.abs(odd), axis=1))
        top = tl.maximum(top, 1e-30)[:, None]
        even = (even / top).to(tl.float16)
        odd = (odd / top).to(tl.float16)
        scale = scale * top
        if KIND == "fp8":
            scale = scale * tl.load(k_scale + head)
    k_base = k_pool + head * k_head
    v_base = v_pool + head * v_head
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, V], tl.float32)
    if KIND != "plain":
        acc_odd = tl.zeros([ROWS, V], tl.float32)
    for n in range(first, last, BLOCK_N):
        block = upcoming
        upcoming = find_blocks(table, n + BLOCK_N, last, BLOCK_N, BLOCK_SIZE)
        at = n + tl.arange(0, BLOCK_N)
        inside = at < last
        k_at = block * k_block + (at % BLOCK_SIZE) * k_slot
        v_at = block * v_block + (at % BLOCK_SIZE) * v_slot
        # A slot behind the context may hold NaN: hidden in K by the scores' mask, in V by `inside`.
        if QK_DIM == QK:
            keys = tl.load(k_base + k_at[:, None] + d)
        else:
            keys = tl.load(k_base + k_at[:, None] + d, mask=d < QK_DIM, other=0)
        keys = tl.trans(keys)
        values = load_tile(v_base, v_at[:, None], dv, inside[:, None], V_DIM, V)
        if KIND == "plain":
            scores = tl.dot(query, keys, input_precision=PRECISION) * scale
        else:
            low, high = halves(keys, KIND, PACKED)
            scores = tl.dot(odd, high, tl.dot(even, low)) * scale
        if KIND == "int8":
            slot = (block * BLOCK_SIZE + at % BLOCK_SIZE) * tl.num_programs(0) + head
            scores *= tl.load(k_scale + slot, mask=inside, other=0.0)[None, :]
        scores = tl.where(inside[None, :], scores, float("-inf"))
        top_now = tl.maximum(highest, tl.max(scores, axis=1))
        shrink = tl.exp2(highest - top_now)
        weight = tl.exp2(scores - top_now[:, None])
        total = total * shrink + tl.sum(weight, axis=1)
        if KIND == "int8":
            weight *= tl.load(v_scale + slot, mask=inside, other=0.0)[None, :]
        acc *= shrink[:, None]
        if KIND == "plain":
            acc = tl.dot(weight.to(values.dtype), values, acc, input_precision=PRECISION)
        else:
            low, high = halves(values, KIND, PACKED)
            acc = tl.dot(weight.to(tl.float16), low, acc)
            acc_odd = tl.dot(weight.to(tl.float16), high, acc_odd * shrink[:, None])
        highest = top_now
    by = 1.0 / total[:, None]
    if KIND == "fp8":
        by *= tl.load(v_scale + head)

    stored = valid[:, None] & (dv < V_DIM)
    step: tl.constexpr = 1 if KIND == "plain" else 2
    if SPLIT:
        target = parts + own[:, None] * (V_DIM * step) + dv * step
        tl.store(target, acc * by, mask=stored)
        if KIND != "plain":
            tl.store(target + 1, acc_odd * by, mask=stored)
        tl.store(logs + own, highest + tl.log2(total), mask=valid)
    else:
        target = y + row * y_token + (head * GROUP + group)[:, None] * y_head + dv * step
        tl.store(target, (acc * by).to(y.dtype.element_ty), mask=stored)
        if KIND != "plain":
            tl.store(target + 1, (acc_odd * by).to(y.dtype.element_ty), mask=stored)


def paged_decode_triton(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, block_tables: Tensor, context_lens: Tensor,
    query_start: Tensor, scale: float, y: Tensor, by_row: bool,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, config: Config | None = None,
) -> None:  # fmt: skip
    """Fills y's rows of the sequences with one token, or every row where `by_row`.

    Starts before the launch before it has ended, and waits for it before it reads q or the pools;
    the index tensors must be older. Quantised pools need even head dims.
    """
    tokens, heads, qk_dim = q.shape
    sequences, width = block_tables.shape
    block_size, kv_heads = k_pool.shape[1:3]
    v_dim, group = v_pool.shape[3], heads // kv_heads
    entries = tokens if by_row else sequences
    kind = pool_kind(k_pool)
    if kind != "plain":
        k_pool, v_pool = k_pool.view(torch.int16), v_pool.view(torch.int16)
    k_words, v_words = k_pool.shape[3], v_pool.shape[3]
    config = config or decode_config(
        kind if kind != "plain" else str(q.dtype).removeprefix("torch."),
        tiles=entries * kv_heads, context=width * block_size, block_size=block_size,
        dim=max(qk_dim, v_dim), processors=multiprocessors(q.device),
    )  # fmt: skip
    splits, overlap = config.splits, overlaps_launches(q.device)
    pieces = splits if splits > 1 else 0
    parts = q.new_empty(entries, heads, pieces, v_dim, dtype=torch.float32)
    logs = q.new_empty(entries, heads, pieces, dtype=torch.float32)
    paged_decode_kernel[(kv_heads, splits, entries)](
        q, k_pool, v_pool, k_pool if k_scale is None else k_scale,
        v_pool if v_scale is None else v_scale, y, parts, logs,
        block_tables, context_lens, query_start, scale * LOG2_E, sequences,
        q.stride(0), q.stride(1), *k_pool.stride()[:3], *v_pool.stride()[:3],
        block_tables.stride(0), y.stride(0), y.stride(1),
        BLOCK_SIZE=block_size, GROUP=group, ROWS=max(next_power_of_2(group), 16),
        QK_DIM=k_words, QK=next_power_of_2(max(k_words, 16)), V_DIM=v_words,
        V=next_power_of_2(max(v_words, 16)), BLOCK_N=config.block_n, SPLIT=splits > 1,
        BY_ROW=by_row, KIND=kind, PACKED=overlap, OVERLAP=overlap,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=config.warps, num_stages=config.stages,
        **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip
    if splits > 1:
        split_merge_triton(parts, logs, y, query_start, by_row)
