"""Latent attention in all its forms against the formula written out in float64."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from seekforge.kernels.gathered_mla_attention import gathered_mla_attention
from seekforge.kernels.mla_attention import (
    absorbed_attention,
    decompressed_attention,
    mla_attention,
)
from seekforge.kernels.paged_mla_attention import one_token_mla_attention, paged_mla_attention
from seekforge.kernels.tolerance import assert_close, normalised_error

SIZES = {"heads": 4, "nope": 8, "rope": 8, "v": 12, "rank": 16}
SHAPES = [
    (4, 8, 8, 8, 16), (3, 8, 4, 12, 16), (2, 5, 6, 20, 9), (6, 16, 8, 4, 40), (1, 8, 8, 12, 16),
]  # fmt: skip
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
MIX = CHUNKS["mix"]


def formula(
    q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, kv_b: Tensor, scale: float
) -> Tensor:
    """One whole sequence [seq, ...], head by head, in float64."""
    dtype = q_nope.dtype
    q_nope, q_rope, latent, k_rope, kv_b = (
        x.double() for x in (q_nope, q_rope, latent, k_rope, kv_b)
    )
    seq, heads, nope = q_nope.shape
    later = torch.ones(seq, seq, dtype=torch.bool, device=latent.device).triu(1)
    y = []
    for h, w in enumerate(kv_b.view(heads, -1, latent.shape[1])):
        k = torch.cat((latent @ w[:nope].T, k_rope), 1)
        scores = scale * torch.cat((q_nope[:, h], q_rope[:, h]), 1) @ k.T
        y.append(scores.masked_fill(later, -torch.inf).softmax(-1) @ (latent @ w[nope:].T))
    return torch.stack(y, 1).to(dtype)


def draw(
    tokens: int, heads: int, nope: int, rope: int, rank: int, random: torch.Generator
) -> list[Tensor]:
    shapes = [(tokens, heads, nope), (tokens, heads, rope), (tokens, rank), (tokens, rope)]
    return [torch.randn(shape, generator=random) for shape in shapes]


def make(
    chunks: list[tuple[int, int]], *, block_size: int = 4, dtype: torch.dtype = torch.float32,
    device: str = "cpu", stale: float = torch.nan, sizes: dict[str, int] = SIZES,
) -> SimpleNamespace:  # fmt: skip
    """Inputs of cached latent attention: sequence i has `past` tokens in the pool and `new` ones.

    Blocks are shuffled; slots of the pool without a token hold `stale`.
    """
    heads, nope, rope, v, rank = (sizes[name] for name in ("heads", "nope", "rope", "v", "rank"))
    random = torch.Generator().manual_seed(len(chunks) + block_size)
    counts = [-(-(past + new) // block_size) for past, new in chunks]
    order = torch.randperm(sum(counts) + 3, generator=random).tolist()
    kv_b = (0.5 * torch.randn(heads * (nope + v), rank, generator=random)).to(device, dtype)
    pool = torch.full((len(order), block_size, rank + rope), stale).to(device, dtype)
    case = SimpleNamespace(latent_pool=pool, kv_b=kv_b, scale=(nope + rope) ** -0.5)
    tables, slots, parts, expected = [], [], [], []
    for (past, new), count in zip(chunks, counts, strict=True):
        blocks, order = order[:count], order[count:]
        tables.append(blocks + [order[0]] * (max(counts) - count))  # behind it: a stale block
        at = torch.tensor(
            [blocks[i // block_size] * block_size + i % block_size for i in range(past + new)]
        ).to(device)
        rows = [x.to(device, dtype) for x in draw(past + new, heads, nope, rope, rank, random)]
        pool.flatten(0, 1)[at[:past]] = torch.cat(rows[2:], -1)[:past]
        expected.append(formula(*rows, kv_b, case.scale)[past:])
        parts.append([x[past:] for x in rows])
        slots.append(at[past:])
    case.expected = torch.cat(expected)
    case.q_nope, case.q_rope, case.latent, case.k_rope = map(torch.cat, zip(*parts, strict=True))
    case.slot_mapping = torch.cat(slots)
    index: dict[str, Any] = {"dtype": torch.long, "device": device}
    case.block_tables = torch.tensor(tables, **index)
    case.past_lens = torch.tensor([past for past, _ in chunks], **index)
    case.context_lens = torch.tensor([sum(chunk) for chunk in chunks], **index)
    case.query_start = torch.tensor([0, *(new for _, new in chunks)], **index).cumsum(0)
    case.paged = lambda c=case: (
        c.q_nope, c.q_rope, c.latent, c.k_rope, c.latent_pool, c.slot_mapping, c.block_tables,
        c.context_lens, c.query_start, c.kv_b, c.scale,
    )  # fmt: skip
    return case


def padded(case: SimpleNamespace, seq: int) -> tuple[Any, ...]:
    """The inputs of the padded form; rows shorter than seq are padded with ones."""
    starts = case.query_start.tolist()
    names = ("q_nope", "q_rope", "latent", "k_rope")
    parts = []
    for x in (getattr(case, name) for name in names):
        rows = x.new_ones(len(starts) - 1, seq, *x.shape[1:])
        for i, row in enumerate(rows):
            row[: starts[i + 1] - starts[i]] = x[starts[i] : starts[i + 1]]
        parts.append(rows)
    return (*parts, case.latent_pool, case.block_tables, case.past_lens, case.kv_b, case.scale)


@pytest.mark.parametrize(("heads", "nope", "rope", "v", "rank"), SHAPES)
def test_whole_sequences_in_both_orders(
    device: str, heads: int, nope: int, rope: int, v: int, rank: int
) -> None:
    """B20: v narrower and wider than q and k; each position on its own."""
    B, S = 2, 7
    random = torch.Generator().manual_seed(0)
    kv_b = 0.5 * torch.randn(heads * (nope + v), rank, generator=random).to(device)
    rows = [[x.to(device) for x in draw(S, heads, nope, rope, rank, random)] for _ in range(B)]
    batch = [torch.stack(x) for x in zip(*rows, strict=True)]
    expected = torch.stack([formula(*row, kv_b, 0.3) for row in rows])
    y = mla_attention(*batch, kv_b, 0.3, 0)
    assert y.is_contiguous()
    causal = torch.ones(1, S, S, dtype=torch.bool, device=device).tril()
    cache = torch.cat(batch[2:], -1)
    other = [form(*batch[:2], cache, kv_b, causal, 0.3)
             for form in (absorbed_attention, decompressed_attention)]  # fmt: skip
    for position in range(S):
        for result in (y, *other):
            assert_close(result[:, position], expected[:, position], f"{position=} {v=}")


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_paged(device: str, poisoned: None, chunks: list[tuple[int, int]], block_size: int) -> None:
    """Slots that no token of a sequence is in hold NaN."""
    case = make(chunks, block_size=block_size, device=device)
    y = paged_mla_attention(*case.paged())
    for row in range(y.shape[0]):
        assert_close(y[row], case.expected[row], f"{chunks=} {block_size=} {row=}")


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_gathered(device: str, chunks: list[tuple[int, int]], block_size: int) -> None:
    """Rows padded on the right to 17 tokens; the pool stays as it is."""
    case = make(chunks, block_size=block_size, device=device)
    pool = case.latent_pool.clone()
    y = gathered_mla_attention(*padded(case, 17))
    assert y.is_contiguous()
    assert torch.equal(case.latent_pool.nan_to_num(7), pool.nan_to_num(7))
    real = torch.cat([row[:new] for row, (_, new) in zip(y, chunks, strict=True)])
    for row in range(real.shape[0]):
        assert_close(real[row], case.expected[row], f"{chunks=} {block_size=} {row=}")


@pytest.mark.parametrize(("heads", "nope", "rope", "v", "rank"), SHAPES)
def test_head_shapes(device: str, heads: int, nope: int, rope: int, v: int, rank: int) -> None:
    sizes = {"heads": heads, "nope": nope, "rope": rope, "v": v, "rank": rank}
    case = make(MIX, device=device, sizes=sizes)
    y = gathered_mla_attention(*padded(case, 12))
    real = torch.cat([row[:new] for row, (_, new) in zip(y, MIX, strict=True)])
    assert_close(real, case.expected, f"gathered {sizes}")
    assert_close(paged_mla_attention(*case.paged()), case.expected, f"paged {sizes}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(device: str, dtype: torch.dtype) -> None:
    case = make(MIX, dtype=dtype, device=device)
    y = gathered_mla_attention(*padded(case, 12))
    real = torch.cat([row[:new] for row, (_, new) in zip(y, MIX, strict=True)])
    # Three roundings to half precision lie between (q, sum of latents, y); the table allows one.
    for x in (real, paged_mla_attention(*case.paged())):
        error = (x.double() - case.expected.double()).norm() / case.expected.double().norm()
        assert x.dtype == dtype and error < 1.5 * torch.finfo(dtype).eps, f"{dtype=} {error=}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_are_summed_in_fp32(device: str, dtype: torch.dtype) -> None:
    """Scores near 512 that differ by less than a bf16 step, and sums beyond fp16's 65,504."""
    for size in (1.0, 8.0):
        case = make([(300, 1)], dtype=dtype, device=device)
        case.q_rope[:] = size * 16
        case.k_rope[:] = size * 16
        case.latent_pool[..., -SIZES["rope"] :] = size * 16  # the same for all tokens
        case.scale = 0.25
        y = paged_mla_attention(*case.paged())
        for name in ("q_rope", "k_rope"):
            getattr(case, name).zero_()
        case.latent_pool[..., -SIZES["rope"] :] = 0
        error = normalised_error(y, paged_mla_attention(*case.paged()))
        assert error < 1e-5, f"{dtype=} {size=} {error=}"


def test_writes_new_tokens_and_nothing_else(device: str) -> None:
    case = make(MIX, device=device, stale=0.5)
    expected = case.latent_pool.clone()
    expected.flatten(0, 1)[case.slot_mapping] = torch.cat((case.latent, case.k_rope), -1)
    paged_mla_attention(*case.paged())
    assert torch.equal(case.latent_pool, expected)


def test_negative_slots_write_nothing(device: str) -> None:
    """Right-padding rows carry slot -1, which plain indexing takes for the last slot (B63)."""
    case = make(MIX, device=device, stale=0.5)
    real = paged_mla_attention(*case.paged())
    pool = case.latent_pool.clone()
    for name in ("q_nope", "q_rope", "latent", "k_rope"):
        rows = getattr(case, name)
        setattr(case, name, torch.cat((rows, torch.full_like(rows[:3], 1e9))))
    case.slot_mapping = torch.cat((case.slot_mapping, torch.full_like(case.slot_mapping[:3], -1)))
    case.query_start = torch.cat((case.query_start, case.query_start[-1:]))
    case.context_lens = torch.cat((case.context_lens, torch.zeros_like(case.context_lens[:1])))
    case.block_tables = torch.cat((case.block_tables, torch.zeros_like(case.block_tables[:1])))
    with_padding = paged_mla_attention(*case.paged())
    assert with_padding.shape[0] == real.shape[0] + 3
    assert torch.equal(with_padding[:-3], real)
    assert torch.equal(case.latent_pool, pool)
    case.slot_mapping = torch.full_like(case.slot_mapping, -1)
    paged_mla_attention(*case.paged())
    assert torch.equal(case.latent_pool, pool)


def test_later_tokens_do_not_change_earlier_ones(device: str) -> None:
    for at in (1, 5, 11):
        case = make([(5, 12), (3, 1)], device=device)
        before = paged_mla_attention(*case.paged())
        case.latent[at] += 3
        case.k_rope[at] -= 3
        after = paged_mla_attention(*case.paged())
        assert torch.equal(after[:at], before[:at]), f"{at=}"
        assert not torch.equal(after[at:12], before[at:12]), f"{at=}"
        assert torch.equal(after[12:], before[12:]), f"{at=}"  # another sequence


def test_chunks_equal_the_whole_prefill(device: str) -> None:
    """0 + 12 tokens at once, and as 5, 1, 3, 3: both orders in one sequence (B54)."""
    case = make([(0, 12)], device=device)
    y, start = [], 0
    for count in (5, 1, 3, 3):
        rows = slice(start, start + count)
        start += count
        lens = torch.tensor([start], device=device)
        y.append(
            paged_mla_attention(
                case.q_nope[rows], case.q_rope[rows], case.latent[rows], case.k_rope[rows],
                case.latent_pool, case.slot_mapping[rows], case.block_tables, lens,
                torch.tensor([0, count], device=device), case.kv_b, case.scale,
            )
        )  # fmt: skip
    assert_close(torch.cat(y), case.expected, "chunks")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("past", [0, 3, 4, 17])
def test_one_token_form(device: str, past: int, dtype: torch.dtype) -> None:
    """The form for compilers: same result, same writes; slots behind the context are not seen."""
    case, other = (make([(past, 1)], device=device, dtype=dtype) for _ in range(2))
    filler = case.block_tables[:, :1] * 0 + case.latent_pool.shape[0] - 1
    case.block_tables = torch.cat((case.block_tables, filler), 1)  # of a longer sequence's engine
    y, right = one_token_mla_attention(*case.paged()), paged_mla_attention(*other.paged())
    assert_close(y, right, f"{past=} {dtype=}")
    assert torch.equal(case.latent_pool.nan_to_num(7), other.latent_pool.nan_to_num(7))


def test_reads_any_strides(device: str, layout: Callable[[Tensor], Tensor]) -> None:
    """B47: q laid out otherwise, latent and k_rope as parts of one projection."""
    case, other = (make(MIX, device=device) for _ in range(2))
    case.q_nope, case.q_rope = layout(case.q_nope), layout(case.q_rope)
    other.q_nope, other.q_rope = case.q_nope.contiguous(), case.q_rope.contiguous()
    both = torch.cat((case.latent, case.k_rope), -1)
    case.latent, case.k_rope = both.split([SIZES["rank"], SIZES["rope"]], -1)
    case.slot_mapping = torch.stack((case.slot_mapping, case.slot_mapping), 1)[:, 0]
    y = paged_mla_attention(*case.paged())
    assert_close(y, paged_mla_attention(*other.paged()), f"{case.q_nope.stride()=}")


def test_pool_with_gaps_is_refused_or_written(device: str) -> None:
    """Two layers' pools interleaved in one tensor: a copy would lose the writes silently (B47)."""
    case = make([(5, 3)], device=device, stale=0.5)
    both = torch.stack((case.latent_pool, case.latent_pool), 1)
    case.latent_pool = both[:, 0]
    before = both.clone()
    try:
        y = paged_mla_attention(*case.paged())
    except RuntimeError as error:
        assert "view" in str(error)
        assert torch.equal(both, before)
    else:
        assert_close(y, case.expected, "interleaved pools")


def test_fakes_agree_with_the_operators(device: str) -> None:
    case = make(MIX, device=device, stale=0.5)
    checks = ("test_schema", "test_faketensor")
    batch = [x[None] for x in (case.q_nope, case.q_rope, case.latent, case.k_rope)]
    for op, args in (
        (mla_attention, (*batch, case.kv_b, case.scale, 0)),
        (paged_mla_attention, case.paged()),
        (gathered_mla_attention, padded(case, 12)),
    ):
        torch.library.opcheck(op, args, test_utils=checks)
