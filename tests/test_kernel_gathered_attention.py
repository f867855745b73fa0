"""Gathered attention, the padded form: equal to the paged form on the same data, padding unseen."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from seekforge.kernels.gathered_attention import gathered_attention
from seekforge.kernels.paged_attention import paged_attention
from seekforge.kernels.tolerance import assert_close

Make = Callable[..., SimpleNamespace]

CHUNKS = {  # (tokens in the cache, new tokens) of each sequence
    "one prefill": [(0, 12)],
    "one decode": [(5, 1)],
    "one chunk": [(5, 3)],
    "decodes": [(0, 1), (3, 1), (15, 1), (16, 1)],
    "mix": [(0, 12), (5, 1), (5, 3), (30, 1), (4, 4)],
}


def padded(case: SimpleNamespace, padding: float = 0.0) -> tuple[list[Tensor], list[int]]:
    """q, k, v as [batch, seq, heads, dim], right-padded with a value, and the real lengths."""
    counts = case.query_start.diff().tolist()
    rows = [
        pad_sequence(x.split(counts), batch_first=True, padding_value=padding)
        for x in (case.q, case.k, case.v)
    ]
    return rows, counts


def gathered(case: SimpleNamespace, padding: float = 0.0) -> Tensor:
    """The op's output for the real tokens, in the order of case.expected."""
    qkv, counts = padded(case, padding)
    y = gathered_attention(
        *qkv, case.k_pool, case.v_pool, case.block_tables, case.past_lens, case.scale
    )
    return torch.cat([row[:count] for row, count in zip(y, counts, strict=True)])


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_equals_plain_and_paged_attention(
    cached_sequences: Make, device: str, poisoned: None,
    chunks: list[tuple[int, int]], block_size: int,
) -> None:  # fmt: skip
    case = cached_sequences(chunks, block_size=block_size, device=device)
    y = gathered(case)
    assert_close(y, case.expected, f"{chunks=} {block_size=}")
    assert_close(y, paged_attention(*case.paged()), f"{chunks=} {block_size=}, paged")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_stale_slots_are_not_seen(cached_sequences: Make, device: str, value: float) -> None:
    """A weight of 0 times what an earlier sequence left in a block must be 0."""
    case = cached_sequences(CHUNKS["mix"], device=device)
    size = case.k_pool.shape[1]
    live = torch.zeros(case.k_pool.shape[:2], dtype=torch.bool, device=device)
    for table, length in zip(case.block_tables, case.past_lens.tolist(), strict=True):
        at = torch.arange(length, device=device)
        live[table[at // size], at % size] = True
    for pool in (case.k_pool, case.v_pool):
        pool[~live] = value
    assert_close(gathered(case), case.expected, f"{value=}")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "qk_dim", "v_dim"), [(4, 1, 16, 16), (6, 2, 16, 12), (4, 2, 16, 20)]
)
def test_head_shapes(
    cached_sequences: Make, heads: int, kv_heads: int, qk_dim: int, v_dim: int
) -> None:
    case = cached_sequences(
        CHUNKS["mix"], heads=heads, kv_heads=kv_heads, qk_dim=qk_dim, v_dim=v_dim
    )
    assert_close(gathered(case), case.expected, f"{heads=} {kv_heads=} {qk_dim=} {v_dim=}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(cached_sequences: Make, dtype: torch.dtype) -> None:
    case = cached_sequences(CHUNKS["mix"], dtype=dtype)
    assert_close(gathered(case), case.expected, f"{dtype=}")


def test_padding_is_not_seen(cached_sequences: Make, device: str) -> None:
    case = cached_sequences(CHUNKS["mix"], device=device)
    assert torch.equal(gathered(case, padding=0.0), gathered(case, padding=1e4))


def test_other_slots_are_not_seen(cached_sequences: Make) -> None:
    """What the blocks hold behind past_lens, and blocks a short row's table is filled up with."""
    case, other = (cached_sequences(CHUNKS["mix"]) for _ in range(2))
    held = torch.zeros(case.k_pool.shape[:2], dtype=torch.bool)
    for table, past in zip(case.block_tables.tolist(), case.past_lens.tolist(), strict=True):
        for i in range(past):
            held[table[i // 4], i % 4] = True
    other.k_pool[~held] += 100
    other.v_pool[~held] -= 100
    assert torch.equal(gathered(case), gathered(other))


def test_is_pure(cached_sequences: Make) -> None:
    case, other = (cached_sequences(CHUNKS["mix"]) for _ in range(2))
    gathered(case)
    for name in ("q", "k", "v", "k_pool", "v_pool", "block_tables", "past_lens"):
        assert torch.equal(getattr(case, name), getattr(other, name)), name


def test_later_tokens_do_not_change_earlier_ones(cached_sequences: Make) -> None:
    case = cached_sequences([(5, 12), (3, 1)])
    before = gathered(case)
    case.k[6] += 3
    case.v[6] -= 3
    after = gathered(case)
    assert torch.equal(after[:6], before[:6])
    assert not torch.equal(after[6:12], before[6:12])
    assert torch.equal(after[12:], before[12:])


def test_reads_any_strides(cached_sequences: Make, layout: Callable[[Tensor], Tensor]) -> None:
    """B47: strided q and tables, K and V pools interleaved in one tensor."""
    case = cached_sequences([(5, 3), (2, 3)])
    (q, k, v), _ = padded(case)
    q = layout(q)
    pools = torch.stack((case.k_pool, case.v_pool), 1)
    tables = torch.stack((case.block_tables, case.block_tables), 2)[:, :, 0]
    y = gathered_attention(q, k, v, pools[:, 0], pools[:, 1], tables, case.past_lens, case.scale)
    expected = gathered_attention(
        q.contiguous(), k, v, case.k_pool, case.v_pool, case.block_tables, case.past_lens,
        case.scale,
    )  # fmt: skip
    assert_close(y, expected, f"{q.stride()=}")
