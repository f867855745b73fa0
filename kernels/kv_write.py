"""Writes the new tokens' keys and values into paged pools, quantised where the pools are.

    k, v            [tokens, kv_heads, qk_dim | v_dim]
    k_pool, v_pool  [blocks, block_size, kv_heads, qk_dim | v_dim]  k's dtype, int8, float8_e4m3fn
    slot_mapping    [tokens]  block * block_size + offset; negative: not written
    INT8            scales [blocks, block_size, kv_heads] fp32, written: max |x| / 127 over the head
    FP8             scales [kv_heads] fp32, read: stored = x / scale, saturated at 448

One launch, which lets the next kernel start early (see split_merge.py): that one must wait before
it reads the pools.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seekforge.kernels.triton_support import jit, next_power_of_2, tl
from seekforge.kernels.tuning import overlaps_launches

FP8_MAX = 448.0


@jit
def _store_heads(  # type: ignore[no-untyped-def]
    x, x_head, pool, pool_head, scale, heads, dim,
    HEADS: tl.constexpr, DIM: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """One token's heads: x + head * x_head -> pool + head * pool_head, each `dim` values."""
    head = tl.arange(0, HEADS)[:, None].to(tl.int64)
    d = tl.arange(0, DIM)[None, :]
    inside = (head < heads) & (d < dim)
    value = tl.load(x + head * x_head + d, mask=inside, other=0.0)
    if KIND == "int8":
        wide = value.to(tl.float32)
        top = tl.maximum(tl.max(tl.abs(wide), axis=1) / 127.0, 1e-12)
        tl.store(scale + tl.arange(0, HEADS), top, mask=tl.arange(0, HEADS) < heads)
        # Round half away from zero, in plain operations that every target has.
        scaled = wide / top[:, None]
        scaled = tl.where(scaled < 0, scaled - 0.5, scaled + 0.5)
        value = tl.minimum(tl.maximum(scaled, -127.0), 127.0).to(tl.int8)
    if KIND == "fp8":
        by = tl.load(scale + tl.arange(0, HEADS), mask=tl.arange(0, HEADS) < heads, other=1.0)
        scaled = value.to(tl.float32) / by[:, None]
        value = tl.minimum(tl.maximum(scaled, -448.0), 448.0).to(tl.float8e4nv)
    tl.store(pool + head * pool_head + d, value, mask=inside)


@jit
def kv_write_kernel(  # type: ignore[no-untyped-def]
    k, v, k_pool, v_pool, k_scale, v_scale, slot_mapping,
    k_token, k_head, v_token, v_head, slot_stride,
    k_block, k_slot, k_pool_head, v_block, v_slot, v_pool_head,
    heads, qk_dim, v_dim, block_size,
    HEADS: tl.constexpr, QK: tl.constexpr, V: tl.constexpr, KIND: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token * slot_stride)
    if slot >= 0:
        block = slot // block_size
        offset = slot % block_size
        k_scales = k_scale
        v_scales = v_scale
        if KIND == "int8":
            k_scales += slot * heads
            v_scales += slot * heads
        _store_heads(
            k + token * k_token, k_head, k_pool + block * k_block + offset * k_slot,
            k_pool_head, k_scales, heads, qk_dim, HEADS, QK, KIND,
        )  # fmt: skip
        _store_heads(
            v + token * v_token, v_head, v_pool + block * v_block + offset * v_slot,
            v_pool_head, v_scales, heads, v_dim, HEADS, V, KIND,
        )  # fmt: skip


def pool_kind(pool: Tensor) -> str:
    """How a pool's values are stored: "plain", "int8" or "fp8"."""
    return {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}.get(pool.dtype, "plain")


def kv_write_triton(
    k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slot_mapping: Tensor,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """Scales as above, contiguous; None for plain pools."""
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    tokens, heads, qk_dim = k.shape
    overlap = overlaps_launches(k.device)
    kv_write_kernel[(tokens,)](
        k, v, k_pool, v_pool,
        k_pool if k_scale is None else k_scale, v_pool if v_scale is None else v_scale,
        slot_mapping,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), slot_mapping.stride(0),
        *k_pool.stride()[:3], *v_pool.stride()[:3],
        heads, qk_dim, v.shape[2], k_pool.shape[1],
        HEADS=next_power_of_2(heads), QK=next_power_of_2(qk_dim), V=next_power_of_2(v.shape[2]),
        KIND=pool_kind(k_pool), OVERLAP=overlap, num_warps=4 if heads * qk_dim > 512 else 1,
    )  # fmt: skip
