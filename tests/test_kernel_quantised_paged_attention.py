"""Attention over INT8 and FP8 caches: against the dequantised cache, and what is stored."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from seekforge.kernels.kv_write import quantise_heads
from seekforge.kernels.quantised_paged_attention import (
    quantised_paged_attention_reference,
    quantised_paged_attention_triton,
)
from seekforge.kernels.tolerance import assert_close, normalised_error

Make = Callable[..., SimpleNamespace]
KINDS = [torch.int8, torch.float8_e4m3fn]


def quantised(case: SimpleNamespace, kind: torch.dtype) -> list[Any]:
    """Arguments of the op for a case whose pools are quantised."""
    pools, scales = [], []
    for pool in (case.k_pool, case.v_pool):
        scale = torch.linspace(0.02, 0.05, pool.shape[2], device=pool.device)
        stored, scale = quantise_heads(pool.flatten(0, 1), kind, scale)
        pools.append(stored.view(pool.shape))
        scales.append(scale.view(pool.shape[:3]).clone() if kind == torch.int8 else scale)
    rest = case.paged()
    return [*rest[:3], *pools, *scales, *rest[5:]]


def clone(given: list[Any]) -> list[Any]:
    return [x.clone() if isinstance(x, Tensor) else x for x in given]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size"), [(4, 2, 16, 4), (7, 1, 40, 16), (8, 2, 64, 64)]
)
def test_kernel(
    cached_sequences: Make, kernel_device: str, poisoned: None, kind: torch.dtype,
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, block_size: int,
) -> None:  # fmt: skip
    case = cached_sequences(
        [(0, 1), (70, 1), (5, 3)], heads=heads, kv_heads=kv_heads, qk_dim=dim, v_dim=dim,
        block_size=block_size, dtype=dtype, device=kernel_device,
    )  # fmt: skip
    case.slot_mapping[-1] = -1
    given = quantised(case, kind)
    other = clone(given)
    expected = quantised_paged_attention_reference(
        *[x.float() if x is given[0] else x for x in other]
    )
    y = quantised_paged_attention_triton(*given)
    rows = slice(None, -1)  # the last row's own token was not written, and its slot holds another
    assert_close(y[rows], expected[rows].to(dtype), f"{kind} {dtype} {heads=} {dim=}")
    for stored, right in zip(given[3:7], other[3:7], strict=True):
        as_bytes = (x.view(torch.uint8) for x in (stored, right))
        assert torch.equal(*as_bytes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("chunks", "dtype"),
    [
        ([(0, 37)], torch.bfloat16),
        ([(70, 1), (5, 30), (0, 1), (33, 2)], torch.bfloat16),
        ([(70, 1), (5, 30), (0, 1), (33, 2)], torch.float16),
    ],
)
def test_chunks(
    cached_sequences: Make, kernel_device: str, poisoned: None, chunks: list[tuple[int, int]],
    kind: torch.dtype, dtype: torch.dtype,
) -> None:  # fmt: skip
    """Both kernels, unlike scales of tokens and heads, NaN behind the contexts."""
    case = cached_sequences(
        chunks, heads=6, qk_dim=40, v_dim=24, block_size=16, dtype=dtype, device=kernel_device
    )
    for pool in (case.k_pool, case.v_pool, case.k, case.v):
        pool *= torch.linspace(0.3, 3, pool.shape[-2], device=pool.device, dtype=dtype)[:, None]
    given = quantised(case, kind)
    expected = quantised_paged_attention_reference(
        *[x.float() if x is given[0] else x for x in clone(given)]
    )
    if kind == torch.float8_e4m3fn:
        for pool in given[3:5]:
            used = torch.zeros(pool.shape[:2], dtype=torch.bool, device=kernel_device)
            for table, length in zip(case.block_tables, case.context_lens.tolist(), strict=True):
                for t in range(length):
                    used[table[t // 16], t % 16] = True
            pool.view(torch.uint8)[~used] = 0x7F  # NaN
    y = quantised_paged_attention_triton(*given)
    assert_close(y, expected.to(dtype), f"{chunks=} {kind} {dtype}")


@pytest.mark.parametrize("kind", KINDS)
def test_is_near_plain_attention(cached_sequences: Make, kind: torch.dtype) -> None:
    case = cached_sequences([(70, 1), (5, 3)], qk_dim=32, v_dim=32)
    y = quantised_paged_attention_reference(*quantised(case, kind))
    error = normalised_error(y, case.expected)
    assert 1e-7 < error < (1e-4 if kind == torch.int8 else 1e-3), f"{kind}: {error}"


def test_int8_values_fill_the_range() -> None:
    x = torch.randn(5, 3, 16) * torch.tensor([1e-3, 1.0, 1e4])[:, None]
    stored, scale = quantise_heads(x, torch.int8, torch.empty(0))
    assert torch.equal(stored.abs().amax(-1), torch.full((5, 3), 127, dtype=torch.int8))
    assert ((stored * scale[..., None] - x).abs() <= 0.5001 * scale[..., None]).all()


def test_fp8_saturates() -> None:
    stored, _ = quantise_heads(torch.tensor([[[1e6, -1e6]]]), torch.float8_e4m3fn, torch.ones(1))
    assert stored.float().flatten().tolist() == [448.0, -448.0]
