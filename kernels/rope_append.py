"""Rotation of q and k, and the write of k and v into a paged cache, in one launch.

    q               [tokens, heads, dim];  k, v  [tokens, kv_heads, dim | v_dim]
    cos, sin        [max_len, rotary / 2];  positions  [tokens]:  as in rope.py
    k_pool, v_pool  [blocks, block_size, kv_heads, dim | v_dim], slot_mapping [tokens], scales:
                    as in kv_write.py
    y               [tokens, heads, dim]      q rotated

The same bits as rope followed by kv_write, which read and write k once more: rotated values are
rounded to the dtype of k before they are quantised. A token with a negative slot leaves the pools
alone. q, k and v may be slices of one fused projection; they are read in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seekforge.kernels.kv_write import (
    head_scale,
    kv_write_reference,
    largest,
    pool_kind,
    quantised,
)
from seekforge.kernels.rope import (
    angles,
    in_place,
    rope_reference,
    rotated_heads,
    store_pairs,
    token_warps,
)
from seekforge.kernels.triton_support import jit, next_power_of_2, tl
from seekforge.kernels.tuning import overlaps_launches


def rope_append_reference(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, positions: Tensor,
    k_pool: Tensor, v_pool: Tensor, slot_mapping: Tensor, interleaved: bool,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    y, turned = rope_reference(q[None], k[None], cos, sin, positions[None], interleaved)
    kv_write_reference(turned[0], v, k_pool, v_pool, slot_mapping, k_scale, v_scale)
    return y[0]


@jit
def rope_append_kernel(  # type: ignore[no-untyped-def]
    q, k, v, y, k_pool, v_pool, k_scale, v_scale, cos, sin, positions, slot_mapping,
    q_token, q_head, k_token, k_head, v_token, v_head,
    k_block, k_slot, k_pool_head, v_block, v_slot, v_pool_head,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr, ROTARY: tl.constexpr, PAIRS: tl.constexpr, TAIL: tl.constexpr,
    V_DIM: tl.constexpr, V: tl.constexpr, Q_PAD: tl.constexpr, K_PAD: tl.constexpr,
    INTERLEAVED: tl.constexpr, KIND: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program does one token: its heads of q, k and v are under way together."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    c, s = angles(cos, sin, tl.load(positions + token), ROTARY, PAIRS)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = ROTARY + tl.arange(0, TAIL)[None, :]
    column = tl.arange(0, V)[None, :]
    head = tl.arange(0, Q_PAD).to(tl.int64)[:, None]
    in_q = head < Q_HEADS
    q += token * q_token + head * q_head
    y += (token * Q_HEADS + head) * DIM
    kv_head = tl.arange(0, K_PAD)
    head = kv_head.to(tl.int64)[:, None]
    in_k = head < K_HEADS
    in_v = in_k & (column < V_DIM)
    k += token * k_token + head * k_head
    qa, qb = rotated_heads(q, c, s, in_q, ROTARY, PAIRS, INTERLEAVED, Q_PAD)
    ka, kb = rotated_heads(k, c, s, in_k, ROTARY, PAIRS, INTERLEAVED, K_PAD)
    value = tl.load(v + token * v_token + head * v_head + column, mask=in_v, other=0.0)
    store_pairs(y, qa, qb, in_q, ROTARY, PAIRS, INTERLEAVED, Q_PAD)
    if DIM > ROTARY:
        rest = tl.load(k + at, mask=in_k & (at < DIM), other=0.0)
        q_rest = tl.load(q + at, mask=in_q & (at < DIM), other=0.0)
        tl.store(y + at, q_rest, mask=in_q & (at < DIM))
    if slot >= 0:
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        to_k = k_pool + block * k_block + offset * k_slot + head * k_pool_head
        to_v = v_pool + block * v_block + offset * v_slot + head * v_pool_head
        if KIND == "plain":
            first, second, stored = ka, kb, value
            if DIM > ROTARY:
                tl.store(to_k + at, rest, mask=in_k & (at < DIM))
        else:
            scale_at = slot * K_HEADS if KIND == "int8" else slot * 0
            top = tl.maximum(largest(ka), largest(kb))
            if DIM > ROTARY:
                top = tl.maximum(top, largest(rest))
            by = head_scale(top, k_scale + scale_at, kv_head, K_HEADS, KIND)
            first = quantised(ka, by, KIND)
            second = quantised(kb, by, KIND)
            if DIM > ROTARY:
                tl.store(to_k + at, quantised(rest, by, KIND), mask=in_k & (at < DIM))
            by = head_scale(largest(value), v_scale + scale_at, kv_head, K_HEADS, KIND)
            stored = quantised(value, by, KIND)
        store_pairs(to_k, first, second, in_k, ROTARY, PAIRS, INTERLEAVED, K_PAD)
        tl.store(to_v + column, stored, mask=in_v)


def rope_append_triton(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, positions: Tensor,
    k_pool: Tensor, v_pool: Tensor, slot_mapping: Tensor, interleaved: bool,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    warps: int | None = None,
) -> Tensor:  # fmt: skip
    """May start before the launch before it has ended: tables, positions and slots must be older
    than that one. Lets the next start early, which must wait before it reads y or the pools.

    warps: Triton's num_warps, instead of those of h200.json.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    tokens, heads, dim = q.shape
    kv_heads, v_dim, rotary = k.shape[1], v.shape[2], 2 * cos.shape[-1]
    y = torch.empty_like(q, memory_format=torch.contiguous_format)
    if tokens == 0:
        return y
    older, (cos, sin, positions, slot_mapping) = in_place(cos, sin, positions, slot_mapping)
    overlap = older and overlaps_launches(q.device)
    rope_append_kernel[(tokens,)](
        q, k, v, y, k_pool, v_pool,
        k_pool if k_scale is None else k_scale, v_pool if v_scale is None else v_scale,
        cos, sin, positions, slot_mapping,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        *k_pool.stride()[:3], *v_pool.stride()[:3],
        Q_HEADS=heads, K_HEADS=kv_heads, BLOCK_SIZE=k_pool.shape[1],
        DIM=dim, ROTARY=rotary, PAIRS=next_power_of_2(rotary // 2),
        TAIL=next_power_of_2(max(dim - rotary, 1)), V_DIM=v_dim, V=next_power_of_2(v_dim),
        Q_PAD=next_power_of_2(heads), K_PAD=next_power_of_2(kv_heads), INTERLEAVED=interleaved,
        KIND=pool_kind(k_pool), OVERLAP=overlap, enable_fp_fusion=False,
        num_warps=warps or token_warps(tokens, heads, dim),
        **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip
    return y
