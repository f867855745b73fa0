"""Latent attention over INT8 and FP8 caches: against the dequantised cache, and what is stored."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from seekforge.kernels import paged_mla_decode
from seekforge.kernels.kv_write import quantise_heads
from seekforge.kernels.paged_mla_attention import paged_mla_attention_reference
from seekforge.kernels.quantised_paged_mla_attention import (
    quantised_paged_mla_attention_reference,
    quantised_paged_mla_attention_triton,
)
from seekforge.kernels.tolerance import assert_close, normalised_error
from seekforge.kernels.tuning import Config

Make = Callable[..., SimpleNamespace]
KINDS = [torch.int8, torch.float8_e4m3fn]
MIX = [(40, 1), (0, 5), (130, 1), (0, 1), (5, 2)]
RANK, ROPE, NOPE, V = 48, 24, 12, 20


def quantised(
    make: Make, chunks: list[tuple[int, int]], kind: torch.dtype, dtype: torch.dtype, device: str,
    heads: int = 6,
) -> tuple[list[Any], list[Any]]:  # fmt: skip
    """Arguments of the operator, and those of paged_mla_attention with the pool before."""
    case = make(
        chunks, heads=heads, kv_heads=1, qk_dim=RANK + ROPE, block_size=16, dtype=dtype,
        device=device,
    )  # fmt: skip
    random = torch.Generator().manual_seed(heads)
    q_nope = torch.randn(len(case.q), heads, NOPE, generator=random).to(device, dtype)
    kv_b = torch.randn(heads * (NOPE + V), RANK, generator=random).to(device, dtype) * RANK**-0.5
    pool = case.k_pool
    pool[..., RANK:] *= 5  # the parts' sizes differ
    latent, k_rope = case.k[:, 0, :RANK], case.k[:, 0, RANK:] * 5
    stored, scales = [], []
    for part, given in ((pool[..., :RANK], 0.02), (pool[..., RANK:], 0.11)):
        scale = torch.full((1,), given, device=device)
        x, scale = quantise_heads(part.flatten(0, 1), kind, scale)
        stored.append(x.view(torch.uint8).view(*pool.shape[:2], -1))
        scales.append(scale.view(pool.shape[:2]).clone() if kind == torch.int8 else scale)
    made = torch.cat(stored, -1).view(kind)
    index = case.slot_mapping, case.block_tables, case.context_lens, case.query_start
    head = [q_nope, case.q[..., RANK:], latent, k_rope]
    rest = [*index, kv_b, 0.2]
    return [*head, made, *scales, *rest], [*head, pool[:, :, 0], *rest]


def clone(given: list[Any]) -> list[Any]:
    return [x.clone() if isinstance(x, Tensor) else x for x in given]


@pytest.mark.parametrize(("dtype", "splits"), [(torch.float16, 3), (torch.bfloat16, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_kernel(
    cached_sequences: Make, kernel_device: str, poisoned: None, monkeypatch: pytest.MonkeyPatch,
    kind: torch.dtype, dtype: torch.dtype, splits: int,
) -> None:  # fmt: skip
    """Judged by fp32 as the reference in the same dtype is: it rounds the query elsewhere."""
    monkeypatch.setattr(
        paged_mla_decode, "mla_config", lambda *_, **__: Config(16, 16, splits, 4, 2)
    )
    given, _ = quantised(cached_sequences, MIX, kind, dtype, kernel_device)
    given[7][-1] = -1  # not written
    others = [clone(given), clone(given)]
    half = {torch.float16, torch.bfloat16}
    wide: list[Any] = [
        x.float() if isinstance(x, Tensor) and x.dtype in half else x for x in others[0]
    ]
    exact = quantised_paged_mla_attention_reference(*wide)
    plain = quantised_paged_mla_attention_reference(*others[1])
    y = quantised_paged_mla_attention_triton(*given)
    error, allowed = ((x.float() - exact)[:-1].norm() for x in (y, plain))
    assert error <= 1.3 * allowed + 1e-3 * exact.norm(), f"{kind} {dtype} {error=} {allowed=}"
    for stored, right in zip(given[4:7], others[0][4:7], strict=True):
        assert torch.equal(stored.view(torch.uint8), right.view(torch.uint8))


def test_slots_behind_the_context_may_hold_nan(
    cached_sequences: Make, kernel_device: str, poisoned: None
) -> None:
    given, _ = quantised(cached_sequences, MIX, torch.float8_e4m3fn, torch.float16, kernel_device)
    expected = quantised_paged_mla_attention_reference(*clone(given))
    pool, tables, lens = given[4], given[8], given[9]
    used = torch.zeros(pool.shape[:2], dtype=torch.bool, device=kernel_device)
    for table, length in zip(tables, lens.tolist(), strict=True):
        for t in range(length):
            used[table[t // 16], t % 16] = True
    pool.view(torch.uint8)[~used] = 0x7F  # NaN
    assert_close(quantised_paged_mla_attention_triton(*given), expected, "NaN behind the context")


@pytest.mark.parametrize("kind", KINDS)
def test_is_near_plain_attention(cached_sequences: Make, kind: torch.dtype) -> None:
    given, plain = quantised(cached_sequences, MIX, kind, torch.float32, "cpu")
    y = quantised_paged_mla_attention_reference(*given)
    error = normalised_error(y, paged_mla_attention_reference(*plain))
    assert 1e-7 < error < (1e-4 if kind == torch.int8 else 2e-3), f"{kind}: {error}"
