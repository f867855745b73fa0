"""Multi-head latent attention over whole sequences: what passes/mla.py makes of `attention`.

    q_nope  [batch, seq, heads, nope_dim]
    q_rope  [batch, seq, heads, rope_dim]     rotated
    latent  [batch, seq, rank]                normalised; shared by all heads, as is k_rope
    k_rope  [batch, seq, rope_dim]            rotated
    kv_b    [heads * (nope_dim + v_dim), rank]
            for each head the nope_dim rows of W_UK, then the v_dim rows of W_UV
    y       [batch, seq, heads, v_dim]

    k_nope = W_UK latent,  v = W_UV latent                                        (each head)
    scores = scale * (q_nope . k_nope + q_rope . k_rope),  y = softmax(scores, causal) v

Two orders of the same products, here side by side; the cached ones use both:

* decompressed: k_nope and v of every token are made first. For a token of the context and a head
  that costs rank * (nope_dim + v_dim) products once, then nope_dim + rope_dim + v_dim for a query.
* absorbed: q_nope . (W_UK latent) = (W_UK^T q_nope) . latent, and sum_j p_j (W_UV latent_j) =
  W_UV (sum_j p_j latent_j): the heads attend to the latent itself, 2 * rank + rope_dim products for
  a token of the context, query and head, and nothing of the context is ever made wider.

With V3's sizes (rank 512, 128, 64, 128): 131,072 + 320 n against 1,088 n products for n queries, so
absorbed for up to 170 queries a sequence. Source: DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from seekforge.kernels.ops import register


def decompressed_attention(
    q_nope: Tensor, q_rope: Tensor, cache: Tensor, kv_b: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """q_nope, q_rope [rows, queries, heads, ...]; cache [rows, keys, rank + rope_dim] holds
    [latent | k_rope]; mask [rows | 1, queries, keys] is true where a query sees a key, None for
    causal from the first key. Returns [rows, queries, heads, v_dim]."""
    heads, nope_dim = q_nope.shape[-2:]
    rank = kv_b.shape[1]
    made = linear(cache[..., :rank], kv_b).view(*cache.shape[:2], heads, -1)
    k_rope = cache[:, :, None, rank:].expand(-1, -1, heads, -1)
    k, v = torch.cat((made[..., :nope_dim], k_rope), -1), made[..., nope_dim:]
    q = torch.cat((q_nope, q_rope), -1)
    y = scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
        attn_mask=None if mask is None else mask[:, None], is_causal=mask is None, scale=scale,
    )  # fmt: skip
    return y.transpose(1, 2)


def absorbed_attention(
    q_nope: Tensor, q_rope: Tensor, cache: Tensor, kv_b: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """The same, with None for a mask that is true everywhere."""
    rows, queries, heads, nope_dim = q_nope.shape
    rank = kv_b.shape[1]
    w_uk, w_uv = kv_b.view(heads, -1, rank).tensor_split((nope_dim,), 1)
    q = torch.cat((torch.einsum("rqhn,hnc->rqhc", q_nope, w_uk), q_rope), -1)
    # All heads' queries attend to one shared "head": key [latent | k_rope], value latent.
    if mask is not None:
        mask = mask[:, None, :, None].expand(-1, -1, -1, heads, -1).flatten(2, 3)
    context = scaled_dot_product_attention(
        q.flatten(1, 2)[:, None], cache[:, None], cache[:, None, :, :rank],
        attn_mask=mask, scale=scale,
    )  # fmt: skip
    context = context.view(rows, queries, heads, rank)
    return torch.einsum("rqhc,hvc->rqhv", context, w_uv)


def mla_attention_reference(
    q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, kv_b: Tensor, scale: float,
    layer: int,
) -> Tensor:  # fmt: skip
    cache = torch.cat((latent, k_rope), -1)
    return decompressed_attention(q_nope, q_rope, cache, kv_b, None, scale).contiguous()


def output_like(q_nope: Tensor, kv_b: Tensor) -> Tensor:
    """An uninitialised y [..., heads, v_dim]."""
    *leading, heads, nope_dim = q_nope.shape
    return q_nope.new_empty(*leading, heads, kv_b.shape[0] // heads - nope_dim)


def _fake(
    q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, kv_b: Tensor, scale: float,
    layer: int,
) -> Tensor:  # fmt: skip
    return output_like(q_nope, kv_b)


mla_attention = register(
    "mla_attention(Tensor q_nope, Tensor q_rope, Tensor latent, Tensor k_rope, Tensor kv_b, "
    "float scale, int layer) -> Tensor",
    reference=mla_attention_reference,
    fake=_fake,
)
