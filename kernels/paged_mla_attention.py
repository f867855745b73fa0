"""Multi-head latent attention over a paged cache of latents, ragged form.

    q_nope        [tokens, heads, nope_dim]
    q_rope        [tokens, heads, rope_dim]
    latent        [tokens, rank]                         new, written into the pool first
    k_rope        [tokens, rope_dim]                     new, written too
    latent_pool   [blocks, block_size, rank + rope_dim]  mutated; [latent | k_rope] of each token
    slot_mapping  [tokens]  block * block_size + offset of each new token; negative: not written
    block_tables  [sequences, max_blocks]
    context_lens  [sequences]         tokens in the cache including this step's
    query_start   [sequences + 1]     sequence i owns rows query_start[i]:query_start[i + 1]
    kv_b          [heads * (nope_dim + v_dim), rank]
    y             [tokens, heads, v_dim]

The formula, and the two ways to compute it, are in kernels/mla_attention.py. On the CPU sequences
with one new token take the absorbed one, all of them in one batch; those with several the
decompressed one. On a GPU all are absorbed.
Causal and bottom-right aligned, index tensors int64, as in kernels/paged_attention.py. Slots behind
a sequence's context may hold anything, NaN too.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from seekforge.kernels.mla_attention import absorbed_attention, decompressed_attention, output_like
from seekforge.kernels.ops import register
from seekforge.kernels.paged_mla_decode import paged_mla_attention_triton


def write_latents(
    latent: Tensor, k_rope: Tensor, latent_pool: Tensor, slot_mapping: Tensor
) -> None:
    """Writes [latent | k_rope] into the pool; tokens with a negative slot are dropped."""
    rows = torch.cat((latent, k_rope), -1)
    # -1 would index the last slot of the last block: padded rows must not touch live data.
    if bool((slot_mapping < 0).any()):
        kept = slot_mapping >= 0
        rows, slot_mapping = rows[kept], slot_mapping[kept]
    # view, not flatten: flatten would copy a pool with gaps between its blocks and lose the writes.
    latent_pool.view(-1, latent_pool.shape[-1]).index_copy_(0, slot_mapping, rows)


def paged_mla_attention_reference(
    q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, latent_pool: Tensor,
    slot_mapping: Tensor, block_tables: Tensor, context_lens: Tensor, query_start: Tensor,
    kv_b: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    write_latents(latent, k_rope, latent_pool, slot_mapping)
    starts, contexts = query_start.tolist(), context_lens.tolist()
    counts = [end - start for start, end in pairwise(starts)]
    block_size = latent_pool.shape[1]
    y = output_like(q_nope, kv_b)

    decodes = [i for i, count in enumerate(counts) if count == 1]
    if decodes:
        longest = max(contexts[i] for i in decodes)
        everything = len(decodes) == len(counts)
        chosen = block_tables if everything else block_tables[decodes]
        cache = latent_pool[chosen[:, : -(-longest // block_size)]].flatten(1, 2)[:, :longest]
        mask = None
        if any(contexts[i] != longest for i in decodes):
            lens = context_lens if everything else context_lens[decodes]
            seen = torch.arange(longest, device=cache.device) < lens[:, None]
            # A weight of 0 does not silence a NaN that an earlier sequence left there.
            cache = cache.masked_fill(~seen[..., None], 0)
            mask = seen[:, None]
        rows = slice(None) if everything else [starts[i] for i in decodes]
        q = (q_nope[rows].unsqueeze(1), q_rope[rows].unsqueeze(1))
        y[rows] = absorbed_attention(*q, cache, kv_b, mask, scale).squeeze(1)

    for i, count in enumerate(counts):
        if count <= 1:
            continue
        context = contexts[i]
        cache = latent_pool[block_tables[i, : -(-context // block_size)]].flatten(0, 1)[:context]
        at = torch.arange(context - count, context, device=cache.device)
        mask = torch.arange(context, device=cache.device) <= at[:, None]
        rows = slice(starts[i], starts[i] + count)
        q = (q_nope[rows][None], q_rope[rows][None])
        y[rows] = decompressed_attention(*q, cache[None], kv_b, mask[None], scale)[0]
    return y


def _fake(
    q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, latent_pool: Tensor,
    slot_mapping: Tensor, block_tables: Tensor, context_lens: Tensor, query_start: Tensor,
    kv_b: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    return output_like(q_nope, kv_b)


paged_mla_attention = register(
    "paged_mla_attention(Tensor q_nope, Tensor q_rope, Tensor latent, Tensor k_rope, "
    "Tensor(a!) latent_pool, Tensor slot_mapping, Tensor block_tables, Tensor context_lens, "
    "Tensor query_start, Tensor kv_b, float scale) -> Tensor",
    reference=paged_mla_attention_reference,
    fake=_fake,
    cuda=paged_mla_attention_triton,
)


def one_token_mla_attention(
    q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, latent_pool: Tensor,
    slot_mapping: Tensor, block_tables: Tensor, context_lens: Tensor, query_start: Tensor,
    kv_b: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """The same for exactly one token of one sequence (its slot >= 0), written for a compiler.

    Absorbed, no data-dependent Python: Inductor turns it into loops over the blocks, where the
    operator above costs a call into Python for each layer.
    """
    block_size, width = latent_pool.shape[1:]
    heads, nope_dim = q_nope.shape[1:]
    rank = kv_b.shape[1]
    slot = (slot_mapping // block_size, slot_mapping % block_size)
    latent_pool.index_put_(slot, torch.cat((latent, k_rope), -1))
    table = block_tables[0]
    positions = torch.arange(table.shape[0] * block_size, device=table.device)
    seen = positions < context_lens[0]
    cache = latent_pool[table].view(-1, width).float()
    cache = torch.where(seen[:, None], cache, 0.0)  # 0 * NaN of an earlier sequence would be NaN
    latents, keys = cache[:, :rank], cache[:, rank:]  # [positions, ...]
    weights = kv_b.view(heads, -1, rank)
    # The rounding to the model's dtype is that of the operator's matrix product.
    q = (q_nope[0, :, :, None].float() * weights[:, :nope_dim].float()).sum(1).to(q_nope.dtype)
    scores = (q[:, None].float() * latents).sum(-1) + (q_rope[0, :, None].float() * keys).sum(-1)
    scores = torch.where(seen, scores * scale, float("-inf"))
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    p = p / p.sum(-1, keepdim=True)
    context = (p[..., None] * latents).sum(1).to(q_nope.dtype)  # [heads, rank]
    y = (context[:, None].float() * weights[:, nope_dim:].float()).sum(-1)
    return y[None].to(q_nope.dtype)
