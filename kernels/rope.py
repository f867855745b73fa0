"""Rotary position embedding of queries and keys from one cached table.

    q          [batch, seq, heads, head_dim]
    k          [batch, seq, kv_heads, head_dim]
    cos, sin   [max_len, rotary_dim / 2]  fp32; row p holds position p, with any scaling applied
    positions  [batch, seq]  int64, 0 <= p < max_len
    interleaved: pairs are (2i, 2i+1) instead of (i, i + rotary_dim / 2)

The first rotary_dim values of each head are rotated, the rest pass through:
    y1 = x1 * cos - x2 * sin,  y2 = x2 * cos + x1 * sin
computed in fp32 and rounded once. In fp32 that is bit for bit transformers'
`q * cos + rotate_half(q) * sin`.
Source: Su et al., "RoFormer", 2021.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from seekforge.kernels.ops import register
from seekforge.kernels.triton_support import jit, next_power_of_2, tl
from seekforge.kernels.tuning import first, overlaps_launches


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotates x [batch, seq, heads, head_dim] by cos, sin [batch, seq, 1, rotary_dim / 2]."""
    half = cos.shape[-1]
    wide = x[..., : 2 * half].to(torch.float32)
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = wide[..., :half], wide[..., half:]
    pair = (first * cos - second * sin, second * cos + first * sin)
    rotated = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    rotated = rotated.to(x.dtype)
    return rotated if x.shape[-1] == 2 * half else torch.cat((rotated, x[..., 2 * half :]), -1)


def rope_reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    cos, sin = cos[positions].unsqueeze(2), sin[positions].unsqueeze(2)
    return rotate_reference(q, cos, sin, interleaved), rotate_reference(k, cos, sin, interleaved)


@jit
def rotated_heads(  # type: ignore[no-untyped-def]
    x, c, s, inside, ROTARY: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """The pairs of heads x [HEADS, 1] (pointers), turned by c, s [1, PAIRS] and rounded: a pair of
    [HEADS, PAIRS], which lie at `pair_places`."""
    if INTERLEAVED:  # one wide load rather than two of every other value
        at = tl.arange(0, 2 * PAIRS)[None, :]
        both = tl.load(x + at, mask=inside & (at < ROTARY), other=0.0)
        a, b = tl.split(tl.reshape(both, [HEADS, PAIRS, 2]))
    else:
        pair = tl.arange(0, PAIRS)[None, :]
        a = tl.load(x + pair, mask=inside & (pair < ROTARY // 2), other=0.0)
        b = tl.load(x + ROTARY // 2 + pair, mask=inside & (pair < ROTARY // 2), other=0.0)
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    return (wide_a * c - wide_b * s).to(a.dtype), (wide_b * c + wide_a * s).to(a.dtype)


@jit
def store_pairs(  # type: ignore[no-untyped-def]
    y, a, b, inside, ROTARY: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Writes what `rotated_heads` gives to heads y [HEADS, 1] (pointers)."""
    if INTERLEAVED:
        at = tl.arange(0, 2 * PAIRS)[None, :]
        both = tl.reshape(tl.join(a, b), [HEADS, 2 * PAIRS])
        tl.store(y + at, both, mask=inside & (at < ROTARY))
    else:
        pair = tl.arange(0, PAIRS)[None, :]
        tl.store(y + pair, a, mask=inside & (pair < ROTARY // 2))
        tl.store(y + ROTARY // 2 + pair, b, mask=inside & (pair < ROTARY // 2))


@jit
def angles(cos, sin, position, ROTARY: tl.constexpr, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The rows of the tables at a position, [1, PAIRS] each."""
    pair = tl.arange(0, PAIRS)[None, :]
    at = position * (ROTARY // 2) + pair
    c = tl.load(cos + at, mask=pair < ROTARY // 2, other=0.0)
    s = tl.load(sin + at, mask=pair < ROTARY // 2, other=0.0)
    return c, s


@jit
def rope_kernel(  # type: ignore[no-untyped-def]
    q, k, q_out, k_out, cos, sin, positions, q_token, q_head, k_token, k_head,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr,
    PAIRS: tl.constexpr, TAIL: tl.constexpr, Q_PAD: tl.constexpr, K_PAD: tl.constexpr,
    INTERLEAVED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program turns a token's heads of q and k: all of them are under way together."""
    token = tl.program_id(0).to(tl.int64)
    c, s = angles(cos, sin, tl.load(positions + token), ROTARY, PAIRS)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.arange(0, Q_PAD).to(tl.int64)[:, None]
    in_q = head < Q_HEADS
    q += token * q_token + head * q_head
    q_out += (token * Q_HEADS + head) * DIM
    head = tl.arange(0, K_PAD).to(tl.int64)[:, None]
    in_k = head < K_HEADS
    k += token * k_token + head * k_head
    k_out += (token * K_HEADS + head) * DIM
    qa, qb = rotated_heads(q, c, s, in_q, ROTARY, PAIRS, INTERLEAVED, Q_PAD)
    ka, kb = rotated_heads(k, c, s, in_k, ROTARY, PAIRS, INTERLEAVED, K_PAD)
    store_pairs(q_out, qa, qb, in_q, ROTARY, PAIRS, INTERLEAVED, Q_PAD)
    store_pairs(k_out, ka, kb, in_k, ROTARY, PAIRS, INTERLEAVED, K_PAD)
    if DIM > ROTARY:
        at = ROTARY + tl.arange(0, TAIL)[None, :]
        q_rest = tl.load(q + at, mask=in_q & (at < DIM), other=0.0)
        k_rest = tl.load(k + at, mask=in_k & (at < DIM), other=0.0)
        tl.store(q_out + at, q_rest, mask=in_q & (at < DIM))
        tl.store(k_out + at, k_rest, mask=in_k & (at < DIM))


def as_tokens(x: Tensor) -> Tensor:
    """[..., heads, head_dim] as [tokens, heads, head_dim], in place where the strides allow it."""
    return (x if x.stride(-1) == 1 else x.contiguous()).flatten(0, -3)


def in_place(*tensors: Tensor) -> tuple[bool, list[Tensor]]:
    """Contiguous forms, and whether none had to be copied: a copy is not older than a launch."""
    made = [x.contiguous() for x in tensors]
    return all(x is y for x, y in zip(made, tensors, strict=True)), made


def token_warps(
    tokens: int, heads: int, head_dim: int, row: Mapping[str, int] | None = None
) -> int:
    """Triton's num_warps for the heads of a token, of a row of h200.json, found by the number of
    tokens, or of the one given: `per_thread` values of q in each thread. Without one 64."""
    row = row or first("rope", tokens=tokens) or {"per_thread": 64}
    return max(1, min(16, next_power_of_2(heads * head_dim) // (32 * row["per_thread"])))


def rope_triton(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """One launch, which may start before the launch before it has ended: the tables and the
    positions must be older than that one."""
    q_out, k_out = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k))
    if positions.numel() == 0:
        return q_out, k_out
    q, k = as_tokens(q), as_tokens(k)
    tokens, heads, dim = q.shape
    rotary, kv_heads = 2 * cos.shape[-1], k.shape[1]
    older, (cos, sin, positions) = in_place(cos, sin, positions)
    overlap = older and overlaps_launches(q.device)
    rope_kernel[(tokens,)](
        q, k, q_out, k_out, cos, sin, positions,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        Q_HEADS=heads, K_HEADS=kv_heads, DIM=dim, ROTARY=rotary,
        PAIRS=next_power_of_2(rotary // 2), TAIL=next_power_of_2(max(dim - rotary, 1)),
        Q_PAD=next_power_of_2(heads), K_PAD=next_power_of_2(kv_heads), INTERLEAVED=interleaved,
        OVERLAP=overlap, num_warps=token_warps(tokens, heads, dim), enable_fp_fusion=False,
        **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip
    return q_out, k_out


def _fake(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(q, memory_format=torch.contiguous_format),
        torch.empty_like(k, memory_format=torch.contiguous_format),
    )


rope = register(
    "rope(Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor positions, bool interleaved) "
    "-> (Tensor, Tensor)",
    reference=rope_reference,
    fake=_fake,
    cuda=rope_triton,
)
