"""Attention over a paged KV cache, padded form: pure, for ONNX Runtime and TensorRT.

    q             [batch, seq, heads, qk_dim]
    k, v          [batch, seq, kv_heads, qk_dim | v_dim]   this step's; not written anywhere
    k_pool        [blocks, block_size, kv_heads, qk_dim]   read through block_tables
    v_pool        [blocks, block_size, kv_heads, v_dim]
    block_tables  [batch, max_blocks]  int64
    past_lens     [batch]              int64, tokens of each sequence already in the pools
    y             [batch, seq, heads, v_dim]

Query i of a sequence sees its past_lens cached tokens and the new tokens 0..i. Rows may be padded
on the right: a padded token is never seen by a real one, and its own output is meaningless.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from seekforge.kernels.ops import register


def gathered_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, block_tables: Tensor,
    past_lens: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    seq, past = q.shape[1], block_tables.shape[1] * k_pool.shape[1]
    cached = torch.arange(past, device=q.device) < past_lens[:, None]
    stale = ~cached[..., None, None]  # 0 * NaN of an earlier sequence would be NaN
    keys = torch.cat((k_pool[block_tables].flatten(1, 2).masked_fill(stale, 0), k), 1)
    values = torch.cat((v_pool[block_tables].flatten(1, 2).masked_fill(stale, 0), v), 1)
    causal = torch.ones(seq, seq, dtype=torch.bool, device=q.device).tril()
    mask = torch.cat(
        (cached[:, None, None].expand(-1, 1, seq, -1), causal.expand(q.shape[0], 1, -1, -1)), -1
    )
    y = scaled_dot_product_attention(
        q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2),
        attn_mask=mask, scale=scale, enable_gqa=True,
    )  # fmt: skip
    return y.transpose(1, 2).contiguous()


def _fake(
    q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, block_tables: Tensor,
    past_lens: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    return q.new_empty(*q.shape[:-1], v.shape[-1])


gathered_attention = register(
    "gathered_attention(Tensor q, Tensor k, Tensor v, Tensor k_pool, Tensor v_pool, "
    "Tensor block_tables, Tensor past_lens, float scale) -> Tensor",
    reference=gathered_attention_reference,
    fake=_fake,
)
