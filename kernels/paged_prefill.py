"""Prefill attention over a paged KV cache: chunks of several tokens, each with its paged prefix.

    q               [tokens, heads, qk_dim]
    k_pool, v_pool  [blocks, block_size, kv_heads, qk_dim | v_dim]   the chunk's own tokens included
    k_scale, v_scale  of INT8 and FP8 pools, as in paged_decode
    block_tables    [sequences, max_blocks]; context_lens [sequences]; query_start [sequences + 1]
    y               [tokens, heads, v_dim]

    y_ih = sum_t softmax_t(scale * q_ih . k_t) v_t     t <= context - new + i: bottom-right aligned

A tile has BLOCK_M rows; row r is query head r % group of new token r // group, so that any group
size fills it and K and V are read once for the whole group. Sequence i owns the tiles from
query_start[i] * group // BLOCK_M + i on: an upper bound that needs no knowledge of the lengths on
the host; the tiles beyond its rows do nothing. Late tiles see the most context and start first.
Quantised values become q's dtype, exactly, as they are read; FP8's scales are factors of the
scores and of y, those of INT8 of a token's scores and probabilities.
Source: Dao, "FlashAttention-2", 2023.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seekforge.kernels.kv_write import pool_kind
from seekforge.kernels.paged_decode import LOG2_E, find_blocks
from seekforge.kernels.paged_prefill_hopper import paged_prefill_hopper
from seekforge.kernels.triton_support import jit, next_power_of_2, tl
from seekforge.kernels.tuning import Config, overlaps_launches, prefill_config

# What the CUDA kernel is for: below, Triton's is as fast or faster (256 tokens 8.5 us instead of
# 13.2; at 1,024 they are equal, at 4,096 it is 268 instead of 314, in blocks of 16 instead of 434).
HOPPER_TOKENS, HOPPER_BLOCKS = 1024, range(16, 129)


@jit
def find_tile(query_start, tile, sequences, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sequence that owns a tile, and the tile's number within it."""
    spare: tl.constexpr = 0 if GROUP % BLOCK_M == 0 else 1  # a part of a tile in each sequence
    low = 0
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(query_start + middle) * GROUP // BLOCK_M + middle * spare <= tile
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    first = tl.load(query_start + low) * GROUP // BLOCK_M + low * spare
    return low, (tile - first).to(tl.int32)


@jit
def attend(  # type: ignore[no-untyped-def]
    query, acc, highest, total, k_base, v_base, k_tiles, v_tiles, k_scale, v_scale, head, table,
    seen, first, last, scale, k_block, k_slot, v_block, v_slot,
    BLOCK_SIZE: tl.constexpr, QK_DIM: tl.constexpr, QK: tl.constexpr, V_DIM: tl.constexpr,
    V: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, TILES: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Tokens first:last of the context; `seen` [BLOCK_M] tokens are visible to each row."""
    d = tl.arange(0, QK)
    dv = tl.arange(0, V)
    upcoming = find_blocks(table, first, last, BLOCK_N, BLOCK_SIZE)
    for n in range(first, last, BLOCK_N):
        block = upcoming
        upcoming = find_blocks(table, n + BLOCK_N, last, BLOCK_N, BLOCK_SIZE)
        at = n + tl.arange(0, BLOCK_N)
        k_at = (block * k_block + (at % BLOCK_SIZE) * k_slot)[:, None] + d[None, :]
        v_at = (block * v_block + (at % BLOCK_SIZE) * v_slot)[:, None] + dv[None, :]
        row = (block * BLOCK_SIZE + n % BLOCK_SIZE).to(tl.int32)  # of a block's part, for TILES
        if TILES:
            keys = k_tiles.load([row, head * QK])
        elif QK_DIM == QK:
            keys = tl.load(k_base + k_at)
        else:
            keys = tl.load(k_base + k_at, mask=(d < QK_DIM)[None, :], other=0.0)
        if MASKED:  # a slot behind the context may hold NaN
            inside = (at < last)[:, None] & (dv < V_DIM)[None, :]
            values = tl.load(v_base + v_at, mask=inside, other=0.0)
        elif TILES:
            values = v_tiles.load([row, head * V])
        elif V_DIM == V:
            values = tl.load(v_base + v_at)
        else:
            values = tl.load(v_base + v_at, mask=(dv < V_DIM)[None, :], other=0.0)
        if KIND != "plain":
            keys = keys.to(tl.float32).to(query.dtype)
            values = values.to(tl.float32).to(query.dtype)
        scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
        if KIND == "int8":  # k_scale, v_scale: of this head, a row of all heads for each token
            slot = (block * BLOCK_SIZE + at % BLOCK_SIZE) * tl.num_programs(0)
            scores *= tl.load(k_scale + slot, mask=at < last, other=0.0)[None, :]
        if MASKED:
            scores = tl.where(at[None, :] < seen[:, None], scores, float("-inf"))
        top = tl.maximum(highest, tl.max(scores, axis=1) * scale)
        weight = tl.exp2(scores * scale - top[:, None])
        shrink = tl.exp2(highest - top)
        total = total * shrink + tl.sum(weight, axis=1)
        acc = acc * shrink[:, None]
        if KIND == "int8":
            weight *= tl.load(v_scale + slot, mask=at < last, other=0.0)[None, :]
        acc = tl.dot(weight.to(values.dtype), values, acc, input_precision=PRECISION)
        highest = top
    return acc, highest, total


@jit
def paged_prefill_kernel(  # type: ignore[no-untyped-def]
    q, k_pool, v_pool, k_tiles, v_tiles, k_scale, v_scale, y, block_tables, context_lens,
    query_start, scale, sequences, least,
    q_token, q_head, k_block, k_slot, k_head, v_block, v_slot, v_head, table_stride, y_token,
    y_head,
    BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, QK_DIM: tl.constexpr, QK: tl.constexpr,
    V_DIM: tl.constexpr, V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TILES: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence, tile = find_tile(query_start, tile, sequences, GROUP, BLOCK_M)
    start = tl.load(query_start + sequence)
    new = (tl.load(query_start + sequence + 1) - start).to(tl.int32)
    if new < least:
        return
    if tile * BLOCK_M >= new * GROUP:
        return
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // GROUP
    valid = token < new
    past = tl.load(context_lens + sequence).to(tl.int32) - new
    seen = past + tl.minimum(token, new - 1) + 1
    by_all = past + tile * BLOCK_M // GROUP + 1  # visible to every row
    by_any = past + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, new - 1) + 1
    whole = by_all // BLOCK_N * BLOCK_N

    d = tl.arange(0, QK)
    dv = tl.arange(0, V)
    q_at = (start + token) * q_token + (head * GROUP + row % GROUP) * q_head
    query = tl.load(
        q + q_at[:, None] + d[None, :], mask=valid[:, None] & (d < QK_DIM)[None, :], other=0.0
    )
    column = head.to(tl.int32)  # of a descriptor, in heads
    k_base = k_pool + head * k_head
    v_base = v_pool + head * v_head
    unit = 1.0  # of y
    if KIND != "plain":
        k_scale += head
        v_scale += head
    if KIND == "fp8":
        scale *= tl.load(k_scale)
        unit = tl.load(v_scale)
    table = block_tables + sequence.to(tl.int64) * table_stride
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, V], tl.float32)
    acc, highest, total = attend(
        query, acc, highest, total, k_base, v_base, k_tiles, v_tiles, k_scale, v_scale, column,
        table, seen, 0, whole, scale, k_block, k_slot, v_block, v_slot,
        BLOCK_SIZE, QK_DIM, QK, V_DIM, V, BLOCK_N, False, TILES, KIND,
        PRECISION,
    )  # fmt: skip
    acc, highest, total = attend(
        query, acc, highest, total, k_base, v_base, k_tiles, v_tiles, k_scale, v_scale, column,
        table, seen, whole, by_any, scale, k_block, k_slot, v_block, v_slot,
        BLOCK_SIZE, QK_DIM, QK, V_DIM, V, BLOCK_N, True, TILES, KIND,
        PRECISION,
    )  # fmt: skip
    y_at = (start + token) * y_token + (head * GROUP + row % GROUP) * y_head
    tl.store(
        y + y_at[:, None] + dv[None, :], (acc * (unit / total)[:, None]).to(y.dtype.element_ty),
        mask=valid[:, None] & (dv < V_DIM)[None, :],
    )  # fmt: skip


def pool_tiles(pool: Tensor, block_n: int) -> Any:
    """A descriptor for Hopper's bulk copies of block_n tokens of one head, or None where the pool
    has no such tiles. Measured: 290 instead of 350 us for 4,096 tokens, 32 heads on 8."""
    blocks, block_size, heads, dim = pool.shape
    if (
        not overlaps_launches(pool.device)
        or pool.element_size() != 2
        or block_size % block_n
        or dim != next_power_of_2(max(dim, 16))
        or pool.stride() != (block_size * heads * dim, heads * dim, dim, 1)
        or pool.data_ptr() % 16
    ):
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(
        pool, [blocks * block_size, heads * dim], [heads * dim, 1], [block_n, dim]
    )


def paged_prefill_triton(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, block_tables: Tensor, context_lens: Tensor,
    query_start: Tensor, scale: float, y: Tensor, least: int,
    config: Config | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """Fills y's rows of the sequences with at least `least` new tokens."""
    tokens, heads, qk_dim = q.shape
    block_size, kv_heads = k_pool.shape[1:3]
    sequences, v_dim, group = block_tables.shape[0], v_pool.shape[3], heads // kv_heads
    pools = pool_kind(k_pool)
    kind = str(q.dtype).removeprefix("torch.") if pools == "plain" else pools
    given = config or prefill_config(kind, max(qk_dim, v_dim), tiles=pools == "plain")
    described = [pool_tiles(pool, given.block_n) for pool in (k_pool, v_pool)]
    has_tiles = None not in described
    config = given if has_tiles else config or prefill_config(kind, max(qk_dim, v_dim), tiles=False)
    tiles = tokens * group // config.block_m + sequences
    paged_prefill_kernel[(kv_heads, tiles)](
        q, k_pool, v_pool, *(described if has_tiles else (k_pool, v_pool)),
        k_pool if k_scale is None else k_scale, v_pool if v_scale is None else v_scale, y,
        block_tables, context_lens, query_start, scale * LOG2_E, sequences,
        least, q.stride(0), q.stride(1), *k_pool.stride()[:3], *v_pool.stride()[:3],
        block_tables.stride(0), y.stride(0), y.stride(1),
        BLOCK_SIZE=block_size, GROUP=group,
        QK_DIM=qk_dim, QK=next_power_of_2(max(qk_dim, 16)),
        V_DIM=v_dim, V=next_power_of_2(max(v_dim, 16)),
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, TILES=has_tiles, KIND=pools,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip


def paged_prefill(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, block_tables: Tensor, context_lens: Tensor,
    query_start: Tensor, scale: float, y: Tensor, least: int,
    config: Config | None = None,
) -> None:  # fmt: skip
    """The same by whichever kernel is faster here; with a configuration by Triton's."""
    given = (q, k_pool, v_pool, block_tables, context_lens, query_start, scale, y, least)
    small = q.shape[0] < HOPPER_TOKENS or k_pool.shape[1] not in HOPPER_BLOCKS
    if config is not None or small or not paged_prefill_hopper(*given):
        paged_prefill_triton(*given, config)
