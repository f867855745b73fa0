"""The latent's norm, the rotation of q and k, their write into the paged cache, and the latent
attention over it: one operator, so that a GPU does all that comes before the attention in one
launch, and reads a fused projection in place.

    q_nope, q_rope, latent, k_rope, weight, eps, cos, sin, positions   as in mla_append.py
    the rest and y                                                     as in paged_mla_attention.py

Computes what `rms_norm`, `rope` and then `paged_mla_attention` compute. All of rope_dim is rotated.
"""

from __future__ import annotations

from torch import Tensor

from seekforge.kernels.mla_append import mla_append_triton, normalised_and_turned
from seekforge.kernels.mla_attention import output_like
from seekforge.kernels.ops import register
from seekforge.kernels.paged_mla_attention import paged_mla_attention_reference
from seekforge.kernels.paged_mla_decode import attend_latents


def rope_paged_mla_attention_reference(
    q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, weight: Tensor, eps: float,
    cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool, latent_pool: Tensor,
    slot_mapping: Tensor, block_tables: Tensor, context_lens: Tensor, query_start: Tensor,
    kv_b: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    q_rope, latent, k_rope = normalised_and_turned(
        q_rope, latent, k_rope, weight, eps, cos, sin, positions, interleaved
    )
    return paged_mla_attention_reference(
        q_nope, q_rope, latent, k_rope, latent_pool, slot_mapping, block_tables, context_lens,
        query_start, kv_b, scale,
    )  # fmt: skip


def rope_paged_mla_attention_triton(
    q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, weight: Tensor, eps: float,
    cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool, latent_pool: Tensor,
    slot_mapping: Tensor, block_tables: Tensor, context_lens: Tensor, query_start: Tensor,
    kv_b: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    y = output_like(q_nope, kv_b)
    if q_nope.shape[0] == 0:
        return y
    # Before the write: the kernel after it reads these before it waits for it.
    block_tables, context_lens, query_start = (
        x if x.stride(-1) == 1 else x.contiguous()
        for x in (block_tables, context_lens, query_start)
    )
    by_head = kv_b.view(q_nope.shape[1], -1, latent.shape[1])
    q_latent, turned = mla_append_triton(
        q_nope, q_rope, latent, k_rope, weight, eps, cos, sin, positions, interleaved, latent_pool,
        slot_mapping, by_head,
    )  # fmt: skip
    attend_latents(
        q_latent, turned, latent_pool, block_tables, context_lens, query_start, scale,
        by_head[:, q_nope.shape[2] :], y,
    )  # fmt: skip
    return y


def _fake(
    q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, weight: Tensor, eps: float,
    cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool, latent_pool: Tensor,
    slot_mapping: Tensor, block_tables: Tensor, context_lens: Tensor, query_start: Tensor,
    kv_b: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    return output_like(q_nope, kv_b)


rope_paged_mla_attention = register(
    "rope_paged_mla_attention(Tensor q_nope, Tensor q_rope, Tensor latent, Tensor k_rope, "
    "Tensor weight, float eps, Tensor cos, Tensor sin, Tensor positions, bool interleaved, "
    "Tensor(a!) latent_pool, Tensor slot_mapping, Tensor block_tables, Tensor context_lens, "
    "Tensor query_start, Tensor kv_b, float scale) -> Tensor",
    reference=rope_paged_mla_attention_reference,
    fake=_fake,
    cuda=rope_paged_mla_attention_triton,
)
