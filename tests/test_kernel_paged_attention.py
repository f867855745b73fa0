"""Paged attention against plain attention over each whole sequence, and what it may write."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from seekforge.kernels.attention import attention
from seekforge.kernels.paged_attention import one_token_attention, paged_attention
from seekforge.kernels.tolerance import assert_close

Make = Callable[..., SimpleNamespace]

CHUNKS = {  # (tokens in the cache, new tokens) of each sequence
    "one prefill": [(0, 12)],
    "one decode": [(5, 1)],
    "first token": [(0, 1)],
    "one chunk": [(5, 3)],
    "prefills": [(0, 12), (0, 3), (0, 16)],
    "decodes of one length": [(7, 1), (7, 1)],
    "decodes": [(0, 1), (3, 1), (15, 1), (16, 1), (31, 1)],
    "mix": [(0, 12), (5, 1), (5, 3), (30, 1), (4, 4), (17, 1)],
}


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_equals_plain_attention(
    cached_sequences: Make, device: str, poisoned: None,
    chunks: list[tuple[int, int]], block_size: int,
) -> None:  # fmt: skip
    case = cached_sequences(chunks, block_size=block_size, device=device)
    assert_close(paged_attention(*case.paged()), case.expected, f"{chunks=} {block_size=}")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "qk_dim", "v_dim"),
    [(4, 4, 8, 8), (4, 1, 16, 16), (6, 2, 16, 12), (4, 2, 16, 20)],
)
def test_head_shapes(
    cached_sequences: Make, device: str, heads: int, kv_heads: int, qk_dim: int, v_dim: int
) -> None:
    """Grouped queries, and v narrower and wider than q and k (B20)."""
    case = cached_sequences(
        CHUNKS["mix"], heads=heads, kv_heads=kv_heads, qk_dim=qk_dim, v_dim=v_dim, device=device
    )
    y = paged_attention(*case.paged())
    assert_close(y, case.expected, f"{heads=} {kv_heads=} {qk_dim=} {v_dim=}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(cached_sequences: Make, device: str, dtype: torch.dtype) -> None:
    case = cached_sequences(CHUNKS["mix"], dtype=dtype, device=device)
    assert_close(paged_attention(*case.paged()), case.expected, f"{dtype=}")


def test_writes_new_tokens_and_nothing_else(cached_sequences: Make, device: str) -> None:
    case = cached_sequences(CHUNKS["mix"], device=device)
    expected = [case.k_pool.clone(), case.v_pool.clone()]
    for pool, new in zip(expected, (case.k, case.v), strict=True):
        pool.flatten(0, 1)[case.slot_mapping] = new
    paged_attention(*case.paged())
    assert torch.equal(case.k_pool, expected[0])
    assert torch.equal(case.v_pool, expected[1])


def leave_stale(case: SimpleNamespace, value: float) -> None:
    """Fills the slots of the pools that hold no token of a sequence."""
    size = case.k_pool.shape[1]
    live = torch.zeros(case.k_pool.shape[:2], dtype=torch.bool, device=case.k_pool.device)
    for table, length in zip(case.block_tables, case.context_lens.tolist(), strict=True):
        at = torch.arange(length, device=table.device)
        live[table[at // size], at % size] = True
    for pool in (case.k_pool, case.v_pool):
        pool[~live] = value


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["decodes", "mix", "one decode"])
def test_stale_slots_are_not_seen(
    cached_sequences: Make, device: str, name: str, value: float
) -> None:
    """A weight of 0 times what an earlier sequence left in a block must be 0."""
    case = cached_sequences(CHUNKS[name], device=device)
    leave_stale(case, value)
    if name == "one decode":
        case.block_tables = torch.cat((case.block_tables, case.block_tables * 0 + 1), 1)
        leave_stale(case, value)
        assert_close(one_token_attention(*case.paged()), case.expected, f"{value=}")
    assert_close(paged_attention(*case.paged()), case.expected, f"{name=} {value=}")


def test_negative_slots_write_nothing(cached_sequences: Make, device: str) -> None:
    """Right-padding rows carry slot -1, which plain indexing takes for the last slot (B63)."""
    case = cached_sequences(CHUNKS["mix"], device=device)
    real = paged_attention(*case.paged())
    pools = case.k_pool.clone(), case.v_pool.clone()
    for name in ("q", "k", "v"):
        rows = getattr(case, name)
        setattr(case, name, torch.cat((rows, torch.full_like(rows[:3], 1e9))))
    case.slot_mapping = torch.cat((case.slot_mapping, torch.full_like(case.slot_mapping[:3], -1)))
    # Sequences of padding: no rows of their own, or rows behind the real ones.
    case.query_start = torch.cat((case.query_start, case.query_start[-1:]))
    case.context_lens = torch.cat((case.context_lens, torch.zeros_like(case.context_lens[:1])))
    case.block_tables = torch.cat((case.block_tables, torch.zeros_like(case.block_tables[:1])))
    padded = paged_attention(*case.paged())
    assert padded.shape[0] == real.shape[0] + 3
    assert torch.equal(padded[:-3], real)
    assert torch.equal(case.k_pool, pools[0])
    assert torch.equal(case.v_pool, pools[1])


def test_only_negative_slots(cached_sequences: Make) -> None:
    case = cached_sequences([(5, 3)])
    pools = case.k_pool.clone(), case.v_pool.clone()
    case.slot_mapping = torch.full_like(case.slot_mapping, -1)
    paged_attention(*case.paged())
    assert torch.equal(case.k_pool, pools[0])
    assert torch.equal(case.v_pool, pools[1])


def test_later_tokens_do_not_change_earlier_ones(cached_sequences: Make, device: str) -> None:
    for at in (1, 5, 11):
        case = cached_sequences([(5, 12), (3, 1)], device=device)
        before = paged_attention(*case.paged())
        case.k[at] += 3
        case.v[at] -= 3
        after = paged_attention(*case.paged())
        assert torch.equal(after[:at], before[:at]), f"{at=}"
        assert not torch.equal(after[at:12], before[at:12]), f"{at=}"
        assert torch.equal(after[12:], before[12:]), f"{at=}"  # another sequence


def test_chunks_equal_the_whole_prefill(cached_sequences: Make) -> None:
    """0 + 12 tokens at once, and as 5, 1, 3, 3 (B54: bottom-right aligned)."""
    case = cached_sequences([(0, 12)])
    y, start = [], 0
    for count in (5, 1, 3, 3):
        rows = slice(start, start + count)
        start += count
        lens = torch.tensor([start])
        y.append(
            paged_attention(
                case.q[rows], case.k[rows], case.v[rows], case.k_pool, case.v_pool,
                case.slot_mapping[rows], case.block_tables, lens, torch.tensor([0, count]),
                case.scale,
            )
        )  # fmt: skip
    assert_close(torch.cat(y), case.expected, "chunks")


@pytest.mark.parametrize("past", [0, 3, 4, 17])
def test_one_token_form(cached_sequences: Make, device: str, past: int) -> None:
    """The form for compilers: same result, same writes; slots behind the context are not seen."""
    case, other = (cached_sequences([(past, 1)], device=device, v_dim=12) for _ in range(2))
    filler = torch.full_like(case.block_tables, 2)  # the table of a longer sequence's engine
    case.block_tables = torch.cat((case.block_tables, filler), 1)
    assert_close(one_token_attention(*case.paged()), case.expected, f"{past=}")
    paged_attention(*other.paged())
    assert torch.equal(case.k_pool, other.k_pool)
    assert torch.equal(case.v_pool, other.v_pool)


def test_reads_any_strides(
    cached_sequences: Make, device: str, layout: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """B47: q, k, v as parts of one projection or laid out otherwise, a row of a wider table."""
    case, other = (cached_sequences(CHUNKS["mix"], device=device) for _ in range(2))
    case.q = layout(case.q)
    other.q = case.q.contiguous()
    case.k, case.v = torch.cat((case.k, case.v), -1).split(8, -1)
    width = case.block_tables.shape[1]
    case.block_tables = torch.cat((case.block_tables, case.block_tables), 1)[:, :width]
    case.slot_mapping = torch.stack((case.slot_mapping, case.slot_mapping), 1)[:, 0]
    y = paged_attention(*case.paged())
    assert_close(y, paged_attention(*other.paged()), f"{case.q.stride()=}")
    assert torch.equal(case.k_pool, other.k_pool)


def test_pool_with_gaps_is_refused_or_written(cached_sequences: Make) -> None:
    """K and V interleaved in one tensor: a copy would lose the writes silently (B47)."""
    case = cached_sequences([(5, 3)])
    both = torch.stack((case.k_pool, case.v_pool), 1)
    case.k_pool, case.v_pool = both[:, 0], both[:, 1]
    before = both.clone()
    try:
        y = paged_attention(*case.paged())
    except RuntimeError as error:
        assert "view" in str(error)
        assert torch.equal(both, before)
    else:
        assert_close(y, case.expected, "interleaved pools")


def test_export_node_is_plain_causal_attention() -> None:
    """`seekforge::attention` against scores written out, grouped queries, v wider than q."""
    B, S, H, K, D, V = 2, 7, 6, 2, 8, 12
    q, k, v = (torch.randn(B, S, h, d) for h, d in ((H, D), (K, D), (K, V)))
    grouped = [x.repeat_interleave(H // K, 2) for x in (k, v)]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, grouped[0]) * 0.3
    scores = scores.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -torch.inf)
    expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), grouped[1])
    assert_close(attention(q, k, v, 0.3, 0), expected, "attention")
