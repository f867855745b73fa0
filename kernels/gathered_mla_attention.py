"""Multi-head latent attention over a paged cache of latents, padded form: pure.

    q_nope        [batch, seq, heads, nope_dim]
    q_rope        [batch, seq, heads, rope_dim]
    latent        [batch, seq, rank]                     this step's; not written anywhere
    k_rope        [batch, seq, rope_dim]
    latent_pool   [blocks, block_size, rank + rope_dim]  read through block_tables
    block_tables  [batch, max_blocks]  int64
    past_lens     [batch]              int64, tokens of each sequence already in the pool
    kv_b          [heads * (nope_dim + v_dim), rank]
    y             [batch, seq, heads, v_dim]

Query i of a sequence sees its past_lens cached tokens and the new tokens 0..i; padding on the right
and stale slots as in kernels/gathered_attention.py.

Absorbed for every shape (kernels/mla_attention.py has both forms): one graph serves prefill and
decode, and the decompressed form would make keys and values of the whole context for each new
token, 57 times the cache's memory with V3's sizes and more products the longer the context.
Absorbed costs at most 3.4 times the products of attention itself, in long prefills alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seekforge.kernels.mla_attention import absorbed_attention, output_like
from seekforge.kernels.ops import register


def gathered_mla_attention_reference(
    q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, latent_pool: Tensor,
    block_tables: Tensor, past_lens: Tensor, kv_b: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    batch, seq = latent.shape[:2]
    past = latent_pool[block_tables].flatten(1, 2)
    cached = torch.arange(past.shape[1], device=past.device) < past_lens[:, None]
    past = past.masked_fill(~cached[..., None], 0)  # 0 * NaN of an earlier sequence would be NaN
    cache = torch.cat((past, torch.cat((latent, k_rope), -1)), 1)
    causal = torch.ones(seq, seq, dtype=torch.bool, device=past.device).tril()
    mask = torch.cat((cached[:, None].expand(-1, seq, -1), causal.expand(batch, -1, -1)), -1)
    return absorbed_attention(q_nope, q_rope, cache, kv_b, mask, scale).contiguous()


def _fake(
    q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, latent_pool: Tensor,
    block_tables: Tensor, past_lens: Tensor, kv_b: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    return output_like(q_nope, kv_b)


gathered_mla_attention = register(
    "gathered_mla_attention(Tensor q_nope, Tensor q_rope, Tensor latent, Tensor k_rope, "
    "Tensor latent_pool, Tensor block_tables, Tensor past_lens, Tensor kv_b, float scale) "
    "-> Tensor",
    reference=gathered_mla_attention_reference,
    fake=_fake,
)
