"""paged_mla_attention over an INT8 or FP8 cache: dequantised before the product, fp32 sums.

    latent_pool               [blocks, block_size, rank + rope_dim]  int8, float8_e4m3fn; mutated
    latent_scale, rope_scale  int8: [blocks, block_size] fp32, mutated (one per token)
                              fp8:  [1] fp32, given
    the rest                  as in paged_mla_attention

Latent and rotated key have scales of their own, as their sizes differ; how values are made of them
is said in quantised_paged_attention.py. rank + rope_dim + 8 bytes a token in INT8, rank + rope_dim
in FP8. Chunks of several tokens are absorbed too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seekforge.kernels.kv_write import kv_write_reference
from seekforge.kernels.mla_attention import output_like
from seekforge.kernels.ops import register
from seekforge.kernels.paged_mla_attention import paged_mla_attention_reference
from seekforge.kernels.paged_mla_decode import paged_mla_attention_triton


def quantised_paged_mla_attention_reference(
    q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, latent_pool: Tensor,
    latent_scale: Tensor, rope_scale: Tensor, slot_mapping: Tensor, block_tables: Tensor,
    context_lens: Tensor, query_start: Tensor, kv_b: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    rank, pool = latent.shape[-1], latent_pool.unsqueeze(2)
    by_token = latent_pool.dtype == torch.int8
    scales = [x.unsqueeze(2) if by_token else x for x in (latent_scale, rope_scale)]
    kv_write_reference(
        latent[:, None], k_rope[:, None], pool[..., :rank], pool[..., rank:], slot_mapping, *scales
    )
    parts = latent_pool.float().tensor_split((rank,), -1)
    wide = torch.cat([x * by for x, by in zip(parts, scales, strict=True)], -1).to(q_nope.dtype)
    return paged_mla_attention_reference(
        q_nope, q_rope, latent[:0], k_rope[:0], wide, slot_mapping[:0], block_tables, context_lens,
        query_start, kv_b, scale,
    )  # fmt: skip


def quantised_paged_mla_attention_triton(
    q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, latent_pool: Tensor,
    latent_scale: Tensor, rope_scale: Tensor, slot_mapping: Tensor, block_tables: Tensor,
    context_lens: Tensor, query_start: Tensor, kv_b: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    return paged_mla_attention_triton(
        q_nope, q_rope, latent, k_rope, latent_pool, slot_mapping, block_tables, context_lens,
        query_start, kv_b, scale, latent_scale, rope_scale,
    )  # fmt: skip


def _fake(
    q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, latent_pool: Tensor,
    latent_scale: Tensor, rope_scale: Tensor, slot_mapping: Tensor, block_tables: Tensor,
    context_lens: Tensor, query_start: Tensor, kv_b: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    return output_like(q_nope, kv_b)


quantised_paged_mla_attention = register(
    "quantised_paged_mla_attention(Tensor q_nope, Tensor q_rope, Tensor latent, Tensor k_rope, "
    "Tensor(a!) latent_pool, Tensor(b!) latent_scale, Tensor(c!) rope_scale, Tensor slot_mapping, "
    "Tensor block_tables, Tensor context_lens, Tensor query_start, Tensor kv_b, float scale) "
    "-> Tensor",
    reference=quantised_paged_mla_attention_reference,
    fake=_fake,
    cuda=quantised_paged_mla_attention_triton,
)
