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
    PAIRS: tl.constexpr, TAIL: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (token, i): the i-th HEADS heads of q and, behind those, of k."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    q_parts: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    c, s = angles(cos, sin, tl.load(positions + token), ROTARY, PAIRS)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if tl.program_id(1) < q_parts:
        inside = head < Q_HEADS
        x = q + token * q_token + head * q_head
        y = q_out + (token * Q_HEADS + head) * DIM
    else:
        head -= q_parts * HEADS
        inside = head < K_HEADS
        x = k + token * k_token + head * k_head
        y = k_out + (token * K_HEADS + head) * DIM
    a, b = rotated_heads(x, c, s, inside, ROTARY, PAIRS, INTERLEAVED, HEADS)
    store_pairs(y, a, b, inside, ROTARY, PAIRS, INTERLEAVED, HEADS)
    if DIM > ROTARY:
        at = ROTARY + tl.arange(0, TAIL)[None, :]
        rest = tl.load(x + at, mask=inside & (at < DIM), other=0.0)
        tl.store(y + at, rest, mask=inside & (at < DIM))


def as_tokens(x: Tensor) -> Tensor:
    """[..., heads, head_dim] as [tokens, heads, head_dim], in place where the strides allow it."""
    return (x if x.stride(-1) == 1 else x.contiguous()).flatten(0, -3)


def in_place(*tensors: Tensor) -> tuple[bool, list[Tensor]]:
    """Contiguous forms, and whether none had to be copied: a copy is not older than a launch."""
    made = [x.contiguous() for x in tensors]
    return all(x is y for x, y in zip(made, tensors, strict=True)), made


def heads_per_program(tokens: int, heads: int, head_dim: int) -> tuple[int, int]:
    """(heads, warps) from h200.json, by the number of values; without a row 8 heads by 4 warps."""
    row = first("rope", values=tokens * heads * head_dim) or {"heads": 8, "warps": 4}
    return min(row["heads"], next_power_of_2(heads)), row["warps"]


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
    each, warps = heads_per_program(tokens, heads + kv_heads, dim)
    older, (cos, sin, positions) = in_place(cos, sin, positions)
    overlap = older and overlaps_launches(q.device)
    rope_kernel[(tokens, -(-heads // each) - (-kv_heads // each))](
        q, k, q_out, k_out, cos, sin, positions,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        Q_HEADS=heads, K_HEADS=kv_heads, DIM=dim, ROTARY=rotary,
        PAIRS=next_power_of_2(rotary // 2), TAIL=next_power_of_2(max(dim - rotary, 1)),
        INTERLEAVED=interleaved, HEADS=each, OVERLAP=overlap, num_warps=warps,
        enable_fp_fusion=False, **({"launch_pdl": True} if overlap else {}),
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
