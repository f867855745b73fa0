"""One operator for rotation, write and attention: equal to rope and then paged_attention."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from seekforge.kernels.paged_attention import paged_attention_reference
from seekforge.kernels.rope import rope_reference
from seekforge.kernels.rope_paged_attention import (
    rope_paged_attention,
    rope_paged_attention_triton,
)
from seekforge.kernels.tolerance import assert_close

Make = Callable[..., SimpleNamespace]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("chunks", "rotary", "dtype"),
    [
        ([(0, 5), (17, 1), (3, 2)], 8, torch.float32),
        ([(4, 1), (31, 1)], 16, torch.bfloat16),
        ([(0, 19)], 16, torch.float16),
    ],
)
def test_equals_two_operators(
    cached_sequences: Make, kernel_device: str, poisoned: None, chunks: list[tuple[int, int]],
    rotary: int, dtype: torch.dtype, interleaved: bool,
) -> None:  # fmt: skip
    case = cached_sequences(
        chunks, heads=6, kv_heads=2, qk_dim=16, v_dim=16, block_size=16, dtype=dtype,
        device=kernel_device,
    )  # fmt: skip
    angles = torch.arange(64)[:, None] * 1e4 ** (-torch.arange(0, rotary, 2) / rotary)
    cos, sin = angles.cos().to(kernel_device), angles.sin().to(kernel_device)
    positions = torch.cat([torch.arange(past, past + new) for past, new in chunks])
    positions = positions.to(kernel_device)
    q, k, v, k_pool, v_pool, *index, scale = case.paged()
    pools = [k_pool.clone(), v_pool.clone()]
    turned_q, turned_k = rope_reference(q[None], k[None], cos, sin, positions[None], interleaved)
    expected = paged_attention_reference(turned_q[0], turned_k[0], v, *pools, *index, scale)

    fused = torch.cat([x.flatten(1) for x in (q, k, v)], 1)  # slices of one projection
    widths = [x.flatten(1).shape[1] for x in (q, k, v)]
    parts = [
        x.view(-1, like.shape[1], 16)
        for x, like in zip(fused.split(widths, 1), (q, k, v), strict=True)
    ]
    for run in (rope_paged_attention_triton, rope_paged_attention):
        mine = [k_pool.clone(), v_pool.clone()]
        y = run(*parts, cos, sin, positions, *mine, *index, scale, interleaved)
        assert_close(y, expected, f"{chunks} {dtype}")
        assert all(torch.equal(a, b) for a, b in zip(mine, pools, strict=True))


def test_no_tokens(cached_sequences: Make) -> None:
    case = cached_sequences([(3, 1)])
    q, k, v, k_pool, v_pool, _, tables, _, _, scale = case.paged()
    none = torch.zeros(0, dtype=torch.long)
    table = torch.zeros(8, 4)
    y = rope_paged_attention_triton(
        q[:0], k[:0], v[:0], table, table, none, k_pool, v_pool, none, tables[:0],
        none, torch.zeros(1, dtype=torch.long), scale, False,
    )  # fmt: skip
    assert y.shape == (0, 4, 8)
