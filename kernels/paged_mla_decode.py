"""Absorbed MLA attention over a paged latent cache: the latent is key and value, read once.

    q_latent      [tokens, heads, rank]   q_nope W_UK: the key up-projection folded into the query
    q_rope        [tokens, heads, rope]
    latent_pool   [blocks, block_size, rank + rope]   [latent | k_rope] of each token
    latent_scale, rope_scale  of INT8 pools [blocks, block_size], of FP8 ones [1], fp32
    block_tables  [sequences, max_blocks]; context_lens [sequences]; query_start [sequences + 1]
    y             [tokens, heads, rank]   (W_UV is applied afterwards)

    y_ih = sum_t softmax_t(scale * (q_latent_ih . c_t + q_rope_ih . r_t)) c_t     t <= past + i

Rows are packed as in paged_prefill: row r of a sequence is head r % heads of new token r // heads;
one tile of 16 or 64 rows reads a part of the context, and split_merge.py merges the parts. So one
pair of kernels serves decodes, chunks and mixtures of them. Quantised values become q's dtype,
exactly, as they are read; their scales are factors of the scores, and of probabilities (INT8) or y.
Source: DeepSeek-V2, 2024 (absorption, section 2.1); FlashMLA.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seekforge.kernels.kv_write import kv_write_triton, pool_kind
from seekforge.kernels.mla_heads import head_product, product_of_parts
from seekforge.kernels.paged_decode import LOG2_E, find_blocks
from seekforge.kernels.paged_mla_hopper import hopper_parts, paged_mla_hopper
from seekforge.kernels.paged_prefill import find_tile
from seekforge.kernels.split_merge import split_merge_triton
from seekforge.kernels.triton_support import jit, next_power_of_2, tl
from seekforge.kernels.tuning import Config, mla_config, multiprocessors, overlaps_launches


@jit
def guess_tile(query_start, tile, sequences, HEADS: tl.constexpr, BLOCK_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """find_tile, but first whether each sequence has one token, as in decoding: the search is a
    chain of loads that takes microseconds."""
    if HEADS % BLOCK_M != 0:
        sequence, within = find_tile(query_start, tile, sequences, HEADS, BLOCK_M)
    else:
        sequence = tl.minimum(tile * BLOCK_M // HEADS, sequences - 1)
        within = tile - sequence * (HEADS // BLOCK_M)
        start = tl.load(query_start + sequence)
        end = tl.load(query_start + sequence + 1)
        if (start != sequence) | (end != sequence + 1) | (within >= HEADS // BLOCK_M):
            sequence, within = find_tile(query_start, tile, sequences, HEADS, BLOCK_M)
    return sequence, within


@jit
def load_columns(base, first, width, inside, W: tl.constexpr):  # type: ignore[no-untyped-def]
    """Columns first:first + W of the rows at `base`; zero from `width` on, or outside."""
    column = first + tl.arange(0, W)[None, :]
    return tl.load(base + column, mask=inside & (column < width), other=0.0)


@jit
def load_latents(  # type: ignore[no-untyped-def]
    base, first, width, inside, query, W: tl.constexpr, KIND: tl.constexpr
):
    """The same in the query's dtype."""
    value = load_columns(base, first, width, inside, W)
    if KIND != "plain":
        value = value.to(tl.float32).to(query.dtype)
    return value


@jit
def store_columns(base, first, width, inside, value, W: tl.constexpr):  # type: ignore[no-untyped-def]
    column = first + tl.arange(0, W)[None, :]
    tl.store(base + column, value.to(base.dtype.element_ty), mask=inside & (column < width))


@jit
def paged_mla_kernel(  # type: ignore[no-untyped-def]
    q_latent, q_rope, pool, latent_scale, rope_scale, y, parts, logs, block_tables, context_lens,
    query_start, scale, sequences,
    q_token, q_head, r_token, r_head, block_stride, slot_stride, table_stride, y_token, y_head,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr, W: tl.constexpr,
    ROPE_DIM: tl.constexpr, ROPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr, KIND: tl.constexpr, OVERLAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile_at = tl.program_id(0)
    split = tl.program_id(1)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    sequence, tile = guess_tile(query_start, tile_at, sequences, HEADS, BLOCK_M)
    start = tl.load(query_start + sequence)
    new = (tl.load(query_start + sequence + 1) - start).to(tl.int32)
    past = tl.load(context_lens + sequence).to(tl.int32) - new
    visible = past + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // HEADS, new - 1) + 1
    visible = tl.where(tile * BLOCK_M < new * HEADS, visible, 0)
    each = tl.cdiv(tl.cdiv(visible, tl.num_programs(1)), BLOCK_N) * BLOCK_N
    first = split * each
    last = tl.minimum(first + each, visible)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // HEADS
    valid = token < new
    at = start + token
    own = (at * HEADS + row % HEADS) * tl.num_programs(1) + split
    if first >= visible:
        if SPLIT:
            if OVERLAP:
                tl.extra.cuda.gdc_wait()
            tl.store(logs + own, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=valid)
        return
    seen = past + tl.minimum(token, new - 1) + 1
    table = block_tables + sequence.to(tl.int64) * table_stride
    upcoming = find_blocks(table, first, last, BLOCK_N, BLOCK_SIZE)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # for the new tokens in the pool
    q_at = at * q_token + (row % HEADS) * q_head
    # In quarters: four short chains of dependent matrix instructions instead of a long one, which
    # would take longer than the loads (36 steps of about 33 cycles for one block of the context).
    rows = valid[:, None]
    q0 = load_columns(q_latent + q_at[:, None], 0, RANK, rows, W)
    q1 = load_columns(q_latent + q_at[:, None], W, RANK, rows, W)
    q2 = load_columns(q_latent + q_at[:, None], 2 * W, RANK, rows, W)
    q3 = load_columns(q_latent + q_at[:, None], 3 * W, RANK, rows, W)
    r_at = at * r_token + (row % HEADS) * r_head
    qr = load_columns(q_rope + r_at[:, None], 0, ROPE_DIM, rows, ROPE)
    # Finite: a later row's whole part of the context may be hidden from an earlier one.
    highest = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    y0 = tl.zeros([BLOCK_M, W], tl.float32)
    y1 = tl.zeros([BLOCK_M, W], tl.float32)
    y2 = tl.zeros([BLOCK_M, W], tl.float32)
    y3 = tl.zeros([BLOCK_M, W], tl.float32)
    latent_by = scale
    rope_by = scale
    if KIND == "fp8":
        latent_by = scale * tl.load(latent_scale)
        rope_by = scale * tl.load(rope_scale)
    for n in range(first, last, BLOCK_N):
        block = upcoming
        upcoming = find_blocks(table, n + BLOCK_N, last, BLOCK_N, BLOCK_SIZE)
        here = n + tl.arange(0, BLOCK_N)
        base = pool + (block * block_stride + (here % BLOCK_SIZE) * slot_stride)[:, None]
        known = (here < last)[:, None]  # a slot behind the context may hold NaN
        c0 = load_latents(base, 0, RANK, known, q0, W, KIND)
        c1 = load_latents(base, W, RANK, known, q1, W, KIND)
        c2 = load_latents(base, 2 * W, RANK, known, q2, W, KIND)
        c3 = load_latents(base, 3 * W, RANK, known, q3, W, KIND)
        rope = load_latents(base + RANK, 0, ROPE_DIM, known, qr, ROPE, KIND)
        by_latent = latent_by
        by_rope = rope_by
        if KIND == "int8":
            slot = block * BLOCK_SIZE + here % BLOCK_SIZE
            unit = tl.load(latent_scale + slot, mask=here < last, other=0.0)[None, :]
            by_latent = scale * unit
            by_rope = scale * tl.load(rope_scale + slot, mask=here < last, other=0.0)[None, :]
        # Scaled one by one: the compiler would make a plain sum one chain again.
        scores = tl.dot(q0, tl.trans(c0), input_precision=PRECISION) * by_latent
        scores += tl.dot(q1, tl.trans(c1), input_precision=PRECISION) * by_latent
        scores += tl.dot(q2, tl.trans(c2), input_precision=PRECISION) * by_latent
        scores += tl.dot(q3, tl.trans(c3), input_precision=PRECISION) * by_latent
        scores += tl.dot(qr, tl.trans(rope), input_precision=PRECISION) * by_rope
        hidden = (here[None, :] >= seen[:, None]) | (here >= last)[None, :]
        scores = tl.where(hidden, float("-inf"), scores)
        top = tl.maximum(highest, tl.max(scores, axis=1))
        shrink = tl.exp2(highest - top)
        weight = tl.exp2(scores - top[:, None])
        total = total * shrink + tl.sum(weight, axis=1)
        if KIND == "int8":
            weight *= unit
        weight = weight.to(c0.dtype)
        y0 = tl.dot(weight, c0, y0 * shrink[:, None], input_precision=PRECISION)
        y1 = tl.dot(weight, c1, y1 * shrink[:, None], input_precision=PRECISION)
        y2 = tl.dot(weight, c2, y2 * shrink[:, None], input_precision=PRECISION)
        y3 = tl.dot(weight, c3, y3 * shrink[:, None], input_precision=PRECISION)
        highest = top

    by = 1.0 / tl.where(total > 0, total, 1.0)[:, None]
    if KIND == "fp8":
        by *= tl.load(latent_scale)
    if SPLIT:
        target = parts + own[:, None] * RANK
        log = tl.where(total > 0, highest + tl.log2(total), float("-inf"))
        tl.store(logs + own, log, mask=valid)
    else:
        target = y + (at * y_token + (row % HEADS) * y_head)[:, None]
    store_columns(target, 0, RANK, rows, y0 * by, W)
    store_columns(target, W, RANK, rows, y1 * by, W)
    store_columns(target, 2 * W, RANK, rows, y2 * by, W)
    store_columns(target, 3 * W, RANK, rows, y3 * by, W)


def triton_parts(
    q_latent: Tensor, q_rope: Tensor, latent_pool: Tensor, block_tables: Tensor,
    context_lens: Tensor, query_start: Tensor, scale: float, y: Tensor,
    config: Config | None = None, latent_scale: Tensor | None = None,
    rope_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The parts of y that split_merge.py merges, and their logs; where the context is not split
    they have 0 parts, and y is filled. Rows of no sequence are left with any value."""
    tokens, heads, rank = q_latent.shape
    block_size, width = latent_pool.shape[1:]
    sequences = block_tables.shape[0]
    rope = width - rank
    kind = pool_kind(latent_pool)
    config = config or mla_config(
        str(q_latent.dtype).removeprefix("torch.") if kind == "plain" else kind,
        tokens=tokens, sequences=sequences, heads=heads, context=block_tables.shape[1] * block_size,
        processors=multiprocessors(q_latent.device),
    )  # fmt: skip
    splits = config.splits
    tiles = tokens * heads // config.block_m + (sequences if heads % config.block_m else 0)
    overlap = overlaps_launches(q_latent.device)
    pieces = splits if splits > 1 else 0
    parts = q_latent.new_empty(tokens, heads, pieces, rank, dtype=torch.float32)
    logs = q_latent.new_empty(tokens, heads, pieces, dtype=torch.float32)
    paged_mla_kernel[(tiles, splits)](
        q_latent, q_rope, latent_pool, latent_pool if latent_scale is None else latent_scale,
        latent_pool if rope_scale is None else rope_scale, y, parts, logs,
        block_tables, context_lens, query_start, scale * LOG2_E, sequences,
        q_latent.stride(0), q_latent.stride(1), q_rope.stride(0), q_rope.stride(1),
        latent_pool.stride(0), latent_pool.stride(1), block_tables.stride(0),
        y.stride(0), y.stride(1),
        BLOCK_SIZE=block_size, HEADS=heads, RANK=rank, W=max(16, next_power_of_2(rank) // 4),
        ROPE_DIM=rope, ROPE=next_power_of_2(max(rope, 16)),
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, SPLIT=splits > 1,
        KIND=kind,
        PRECISION="ieee" if q_latent.dtype == torch.float32 else "tf32",
        OVERLAP=overlap, num_warps=config.warps, num_stages=config.stages,
        **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip
    return parts, logs


def paged_mla_decode_triton(
    q_latent: Tensor, q_rope: Tensor, latent_pool: Tensor, block_tables: Tensor,
    context_lens: Tensor, query_start: Tensor, scale: float, y: Tensor,
    config: Config | None = None, latent_scale: Tensor | None = None,
    rope_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """Fills y's rows of all sequences; rows of no sequence are left with any value."""
    parts, logs = triton_parts(
        q_latent, q_rope, latent_pool, block_tables, context_lens, query_start, scale, y, config,
        latent_scale, rope_scale,
    )  # fmt: skip
    if parts.shape[2]:
        split_merge_triton(parts, logs, y, query_start, by_row=True)


def paged_mla_decode(
    q_latent: Tensor, q_rope: Tensor, latent_pool: Tensor, block_tables: Tensor,
    context_lens: Tensor, query_start: Tensor, scale: float, y: Tensor,
    config: Config | None = None,
) -> None:  # fmt: skip
    """The same by whichever kernel is faster here; with a configuration by Triton's."""
    given = (q_latent, q_rope, latent_pool, block_tables, context_lens, query_start, scale, y)
    if config is not None or not paged_mla_hopper(*given):
        paged_mla_decode_triton(*given, config)


def attend_latents(
    q_latent: Tensor, q_rope: Tensor, latent_pool: Tensor, block_tables: Tensor,
    context_lens: Tensor, query_start: Tensor, scale: float, w_uv: Tensor, y: Tensor,
    latent_scale: Tensor | None = None, rope_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """Attention to what the pool holds, then W_UV [heads, v_dim, rank]: fills y [tokens, heads,
    v_dim]."""
    tokens, heads, rank = q_latent.shape
    mixed = q_latent.new_empty(heads, tokens, rank).transpose(0, 1)
    given = (
        q_latent, q_rope, latent_pool, block_tables, context_lens, query_start, scale, mixed,
    )  # fmt: skip
    made = hopper_parts(*given) if latent_scale is None else None
    parts, logs = made or triton_parts(*given, None, latent_scale, rope_scale)
    product_of_parts(parts, logs, mixed, w_uv.transpose(1, 2), y, query_start)


def paged_mla_attention_triton(
    q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, latent_pool: Tensor,
    slot_mapping: Tensor, block_tables: Tensor, context_lens: Tensor, query_start: Tensor,
    kv_b: Tensor, scale: float,
    latent_scale: Tensor | None = None, rope_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """paged_mla_attention: write, fold W_UK into the query, attend, apply W_UV.

    Chunks of several tokens are absorbed too: decompressing them needs the lengths on the host.
    """
    tokens, heads, nope = q_nope.shape
    rank = latent.shape[-1]
    up = kv_b.view(heads, -1, rank)  # each head: nope rows of W_UK, then v_dim rows of W_UV
    y = q_nope.new_empty(tokens, heads, up.shape[1] - nope)
    if tokens == 0:
        return y
    q_rope, block_tables = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (q_rope, block_tables)
    )
    q_latent = head_product(q_nope, up[:, :nope])
    index = (block_tables, context_lens.contiguous(), query_start.contiguous())
    # The write comes last: the kernel after it starts early and waits for it alone.
    pool, scales = latent_pool.unsqueeze(2), (latent_scale, rope_scale)
    kv_write_triton(
        latent.unsqueeze(1), k_rope.unsqueeze(1), pool[..., :rank], pool[..., rank:], slot_mapping,
        *scales,
    )  # fmt: skip
    attend_latents(q_latent, q_rope, latent_pool, *index, scale, up[:, nope:], y, *scales)
    return y
