"""Decode attention over a paged KV cache: one query token against its whole context.

    q               [tokens, heads, qk_dim]
    k_pool, v_pool  [blocks, block_size, kv_heads, qk_dim | v_dim]   q's dtype, int8 or float8_e4m3fn
    k_scale         INT8 [blocks, block_size, kv_heads], FP8 [kv_heads], fp32; v_scale alike
    block_tables    [sequences, max_blocks]; context_lens [sequences]; query_start [sequences + 1]
    y               [tokens, heads, v_dim]

    y_h = sum_t softmax_t(scale * q_h . k_t) v_t        t over the visible tokens of the sequence

The query heads of one KV head are the rows of one tile, so K and V are read once. The context is
split into equal parts among programs (flash-decoding); each leaves its normalised part and the
logarithm of its sum, and the program that arrives last merges them:
    y = sum_i 2^(l_i - L) y_i,  2^L = sum_i 2^l_i       (l_i: log2 of part i's sum of exponentials)
so there is no second launch. Quantised values are widened exactly to fp16 and multiplied with
fp16 queries (divided by their largest value) and probabilities; scales are applied in fp32.
Nothing here waits for the device: grids come from shapes.
Source: Dao et al., "Flash-Decoding for long-context inference", 2023; Kwon et al., 2023.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seekforge.kernels.kv_write import pool_kind
from seekforge.kernels.triton_support import jit, next_power_of_2, tl
from seekforge.kernels.tuning import Config, decode_config, multiprocessors

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
def widen(x, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stored values in the dtype of the product; exact."""
    if KIND == "int8":
        # 0x6400 is 1024 in fp16 with a last place of 1: no integer conversions, which are slow.
        return (x.to(tl.int16) + 0x6480).to(tl.float16, bitcast=True) - 1152.0
    else:
        if KIND == "fp8":
            return x.to(tl.float16)
        else:
            return x


@jit
def find_blocks(  # type: ignore[no-untyped-def]
    table, n, last, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """The pool blocks of the tokens n:n + BLOCK_N (one where they lie in one block); 0 from last
    on."""
    if BLOCK_SIZE % BLOCK_N == 0:
        return tl.load(table + n // BLOCK_SIZE, mask=n < last, other=0).to(tl.int64)
    else:
        at = n + tl.arange(0, BLOCK_N)
        return tl.load(table + at // BLOCK_SIZE, mask=at < last, other=0).to(tl.int64)


@jit
def merge_splits(  # type: ignore[no-untyped-def]
    parts, logs, y, y_head, used, rows, dim,
    SPLITS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """parts [SPLITS, ROWS, DIM] and logs [SPLITS, ROWS] of one tile -> y + row * y_head."""
    row = tl.arange(0, ROWS)
    every = tl.arange(0, SPLITS)[:, None]
    log = tl.load(
        logs + every * ROWS + row[None, :],
        mask=(every < used) & (row < rows)[None, :], other=float("-inf"), cache_modifier=".cg",
    )  # fmt: skip
    top = tl.maximum(tl.max(log, axis=0), -1e30)
    total = tl.sum(tl.exp2(log - top[None, :]), axis=0)
    d = tl.arange(0, DIM)[None, None, :]
    chunk = tl.arange(0, CHUNK)[:, None, None]
    merged = tl.zeros([ROWS, DIM], tl.float32)
    for first in range(0, used, CHUNK):
        at = first + chunk
        inside = (at < used) & (row < rows)[None, :, None]
        weight = tl.load(
            logs + at * ROWS + row[None, :, None], mask=inside, other=float("-inf"),
            cache_modifier=".cg",
        )  # fmt: skip
        part = tl.load(
            parts + (at * ROWS + row[None, :, None]) * DIM + d, mask=inside, other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        merged += tl.sum(part * tl.exp2(weight - top[None, :, None]), axis=0)
    column = tl.arange(0, DIM)[None, :]
    tl.store(
        y + row[:, None] * y_head + column, (merged / tl.maximum(total, 1e-30)[:, None]).to(y.dtype.element_ty),
        mask=(row < rows)[:, None] & (column < dim),
    )  # fmt: skip


@jit
def paged_decode_kernel(  # type: ignore[no-untyped-def]
    q, k_pool, v_pool, k_scale, v_scale, y, parts, logs, counters,
    block_tables, context_lens, query_start, scale, sequences,
    q_token, q_head, k_block, k_slot, k_head, v_block, v_slot, v_head, table_stride, y_token,
    y_head,
    BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, MERGE_ROWS: tl.constexpr,
    QK_DIM: tl.constexpr, QK: tl.constexpr, V_DIM: tl.constexpr, V: tl.constexpr,
    BLOCK_N: tl.constexpr, MOST_SPLITS: tl.constexpr, CHUNK: tl.constexpr,
    BY_ROW: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    split = tl.program_id(1)
    entry = tl.program_id(2)
    sequence = entry
    start = tl.load(query_start + sequence)
    end = tl.load(query_start + sequence + 1)
    row = start
    if BY_ROW:
        row = start * 0 + entry
        if (start != entry) | (end != entry + 1):  # not one token in each sequence
            sequence = find_sequence(query_start, row, sequences)
            end = tl.load(query_start + sequence + 1)
    visible = (tl.load(context_lens + sequence) - (end - 1 - row)).to(tl.int32)
    if BY_ROW:
        visible = tl.where(row < end, visible, 0)  # a padding row
    else:
        visible = tl.where(end - start == 1, visible, 0)
    each = tl.cdiv(tl.cdiv(visible, tl.num_programs(1)), BLOCK_N) * BLOCK_N
    first = split * each
    if first >= visible:
        return
    last = tl.minimum(first + each, visible)

    group = tl.arange(0, ROWS)
    d = tl.arange(0, QK)
    dv = tl.arange(0, V)
    query = tl.load(
        q + row * q_token + (head * GROUP + group)[:, None] * q_head + d[None, :],
        mask=(group < GROUP)[:, None] & (d < QK_DIM)[None, :], other=0.0,
    )  # fmt: skip
    if KIND != "plain":
        wide = query.to(tl.float32)
        top = tl.maximum(tl.max(tl.abs(wide), axis=1), 1e-30)[:, None]
        query = (wide / top).to(tl.float16)
        scale = scale * top
        if KIND == "fp8":
            scale = scale * tl.load(k_scale + head)
    k_base = k_pool + head.to(tl.int64) * k_head
    v_base = v_pool + head.to(tl.int64) * v_head
    table = block_tables + sequence.to(tl.int64) * table_stride
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, V], tl.float32)
    # One step ahead: a load that waits for a load of its own step would halve the pipeline's depth.
    upcoming = find_blocks(table, first, last, BLOCK_N, BLOCK_SIZE)
    for n in range(first, last, BLOCK_N):
        block = upcoming
        upcoming = find_blocks(table, n + BLOCK_N, last, BLOCK_N, BLOCK_SIZE)
        at = n + tl.arange(0, BLOCK_N)
        inside = at < last
        k_at = block * k_block + (at % BLOCK_SIZE) * k_slot
        v_at = block * v_block + (at % BLOCK_SIZE) * v_slot
        # A slot behind the context may hold NaN: hidden in K by the scores' mask, in V by this one.
        if QK_DIM == QK:
            keys = tl.load(k_base + k_at[None, :] + d[:, None])
        else:
            keys = tl.load(
                k_base + k_at[None, :] + d[:, None], mask=(d < QK_DIM)[:, None], other=0.0
            )
        if V_DIM == V:
            values = tl.load(v_base + v_at[:, None] + dv[None, :], mask=inside[:, None], other=0.0)
        else:
            values = tl.load(
                v_base + v_at[:, None] + dv[None, :],
                mask=inside[:, None] & (dv < V_DIM)[None, :], other=0.0,
            )  # fmt: skip
        scores = tl.dot(query, widen(keys, KIND), input_precision=PRECISION) * scale
        if KIND == "int8":
            at_scale = (block * BLOCK_SIZE + at % BLOCK_SIZE) * tl.num_programs(0) + head
            scores *= tl.load(k_scale + at_scale, mask=inside, other=0.0)[None, :]
        scores = tl.where(inside[None, :], scores, float("-inf"))
        top_now = tl.maximum(highest, tl.max(scores, axis=1))
        shrink = tl.exp2(highest - top_now)
        weight = tl.exp2(scores - top_now[:, None])
        total = total * shrink + tl.sum(weight, axis=1)
        if KIND == "int8":
            weight *= tl.load(v_scale + at_scale, mask=inside, other=0.0)[None, :]
        values = widen(values, KIND)
        acc = tl.dot(
            weight.to(values.dtype), values, acc * shrink[:, None], input_precision=PRECISION
        )
        highest = top_now
    acc = acc / total[:, None]
    if KIND == "fp8":
        acc *= tl.load(v_scale + head)

    valid = group < GROUP
    y_at = y + row * y_token + head.to(tl.int64) * GROUP * y_head
    used = tl.cdiv(visible, each)
    if used == 1:
        tl.store(
            y_at + group[:, None] * y_head + dv[None, :], acc.to(y.dtype.element_ty),
            mask=valid[:, None] & (dv < V_DIM)[None, :],
        )  # fmt: skip
    else:
        tile = entry.to(tl.int64) * tl.num_programs(0) + head
        parts += tile * tl.num_programs(1) * MERGE_ROWS * V
        logs += tile * tl.num_programs(1) * MERGE_ROWS
        own = split * MERGE_ROWS + group
        tl.store(parts + own[:, None] * V + dv[None, :], acc, mask=valid[:, None])
        tl.store(logs + own, highest + tl.log2(total), mask=valid)
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == used - 1:
            tl.debug_barrier()
            merge_splits(
                parts, logs, y_at, y_head, used, GROUP, V_DIM, MOST_SPLITS, CHUNK, MERGE_ROWS, V
            )
            tl.store(counters + tile, 0)


def paged_decode_triton(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, block_tables: Tensor, context_lens: Tensor,
    query_start: Tensor, scale: float, y: Tensor, counters: Tensor, by_row: bool,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, config: Config | None = None,
) -> None:  # fmt: skip
    """Fills y's rows of the sequences with one token, or every row where `by_row`.

    counters: zero, int32, at least kv_heads * (tokens if by_row else sequences); zero afterwards.
    """
    tokens, heads, qk_dim = q.shape
    sequences, width = block_tables.shape
    block_size, kv_heads = k_pool.shape[1:3]
    v_dim, group = v_pool.shape[3], heads // kv_heads
    entries = tokens if by_row else sequences
    kind = pool_kind(k_pool)
    config = config or decode_config(
        kind if kind != "plain" else str(q.dtype).removeprefix("torch."),
        tiles=entries * kv_heads, context=width * block_size, dim=max(qk_dim, v_dim),
        processors=multiprocessors(q.device),
    )  # fmt: skip
    rows, v_pad = next_power_of_2(group), next_power_of_2(max(v_dim, 16))
    splits = config.splits
    parts = q.new_empty(entries * kv_heads * splits * rows * v_pad, dtype=torch.float32)
    logs = q.new_empty(entries * kv_heads * splits * rows, dtype=torch.float32)
    paged_decode_kernel[(kv_heads, splits, entries)](
        q, k_pool, v_pool, k_pool if k_scale is None else k_scale,
        v_pool if v_scale is None else v_scale, y, parts, logs, counters,
        block_tables, context_lens, query_start, scale * LOG2_E, sequences,
        q.stride(0), q.stride(1), *k_pool.stride()[:3], *v_pool.stride()[:3],
        block_tables.stride(0), y.stride(0), y.stride(1),
        BLOCK_SIZE=block_size, GROUP=group, ROWS=max(rows, 16), MERGE_ROWS=rows,
        QK_DIM=qk_dim, QK=next_power_of_2(max(qk_dim, 16)), V_DIM=v_dim, V=v_pad,
        BLOCK_N=config.block_n, MOST_SPLITS=16 if splits <= 16 else 128,
        CHUNK=max(1, min(16, 4096 // (rows * v_pad))),
        BY_ROW=by_row, KIND=kind,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
