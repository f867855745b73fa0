"""paged_attention over an INT8 or FP8 cache: dequantised before the product, fp32 sums.

    k_pool, v_pool    [blocks, block_size, kv_heads, qk_dim | v_dim]  int8, float8_e4m3fn; mutated
    k_scale, v_scale  int8: [blocks, block_size, kv_heads] fp32, mutated (one per token and head)
                      fp8:  [kv_heads] fp32, given (a scale per head)
    the rest          as in paged_attention

    int8: scale = max |x| / 127 over a head's values, stored = round(x / scale)
    fp8:  stored = e4m3(x / scale), saturated at 448
A cache of half the bytes: 2 * dim + 8 bytes a token and head in INT8, 2 * dim in FP8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seekforge.kernels.kv_write import kv_write_reference, kv_write_triton
from seekforge.kernels.ops import register
from seekforge.kernels.paged_attention import paged_attention_reference
from seekforge.kernels.paged_decode import paged_decode_triton
from seekforge.kernels.paged_prefill import paged_prefill_triton


def quantised_paged_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, k_scale: Tensor,
    v_scale: Tensor, slot_mapping: Tensor, block_tables: Tensor, context_lens: Tensor,
    query_start: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    kv_write_reference(k, v, k_pool, v_pool, slot_mapping, k_scale, v_scale)
    k_wide, v_wide = (
        (pool.float() * (scale[..., None] if pool.dtype == torch.int8 else scale[:, None])).to(
            q.dtype
        )
        for pool, scale in ((k_pool, k_scale), (v_pool, v_scale))
    )
    return paged_attention_reference(
        q, k[:0], v[:0], k_wide, v_wide, slot_mapping[:0], block_tables, context_lens,
        query_start, scale,
    )  # fmt: skip


def quantised_paged_attention_triton(
    q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, k_scale: Tensor,
    v_scale: Tensor, slot_mapping: Tensor, block_tables: Tensor, context_lens: Tensor,
    query_start: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """As paged_attention_triton."""
    q, block_tables = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, block_tables))
    tokens, sequences = q.shape[0], block_tables.shape[0]
    y = q.new_empty(*q.shape[:-1], v.shape[-1])
    if tokens == 0:
        return y
    # Before the write: the kernel after it reads these before it waits for it.
    index = (block_tables, context_lens.contiguous(), query_start.contiguous())
    kv_write_triton(k, v, k_pool, v_pool, slot_mapping, k_scale, v_scale)
    by_row = tokens <= sequences
    if by_row or sequences > 1:
        paged_decode_triton(q, k_pool, v_pool, *index, scale, y, by_row, k_scale, v_scale)
    if not by_row:
        least, scales = 2 if sequences > 1 else 1, (k_scale, v_scale)
        paged_prefill_triton(q, k_pool, v_pool, *index, scale, y, least, None, *scales)
    return y


def _fake(
    q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, k_scale: Tensor,
    v_scale: Tensor, slot_mapping: Tensor, block_tables: Tensor, context_lens: Tensor,
    query_start: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    return q.new_empty(*q.shape[:-1], v.shape[-1])


quantised_paged_attention = register(
    "quantised_paged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_pool, "
    "Tensor(b!) v_pool, Tensor(c!) k_scale, Tensor(d!) v_scale, Tensor slot_mapping, "
    "Tensor block_tables, Tensor context_lens, Tensor query_start, float scale) -> Tensor",
    reference=quantised_paged_attention_reference,
    fake=_fake,
    cuda=quantised_paged_attention_triton,
)
