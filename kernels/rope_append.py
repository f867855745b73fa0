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
    store_heads,
)
from seekforge.kernels.rope import (
    angles,
    heads_per_program,
    in_place,
    rope_reference,
    rotated_heads,
    store_pairs,
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
    V_DIM: tl.constexpr, V: tl.constexpr, INTERLEAVED: tl.constexpr, KIND: tl.constexpr,
    HEADS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (token, i): the i-th HEADS heads of q and, behind those, of k and of v."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    head = tl.arange(0, HEADS)
    q_parts: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    k_parts: tl.constexpr = (K_HEADS + HEADS - 1) // HEADS
    slot = tl.load(slot_mapping + token)
    c, s = angles(cos, sin, tl.load(positions + token), ROTARY, PAIRS)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = ROTARY + tl.arange(0, TAIL)[None, :]
    if part < q_parts:
        head += part * HEADS
        wide = head[:, None].to(tl.int64)
        inside = wide < Q_HEADS
        source = q + token * q_token + wide * q_head
        target = y + (token * Q_HEADS + wide) * DIM
        a, b = rotated_heads(source, c, s, inside, ROTARY, PAIRS, INTERLEAVED, HEADS)
        store_pairs(target, a, b, inside, ROTARY, PAIRS, INTERLEAVED, HEADS)
        if DIM > ROTARY:
            rest = tl.load(source + at, mask=inside & (at < DIM), other=0.0)
            tl.store(target + at, rest, mask=inside & (at < DIM))
    elif slot >= 0:
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        scale_at = slot * K_HEADS if KIND == "int8" else slot * 0
        if part < q_parts + k_parts:
            head += (part - q_parts) * HEADS
            wide = head[:, None].to(tl.int64)
            inside = wide < K_HEADS
            source = k + token * k_token + wide * k_head
            target = k_pool + block * k_block + offset * k_slot + wide * k_pool_head
            a, b = rotated_heads(source, c, s, inside, ROTARY, PAIRS, INTERLEAVED, HEADS)
            if DIM > ROTARY:
                rest = tl.load(source + at, mask=inside & (at < DIM), other=0.0)
            if KIND != "plain":
                top = tl.maximum(largest(a), largest(b))
                if DIM > ROTARY:
                    top = tl.maximum(top, largest(rest))
                by = head_scale(top, k_scale + scale_at, head, K_HEADS, KIND)
                a = quantised(a, by, KIND)
                b = quantised(b, by, KIND)
                if DIM > ROTARY:
                    rest = quantised(rest, by, KIND)
            store_pairs(target, a, b, inside, ROTARY, PAIRS, INTERLEAVED, HEADS)
            if DIM > ROTARY:
                tl.store(target + at, rest, mask=inside & (at < DIM))
        else:
            head += (part - q_parts - k_parts) * HEADS
            wide = head[:, None].to(tl.int64)
            store_heads(
                v + token * v_token + wide * v_head,
                v_pool + block * v_block + offset * v_slot + wide * v_pool_head,
                v_scale + scale_at, head, K_HEADS, V_DIM, V, KIND,
            )  # fmt: skip


def rope_append_triton(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, positions: Tensor,
    k_pool: Tensor, v_pool: Tensor, slot_mapping: Tensor, interleaved: bool,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    tile: tuple[int, int] | None = None,
) -> Tensor:  # fmt: skip
    """May start before the launch before it has ended: tables, positions and slots must be older
    than that one. Lets the next start early, which must wait before it reads y or the pools.

    tile: heads of a program and Triton's num_warps, instead of those of h200.json.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    tokens, heads, dim = q.shape
    kv_heads, v_dim, rotary = k.shape[1], v.shape[2], 2 * cos.shape[-1]
    y = torch.empty_like(q, memory_format=torch.contiguous_format)
    if tokens == 0:
        return y
    older, (cos, sin, positions, slot_mapping) = in_place(cos, sin, positions, slot_mapping)
    overlap = older and overlaps_launches(q.device)
    each, warps = tile or heads_per_program(tokens, heads + 2 * kv_heads, dim)
    rope_append_kernel[(tokens, -(-heads // each) - 2 * (-kv_heads // each))](
        q, k, v, y, k_pool, v_pool,
        k_pool if k_scale is None else k_scale, v_pool if v_scale is None else v_scale,
        cos, sin, positions, slot_mapping,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        *k_pool.stride()[:3], *v_pool.stride()[:3],
        Q_HEADS=heads, K_HEADS=kv_heads, BLOCK_SIZE=k_pool.shape[1],
        DIM=dim, ROTARY=rotary, PAIRS=next_power_of_2(rotary // 2),
        TAIL=next_power_of_2(max(dim - rotary, 1)), V_DIM=v_dim, V=next_power_of_2(v_dim),
        INTERLEAVED=interleaved, KIND=pool_kind(k_pool), HEADS=each, OVERLAP=overlap,
        num_warps=warps, enable_fp_fusion=False, **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip
    return y
