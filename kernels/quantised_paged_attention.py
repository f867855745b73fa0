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

from seekforge.kernels.kv_write import FP8_MAX, kv_write_triton
from seekforge.kernels.ops import register
from seekforge.kernels.paged_attention import paged_attention_reference
from seekforge.kernels.paged_decode import paged_decode_triton
from seekforge.kernels.paged_prefill import paged_prefill_triton


def quantise_heads(x: Tensor, pool_dtype: torch.dtype, scale: Tensor) -> tuple[Tensor, Tensor]:
    """x [tokens, kv_heads, dim] -> (stored values, scales); `scale` is used for FP8 only."""
    wide = x.to(torch.float32)
    if pool_dtype == torch.int8:
        scale = (wide.abs().amax(-1) / 127).clamp_min(1e-12)
        scaled = wide / scale[..., None]
        rounded = torch.trunc(scaled + torch.where(scaled < 0, -0.5, 0.5))
        return rounded.clamp(-127, 127).to(torch.int8), scale
    scaled = wide / scale[:, None]
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def _write(x: Tensor, pool: Tensor, scale: Tensor, slots: Tensor) -> Tensor:
    """Writes x, and returns the whole pool dequantised, in x's dtype."""
    kept = slots >= 0
    stored, scales = quantise_heads(x[kept], pool.dtype, scale)
    # Bytes: index_copy_ has no FP8 form.
    as_bytes = pool.view(torch.uint8).view(-1, *pool.shape[2:])
    as_bytes.index_copy_(0, slots[kept], stored.view(torch.uint8))
    if pool.dtype == torch.int8:
        scale.view(-1, scale.shape[-1]).index_copy_(0, slots[kept], scales)
    wide = pool.to(torch.float32)
    return (wide * (scale[..., None] if pool.dtype == torch.int8 else scale[:, None])).to(x.dtype)


def quantised_paged_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, k_scale: Tensor,
    v_scale: Tensor, slot_mapping: Tensor, block_tables: Tensor, context_lens: Tensor,
    query_start: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    k_wide = _write(k, k_pool, k_scale, slot_mapping)
    v_wide = _write(v, v_pool, v_scale, slot_mapping)
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
