"""Attention over a paged KV cache, ragged form: prefill chunks and decodes in one call.

    q             [tokens, heads, qk_dim]
    k, v          [tokens, kv_heads, qk_dim | v_dim]      new, written into the pools first
    k_pool        [blocks, block_size, kv_heads, qk_dim]  mutated
    v_pool        [blocks, block_size, kv_heads, v_dim]   mutated
    slot_mapping  [tokens]  block * block_size + offset of each new token; negative: not written
    block_tables  [sequences, max_blocks]
    context_lens  [sequences]         tokens in the cache including this step's
    query_start   [sequences + 1]     sequence i owns rows query_start[i]:query_start[i + 1]
    y             [tokens, heads, v_dim]

Causal and bottom-right aligned: the last query of a sequence sees its whole context. All index
tensors int64. Slots behind a sequence's context may hold anything, NaN too.
Source of the layout: Kwon et al., "Efficient Memory Management for LLM Serving with
PagedAttention", 2023.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from seekforge.kernels.kv_write import kv_write_reference, kv_write_triton
from seekforge.kernels.ops import register
from seekforge.kernels.paged_decode import paged_decode_triton
from seekforge.kernels.paged_prefill import paged_prefill


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """q [rows, queries, heads, d], k/v [rows, keys, kv_heads, d], mask [rows | 1, queries, keys] or
    None."""
    rows, queries, heads, qk_dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    # The query heads of one KV head become queries of one tile: K and V are never repeated.
    packed = q.view(rows, queries, kv_heads, group, qk_dim).permute(0, 2, 3, 1, 4)
    packed = packed.reshape(rows, kv_heads, group * queries, qk_dim)
    if mask is not None:
        mask = mask[:, None, None].expand(-1, 1, group, -1, -1).flatten(2, 3)
    y = scaled_dot_product_attention(
        packed, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale
    )
    y = y.view(rows, kv_heads, group, queries, v.shape[-1]).permute(0, 3, 1, 2, 4)
    return y.reshape(rows, queries, heads, v.shape[-1])


def paged_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slot_mapping: Tensor,
    block_tables: Tensor, context_lens: Tensor, query_start: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    kv_write_reference(k, v, k_pool, v_pool, slot_mapping)
    starts, contexts = query_start.tolist(), context_lens.tolist()
    counts = [end - start for start, end in pairwise(starts)]
    block_size = k_pool.shape[1]
    y = q.new_empty(*q.shape[:-1], v.shape[-1])

    decodes = [i for i, count in enumerate(counts) if count == 1]
    if decodes:
        longest = max(contexts[i] for i in decodes)
        everything = len(decodes) == len(counts)
        chosen = block_tables if everything else block_tables[decodes]
        tables = chosen[:, : -(-longest // block_size)]
        keys = k_pool[tables].flatten(1, 2)[:, :longest]
        values = v_pool[tables].flatten(1, 2)[:, :longest]
        mask = None
        if any(contexts[i] != longest for i in decodes):
            lens = context_lens if everything else context_lens[decodes]
            mask = (torch.arange(longest, device=q.device) < lens[:, None])[:, None]
            # A weight of 0 does not silence a NaN that an earlier sequence left there.
            stale = ~mask[:, 0, :, None, None]
            keys, values = keys.masked_fill(stale, 0), values.masked_fill(stale, 0)
        rows = slice(None) if everything else [starts[i] for i in decodes]
        y[rows] = _attend(q[rows].unsqueeze(1), keys, values, mask, scale).squeeze(1)

    for i, count in enumerate(counts):
        if count <= 1:
            continue
        context = contexts[i]
        table = block_tables[i, : -(-context // block_size)]
        keys = k_pool[table].flatten(0, 1)[:context]
        values = v_pool[table].flatten(0, 1)[:context]
        at = torch.arange(context - count, context, device=q.device)
        mask = torch.arange(context, device=q.device) <= at[:, None]
        rows = slice(starts[i], starts[i] + count)
        y[rows] = _attend(q[rows][None], keys[None], values[None], mask[None], scale)[0]
    return y


def paged_attention_triton(
    q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slot_mapping: Tensor,
    block_tables: Tensor, context_lens: Tensor, query_start: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """A launch that writes, one for the sequences with one new token, one for the others.

    The host does not know the lengths. With no more tokens than sequences (a step of decodes) the
    decode kernel takes every row by itself, whatever sequence it is of; else it takes the sequences
    with one token, and the prefill kernel the others.
    """
    q, block_tables = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, block_tables))
    # Before the write: the kernel after it reads these before it waits for it.
    index = (block_tables, context_lens.contiguous(), query_start.contiguous())
    if q.shape[0]:
        kv_write_triton(k, v, k_pool, v_pool, slot_mapping)
    return attend_triton(q, k_pool, v_pool, *index, scale)


def attend_triton(
    q: Tensor, k_pool: Tensor, v_pool: Tensor,
    block_tables: Tensor, context_lens: Tensor, query_start: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """The attention alone: the step's k and v are in the pools."""
    tokens, sequences = q.shape[0], block_tables.shape[0]
    y = q.new_empty(*q.shape[:-1], v_pool.shape[-1])
    if tokens == 0:
        return y
    by_row = tokens <= sequences
    index = (block_tables, context_lens, query_start)
    if by_row or sequences > 1:
        paged_decode_triton(q, k_pool, v_pool, *index, scale, y, by_row)
    if not by_row:
        least = 2 if sequences > 1 else 1
        paged_prefill(q, k_pool, v_pool, *index, scale, y, least)
    return y


def _fake(
    q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slot_mapping: Tensor,
    block_tables: Tensor, context_lens: Tensor, query_start: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    return q.new_empty(*q.shape[:-1], v.shape[-1])


paged_attention = register(
    "paged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_pool, Tensor(b!) v_pool, "
    "Tensor slot_mapping, Tensor block_tables, Tensor context_lens, Tensor query_start, "
    "float scale) -> Tensor",
    reference=paged_attention_reference,
    fake=_fake,
    cuda=paged_attention_triton,
)


def one_token_attention(
    q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slot_mapping: Tensor,
    block_tables: Tensor, context_lens: Tensor, query_start: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """The same for exactly one token of one sequence (its slot >= 0), written for a compiler.

    No data-dependent Python: Inductor turns it into loops over the blocks and fuses them with
    their neighbours, where the operator above costs a call into Python for each layer.
    """
    block_size, kv_heads = k_pool.shape[1:3]
    slot = (slot_mapping // block_size, slot_mapping % block_size)
    k_pool.index_put_(slot, k)
    v_pool.index_put_(slot, v)
    table = block_tables[0]
    keys = k_pool[table].permute(2, 0, 1, 3)[:, None]  # [kv_heads, 1, blocks, block_size, d]
    values = v_pool[table].permute(2, 0, 1, 3)[:, None]
    query = q[0].view(kv_heads, -1, 1, 1, q.shape[-1])  # [kv_heads, group, 1, 1, d]
    scores = (query.float() * keys.float()).sum(-1) * scale
    positions = torch.arange(table.shape[0], device=q.device)[:, None] * block_size
    positions = positions + torch.arange(block_size, device=q.device)
    seen = positions < context_lens[0]
    scores = torch.where(seen, scores, float("-inf"))
    weights = (scores - scores.amax((-2, -1), keepdim=True)).exp()
    weights = weights / weights.sum((-2, -1), keepdim=True)
    values = torch.where(seen[..., None], values.float(), 0.0)  # 0 * NaN would be NaN
    y = (weights[..., None] * values).sum((2, 3))
    return y.view(1, q.shape[1], v.shape[-1]).to(q.dtype)
