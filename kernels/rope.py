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
def rope_kernel(  # type: ignore[no-untyped-def]
    x, y, cos, sin, positions, heads, head_dim, half, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)  # one token and head
    position = tl.load(positions + row // heads)
    pair = tl.arange(0, BLOCK)
    inside = pair < half
    first = row * head_dim + (2 * pair if INTERLEAVED else pair)
    second = first + (1 if INTERLEAVED else half)
    c = tl.load(cos + position * half + pair, mask=inside, other=0.0)
    s = tl.load(sin + position * half + pair, mask=inside, other=0.0)
    a = tl.load(x + first, mask=inside, other=0.0)
    b = tl.load(x + second, mask=inside, other=0.0)
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    tl.store(y + first, (wide_a * c - wide_b * s).to(a.dtype), mask=inside)
    tl.store(y + second, (wide_b * c + wide_a * s).to(b.dtype), mask=inside)
    tail = 2 * half
    while tail < head_dim:
        at = tail + pair
        keep = at < head_dim
        tl.store(
            y + row * head_dim + at,
            tl.load(x + row * head_dim + at, mask=keep, other=0.0),
            mask=keep,
        )
        tail += BLOCK


def rope_triton(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    cos, sin, positions = cos.contiguous(), sin.contiguous(), positions.contiguous()
    rotated = []
    for x in (q.contiguous(), k.contiguous()):
        y = torch.empty_like(x)
        heads, head_dim, half = x.shape[-2], x.shape[-1], cos.shape[-1]
        rope_kernel[(positions.numel() * heads,)](
            x, y, cos, sin, positions, heads, head_dim, half,
            INTERLEAVED=interleaved, BLOCK=next_power_of_2(half),
        )  # fmt: skip
        rotated.append(y)
    return rotated[0], rotated[1]


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
