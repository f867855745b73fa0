"""What comes before latent attention, in one launch: norm, rotation, cache write, W_UK (GPU).

    q_nope, q_rope    [tokens, heads, nope_dim | rope_dim]   of the projection: q_rope not rotated
    latent, k_rope    [tokens, rank | rope_dim]              of the projection: not normalised, not
                                                             rotated
    weight, eps       of the latent's norm, as in rms_norm.py
    cos, sin          [max_len, rope_dim / 2];  positions [tokens]:  as in rope.py
    latent_pool       [blocks, block_size, rank + rope_dim]  mutated: [norm(latent) | rope(k_rope)]
    slot_mapping      [tokens]                               negative: not written
    kv_b              [heads, nope_dim + v_dim, rank]        each head's W_UK, then its W_UV
    turned            [tokens, heads, rope_dim]              q_rope rotated
    q_latent          [tokens, heads, rank]                  q_nope W_UK

Rounded where rms_norm, rope and the product round. The grid has programs of two kinds: a token's
latent, key and some heads of its rotated query, and, for few tokens, columns of one head's product
(mla_heads.py), which needs neither. For many tokens the product is torch's, a launch before. All
inputs may be slices of one fused projection; they are read in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seekforge.kernels.mla_heads import (
    block_tokens,
    columns,
    few,
    head_product,
    load_head,
    padded,
    store_product,
)
from seekforge.kernels.paged_mla_attention import write_latents
from seekforge.kernels.rms_norm import normalise, rms_norm_reference
from seekforge.kernels.rope import angles, in_place, rope_reference, rotated_heads, store_pairs
from seekforge.kernels.triton_support import jit, next_power_of_2, tl
from seekforge.kernels.tuning import overlaps_launches

VALUES = 2048  # of the rotated query in one program


def normalised_and_turned(
    q_rope: Tensor, latent: Tensor, k_rope: Tensor, weight: Tensor, eps: float, cos: Tensor,
    sin: Tensor, positions: Tensor, interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """-> (q_rope rotated, latent normalised, k_rope rotated)."""
    turned, key = rope_reference(
        q_rope[None], k_rope[None, :, None], cos, sin, positions[None], interleaved
    )
    return turned[0], rms_norm_reference(latent, weight, eps), key[0, :, 0]


def mla_append_reference(
    q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, weight: Tensor, eps: float,
    cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool, latent_pool: Tensor,
    slot_mapping: Tensor, kv_b: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    turned, latent, k_rope = normalised_and_turned(
        q_rope, latent, k_rope, weight, eps, cos, sin, positions, interleaved
    )
    write_latents(latent, k_rope, latent_pool, slot_mapping)
    return torch.einsum("thn,hnc->thc", q_nope, kv_b[:, : q_nope.shape[2]]), turned


@jit
def append_token(  # type: ignore[no-untyped-def]
    q_rope, latent, k_rope, weight, cos, sin, positions, slot_mapping, pool, turned, eps,
    token, group, r_token, r_head, l_token, k_token, p_block, p_slot,
    HEADS: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr,
    ROPE: tl.constexpr, PAIRS: tl.constexpr, BLOCK_SIZE: tl.constexpr, INTERLEAVED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """GROUP heads of one token's rotated query; those of group 0 with the write into the pool."""
    slot = tl.load(slot_mapping + token)
    c, s = angles(cos, sin, tl.load(positions + token), ROPE, PAIRS)
    column = tl.arange(0, RANK_PAD)
    gain = tl.load(weight + column, mask=column < RANK, other=0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    column = column[None, :]
    one = tl.arange(0, 1).to(tl.int64)[:, None]
    writes = (one == group) & (one <= slot)  # [1, 1]; all loads are under way together
    head = group * GROUP + tl.arange(0, GROUP).to(tl.int64)[:, None]
    in_q = head < HEADS
    q_at = q_rope + token * r_token + head * r_head
    qa, qb = rotated_heads(q_at, c, s, in_q, ROPE, PAIRS, INTERLEAVED, GROUP)
    k_at = k_rope + token * k_token + one
    ka, kb = rotated_heads(k_at, c, s, writes, ROPE, PAIRS, INTERLEAVED, 1)
    value = tl.load(latent + token * l_token + column, mask=writes & (column < RANK), other=0.0)
    store_pairs(
        turned + (token * HEADS + head) * ROPE, qa, qb, in_q, ROPE, PAIRS, INTERLEAVED, GROUP
    )
    to = pool + slot // BLOCK_SIZE * p_block + slot % BLOCK_SIZE * p_slot
    tl.store(to + column, normalise(value, gain, eps, RANK), mask=writes & (column < RANK))
    store_pairs(to + RANK + one, ka, kb, writes, ROPE, PAIRS, INTERLEAVED, 1)


@jit
def mla_append_kernel(  # type: ignore[no-untyped-def]
    q_nope, q_rope, latent, k_rope, weight, cos, sin, positions, slot_mapping, pool, kv_b,
    turned, q_latent, eps, tokens,
    q_token, q_head, r_token, r_head, l_token, k_token, p_block, p_slot, w_head, l_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, NOPE: tl.constexpr, NOPE_PAD: tl.constexpr,
    RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    INTERLEAVED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK_T 0: no product."""
    GROUPS: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    at = tl.program_id(0)
    if at < tokens * GROUPS:
        append_token(
            q_rope, latent, k_rope, weight, cos, sin, positions, slot_mapping, pool, turned, eps,
            (at // GROUPS).to(tl.int64), at % GROUPS, r_token, r_head, l_token, k_token, p_block,
            p_slot, HEADS, GROUP, RANK, RANK_PAD, ROPE, PAIRS, BLOCK_SIZE, INTERLEAVED, OVERLAP,
        )  # fmt: skip
    else:
        if BLOCK_T > 0:
            BLOCKS: tl.constexpr = (RANK + BLOCK_N - 1) // BLOCK_N
            product = at - tokens * GROUPS
            head = (product // BLOCKS).to(tl.int64)
            n = product % BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
            tile = load_head(kv_b + head * w_head, n, RANK, 1, NOPE, RANK, NOPE_PAD)
            if OVERLAP:
                tl.extra.cuda.gdc_wait()  # weights are older than the launch before
                tl.extra.cuda.gdc_launch_dependents()
            store_product(
                q_nope + head * q_head, tile, q_latent + head * RANK, n, tokens, q_token, l_row,
                NOPE, RANK, NOPE_PAD, BLOCK_T,
            )  # fmt: skip


def mla_append_triton(
    q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, weight: Tensor, eps: float,
    cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool, latent_pool: Tensor,
    slot_mapping: Tensor, kv_b: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """-> (q_latent, turned). May start before the launch before it has ended: weights, tables,
    positions and slots must be older than that one. Lets the next start early, which must wait
    before it reads the results or the pool.
    """
    q_nope, q_rope, latent, k_rope = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (q_nope, q_rope, latent, k_rope)
    )
    (tokens, heads, nope), (rank, rope) = q_nope.shape, (latent.shape[1], k_rope.shape[1])
    assert 2 * cos.shape[-1] == rope, f"{rope} dims of the key, {2 * cos.shape[-1]} rotated"
    older, (cos, sin, positions, slot_mapping, weight, kv_b) = in_place(
        cos, sin, positions, slot_mapping, weight, kv_b
    )
    inside = few(q_nope)
    if inside:
        q_latent = q_nope.new_empty(tokens, heads, rank)
    else:
        q_latent = head_product(q_nope, kv_b[:, :nope])
    turned = torch.empty_like(q_rope, memory_format=torch.contiguous_format)
    if tokens == 0:
        return q_latent, turned
    group = min(next_power_of_2(heads), max(1, VALUES // next_power_of_2(rope)))
    block_n = columns(nope, rank)
    products = heads * -(-rank // block_n) if inside else 0
    overlap = older and overlaps_launches(q_nope.device)
    mla_append_kernel[(tokens * -(-heads // group) + products,)](
        q_nope, q_rope, latent, k_rope, weight, cos, sin, positions, slot_mapping, latent_pool,
        kv_b, turned, q_latent, eps, tokens,
        q_nope.stride(0), q_nope.stride(1), q_rope.stride(0), q_rope.stride(1), latent.stride(0),
        k_rope.stride(0), latent_pool.stride(0), latent_pool.stride(1), kv_b.stride(0),
        q_latent.stride(0), HEADS=heads, GROUP=group, NOPE=nope, NOPE_PAD=padded(nope), RANK=rank,
        RANK_PAD=next_power_of_2(rank), ROPE=rope, PAIRS=next_power_of_2(rope // 2),
        BLOCK_SIZE=latent_pool.shape[1], BLOCK_N=block_n,
        BLOCK_T=block_tokens(tokens) if inside else 0, INTERLEAVED=interleaved,
        OVERLAP=overlap, enable_fp_fusion=False, num_warps=4, num_stages=1,
        **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip
    return q_latent, turned
