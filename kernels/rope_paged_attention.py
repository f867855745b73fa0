"""Rotation of q and k, their write into the paged cache, and the attention over it: one operator,
so that a GPU rotates and writes in one launch and reads q, k and v of a fused projection in place.

    q               [tokens, heads, dim];  k, v  [tokens, kv_heads, dim | v_dim]   not rotated
    cos, sin        [max_len, rotary / 2];  positions  [tokens]:  as in rope.py
    the rest and y  as in paged_attention.py

Computes what `rope` and then `paged_attention` compute.
"""

from __future__ import annotations

from torch import Tensor

from seekforge.kernels.ops import register
from seekforge.kernels.paged_attention import attend_triton, paged_attention_reference
from seekforge.kernels.rope import rope_reference
from seekforge.kernels.rope_append import rope_append_triton


def rope_paged_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, positions: Tensor,
    k_pool: Tensor, v_pool: Tensor, slot_mapping: Tensor, block_tables: Tensor,
    context_lens: Tensor, query_start: Tensor, scale: float, interleaved: bool,
) -> Tensor:  # fmt: skip
    q, k = rope_reference(q[None], k[None], cos, sin, positions[None], interleaved)
    return paged_attention_reference(
        q[0], k[0], v, k_pool, v_pool, slot_mapping, block_tables, context_lens, query_start, scale
    )


def rope_paged_attention_triton(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, positions: Tensor,
    k_pool: Tensor, v_pool: Tensor, slot_mapping: Tensor, block_tables: Tensor,
    context_lens: Tensor, query_start: Tensor, scale: float, interleaved: bool,
) -> Tensor:  # fmt: skip
    # Before the write: the kernel after it reads these before it waits for it.
    block_tables, context_lens, query_start = (
        x if x.stride(-1) == 1 else x.contiguous()
        for x in (block_tables, context_lens, query_start)
    )
    q = rope_append_triton(q, k, v, cos, sin, positions, k_pool, v_pool, slot_mapping, interleaved)
    return attend_triton(q, k_pool, v_pool, block_tables, context_lens, query_start, scale)


def _fake(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, positions: Tensor,
    k_pool: Tensor, v_pool: Tensor, slot_mapping: Tensor, block_tables: Tensor,
    context_lens: Tensor, query_start: Tensor, scale: float, interleaved: bool,
) -> Tensor:  # fmt: skip
    return q.new_empty(*q.shape[:-1], v.shape[-1])


rope_paged_attention = register(
    "rope_paged_attention(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor positions, "
    "Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor slot_mapping, Tensor block_tables, "
    "Tensor context_lens, Tensor query_start, float scale, bool interleaved) -> Tensor",
    reference=rope_paged_attention_reference,
    fake=_fake,
    cuda=rope_paged_attention_triton,
)
