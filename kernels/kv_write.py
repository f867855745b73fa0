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


def kv_write_reference(
    k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slot_mapping: Tensor,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """Scales as above; None for plain pools."""
    # -1 would index the last slot of the last block: padded rows must not touch live data.
    if bool((slot_mapping < 0).any()):
        kept = slot_mapping >= 0
        k, v, slot_mapping = k[kept], v[kept], slot_mapping[kept]
    for x, pool, scale in ((k, k_pool, k_scale), (v, v_pool, v_scale)):
        if scale is not None:
            x, scales = quantise_heads(x, pool.dtype, scale)
            if pool.dtype == torch.int8:
                scale.view(-1, scale.shape[-1]).index_copy_(0, slot_mapping, scales)
        if pool.dtype == torch.float8_e4m3fn:  # bytes: index_copy_ has no FP8 form
            x, pool = x.view(torch.uint8), pool.view(torch.uint8)
        # view, not flatten: flatten would copy a pool with gaps between its blocks and lose writes.
        pool.view(-1, *pool.shape[2:]).index_copy_(0, slot_mapping, x)


@jit
def head_scale(top, scale, head, heads, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """The scales of heads [HEADS]: INT8 makes them of the largest |x|, `top`, and writes them."""
    if KIND == "int8":
        by = tl.maximum(tl.div_rn(top, 127.0), 1e-12)
        tl.store(scale + head, by, mask=head < heads)
    else:
        by = tl.load(scale + head, mask=head < heads, other=1.0)
    return by


@jit
def quantised(value, by, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """value [HEADS, columns] in the form of the pool, by the heads' scales [HEADS]."""
    scaled = tl.div_rn(value.to(tl.float32), by[:, None])
    if KIND == "int8":
        # Round half away from zero, in plain operations that every target has.
        scaled = tl.where(scaled < 0, scaled - 0.5, scaled + 0.5)
        stored = tl.minimum(tl.maximum(scaled, -127.0), 127.0).to(tl.int8)
    else:
        stored = tl.minimum(tl.maximum(scaled, -448.0), 448.0).to(tl.float8e4nv)
    return stored


@jit
def largest(value):  # type: ignore[no-untyped-def]
    """The largest |x| of each row."""
    return tl.max(tl.abs(value.to(tl.float32)), axis=1)


@jit
def store_heads(  # type: ignore[no-untyped-def]
    x, pool, scale, head, heads, DIM: tl.constexpr, PAD: tl.constexpr, KIND: tl.constexpr
):
    """Heads of one token, `head` [HEADS] of `heads`: from x to pool, pointers [HEADS, 1]."""
    d = tl.arange(0, PAD)[None, :]
    inside = (head < heads)[:, None] & (d < DIM)
    value = tl.load(x + d, mask=inside, other=0.0)
    if KIND != "plain":
        value = quantised(value, head_scale(largest(value), scale, head, heads, KIND), KIND)
    tl.store(pool + d, value, mask=inside)


@jit
def kv_write_kernel(  # type: ignore[no-untyped-def]
    k, v, k_pool, v_pool, k_scale, v_scale, slot_mapping,
    k_token, k_head, v_token, v_head, slot_stride,
    k_block, k_slot, k_pool_head, v_block, v_slot, v_pool_head,
    heads, block_size, HEADS: tl.constexpr, QK_DIM: tl.constexpr, V_DIM: tl.constexpr,
    QK: tl.constexpr, V: tl.constexpr, KIND: tl.constexpr, OVERLAP: tl.constexpr,
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
        head = tl.arange(0, HEADS)
        wide = head[:, None].to(tl.int64)
        store_heads(
            k + token * k_token + wide * k_head,
            k_pool + block * k_block + offset * k_slot + wide * k_pool_head,
            k_scales, head, heads, QK_DIM, QK, KIND,
        )  # fmt: skip
        store_heads(
            v + token * v_token + wide * v_head,
            v_pool + block * v_block + offset * v_slot + wide * v_pool_head,
            v_scales, head, heads, V_DIM, V, KIND,
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
        heads, k_pool.shape[1],
        HEADS=next_power_of_2(heads), QK_DIM=qk_dim, V_DIM=v.shape[2],
        QK=next_power_of_2(qk_dim), V=next_power_of_2(v.shape[2]),
        KIND=pool_kind(k_pool), OVERLAP=overlap, num_warps=4 if heads * qk_dim > 512 else 1,
    )  # fmt: skip
