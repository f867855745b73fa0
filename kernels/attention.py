"""Causal attention over whole sequences: the node that export leaves for each layer.

    q  [batch, seq, heads, qk_dim]
    k  [batch, seq, kv_heads, qk_dim]     kv_heads divides heads (grouped-query attention)
    v  [batch, seq, kv_heads, v_dim]
    y  [batch, seq, heads, v_dim] = softmax(scale * q k^T, causal) v

`layer` is the index of the decoder layer; the KV-cache pass reads it and replaces the node by
`paged_attention` (ragged form) or `gathered_attention` (padded form).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from seekforge.kernels.ops import register


def attention_reference(q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int) -> Tensor:
    y = scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        is_causal=True,
        scale=scale,
        enable_gqa=True,
    )
    return y.transpose(1, 2).contiguous()


def _fake(q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int) -> Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])


attention = register(
    "attention(Tensor q, Tensor k, Tensor v, float scale, int layer) -> Tensor",
    reference=attention_reference,
    fake=_fake,
)
