"""The paged attention kernels against plain attention over each whole sequence."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from seekforge.kernels import paged_decode, paged_mla_decode, paged_prefill, tuning
from seekforge.kernels.paged_attention import paged_attention_reference, paged_attention_triton
from seekforge.kernels.paged_mla_attention import paged_mla_attention_reference
from seekforge.kernels.paged_mla_decode import paged_mla_attention_triton
from seekforge.kernels.tolerance import assert_close
from seekforge.kernels.tuning import Config

Make = Callable[..., SimpleNamespace]
Patch = pytest.MonkeyPatch

CHUNKS = {  # (tokens in the cache, new tokens) of each sequence
    "one prefill": [(0, 12)],
    "one chunk": [(37, 9)],
    "one decode": [(5, 1)],
    "first token": [(0, 1)],
    "decodes": [(0, 1), (3, 1), (15, 1), (16, 1), (131, 1)],
    "mix": [(0, 12), (5, 1), (5, 3), (70, 1), (4, 24), (17, 1)],
}


@pytest.mark.parametrize("block_size", [4, 16, 64])
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_equals_plain_attention(
    cached_sequences: Make, kernel_device: str, poisoned: None,
    chunks: list[tuple[int, int]], block_size: int,
) -> None:  # fmt: skip
    case = cached_sequences(chunks, block_size=block_size, device=kernel_device)
    pools = [case.k_pool.clone(), case.v_pool.clone()]
    for pool, new in zip(pools, (case.k, case.v), strict=True):
        pool.flatten(0, 1)[case.slot_mapping] = new
    y = paged_attention_triton(*case.paged())
    assert_close(y, case.expected, f"{chunks=} {block_size=}")
    assert torch.equal(case.k_pool, pools[0]) and torch.equal(case.v_pool, pools[1])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "qk_dim", "v_dim", "dtype"),
    [
        (4, 4, 8, 8, torch.float32),
        (14, 2, 64, 64, torch.bfloat16),  # groups of 7
        (4, 1, 128, 128, torch.bfloat16),
        (2, 1, 96, 96, torch.float16),
        (6, 2, 24, 20, torch.float16),
        (17, 1, 16, 40, torch.float32),
    ],
)
def test_head_shapes(
    cached_sequences: Make, kernel_device: str, poisoned: None,
    heads: int, kv_heads: int, qk_dim: int, v_dim: int, dtype: torch.dtype,
) -> None:  # fmt: skip
    shape = {"heads": heads, "kv_heads": kv_heads, "qk_dim": qk_dim, "v_dim": v_dim}
    case = cached_sequences(
        [(0, 11), (40, 1), (9, 3), (65, 1)], **shape, dtype=dtype, block_size=16,
        device=kernel_device,
    )  # fmt: skip
    assert_close(paged_attention_triton(*case.paged()), case.expected, f"{shape} {dtype}")


@pytest.mark.parametrize("splits", [1, 3, 7])
def test_splits_of_the_context(
    cached_sequences: Make, kernel_device: str, poisoned: None, monkeypatch: Patch, splits: int
) -> None:
    """Parts of one, some and no tokens; a second call finds its counters cleared."""
    monkeypatch.setattr(
        paged_decode, "decode_config", lambda *_, **__: Config(16, 16, splits, 4, 2)
    )
    case = cached_sequences([(0, 1), (15, 1), (16, 1), (70, 1)], device=kernel_device)
    for _ in range(2):
        assert_close(paged_attention_triton(*case.paged()), case.expected, f"{splits=}")


@pytest.mark.parametrize(("block_m", "block_n"), [(16, 16), (32, 64), (64, 32)])
def test_prefill_tiles(
    cached_sequences: Make, kernel_device: str, poisoned: None, monkeypatch: Patch,
    block_m: int, block_n: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(
        paged_prefill, "prefill_config", lambda *_, **__: Config(block_m, block_n, 1, 4, 2)
    )
    case = cached_sequences(
        [(0, 25), (33, 7), (2, 2)], heads=7, kv_heads=1, block_size=16, device=kernel_device
    )
    y = paged_attention_triton(*case.paged())
    assert_close(y, case.expected, f"{block_m=} {block_n=}")


def test_prefill_by_bulk_copies(
    cached_sequences: Make, kernel_device: str, poisoned: None, monkeypatch: Patch
) -> None:
    """The path of Hopper, whose descriptors the interpreter knows too."""
    seen = []
    make = paged_prefill.pool_tiles
    monkeypatch.setattr(paged_prefill, "overlaps_launches", lambda _: True)
    monkeypatch.setattr(
        paged_prefill, "pool_tiles", lambda *given: seen.append(make(*given)) or seen[-1]
    )
    case = cached_sequences(
        [(0, 70), (130, 17), (64, 2), (3, 1)], qk_dim=32, v_dim=16, block_size=128,
        dtype=torch.float16, device=kernel_device,
    )  # fmt: skip
    y = paged_attention_triton(*case.paged())
    assert len(seen) == 2 and None not in seen
    assert_close(y, case.expected, "bulk copies")


def test_no_more_tokens_than_sequences_but_not_one_each(
    cached_sequences: Make, kernel_device: str, poisoned: None
) -> None:
    """A chunk beside sequences of padding: each row finds its own sequence."""
    case = cached_sequences([(5, 3), (9, 1)], device=kernel_device)
    ends = case.query_start.tolist()
    case.query_start = case.query_start.new_tensor([0, *ends, *ends[-1:] * 3])
    none = torch.zeros_like(case.context_lens[:1])
    case.context_lens = torch.cat((none, case.context_lens, *[none] * 3))
    empty = torch.zeros_like(case.block_tables[:1])
    case.block_tables = torch.cat((empty, case.block_tables, *[empty] * 3))
    for name in ("q", "k", "v", "slot_mapping"):  # and one row of no sequence
        rows = getattr(case, name)
        setattr(case, name, torch.cat((rows, torch.full_like(rows[:1], -1))))
    pools = case.k_pool.clone(), case.v_pool.clone()
    y = paged_attention_triton(*case.paged())
    assert_close(y[:4], case.expected, "rows of padded sequences")
    paged_attention_reference(*case.paged()[:3], *pools, *case.paged()[5:])
    assert torch.equal(case.k_pool, pools[0]) and torch.equal(case.v_pool, pools[1])


def test_slots_behind_the_context_may_hold_nan(
    cached_sequences: Make, kernel_device: str, poisoned: None
) -> None:
    case = cached_sequences([(5, 3), (21, 1)], block_size=16, device=kernel_device)
    used = torch.zeros(case.k_pool.shape[:2], dtype=torch.bool, device=kernel_device)
    for table, length in zip(case.block_tables, case.context_lens.tolist(), strict=True):
        for t in range(length):
            used[table[t // 16], t % 16] = True
    case.k_pool[~used] = case.v_pool[~used] = torch.nan
    assert_close(paged_attention_triton(*case.paged()), case.expected, "NaN behind the context")


def test_reads_any_strides(
    cached_sequences: Make,
    kernel_device: str,
    layout: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """q in any layout; k and v parts of one projection; both pools in one tensor; a wide table."""
    case, other = (cached_sequences(CHUNKS["mix"], device=kernel_device) for _ in range(2))
    case.q = layout(case.q)
    other.q = case.q.contiguous()
    case.k, case.v = torch.cat((case.k, case.v), -1).split(8, -1)
    both = torch.stack((case.k_pool, case.v_pool), 1)
    case.k_pool, case.v_pool = both[:, 0], both[:, 1]
    width = case.block_tables.shape[1]
    case.block_tables = torch.cat((case.block_tables, case.block_tables), 1)[:, :width]
    case.slot_mapping = torch.stack((case.slot_mapping, case.slot_mapping), 1)[:, 0]
    expected = paged_attention_reference(*other.paged())
    assert_close(paged_attention_triton(*case.paged()), expected, f"{case.q.stride()=}")
    assert torch.equal(case.k_pool, other.k_pool) and torch.equal(case.v_pool, other.v_pool)


def latent_case(
    make: Make, chunks: list[tuple[int, int]], device: str, heads: int, rank: int, rope: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Arguments of paged_mla_attention; nope and v_dim are 12 and 20."""
    case = make(
        chunks, heads=heads, kv_heads=1, qk_dim=rank + rope, block_size=16, dtype=dtype,
        device=device,
    )  # fmt: skip
    random = torch.Generator().manual_seed(heads)
    q_nope = torch.randn(len(case.q), heads, 12, generator=random).to(device, dtype)
    kv_b = torch.randn(heads * 32, rank, generator=random).to(device, dtype) * rank**-0.5
    latent, k_rope = case.k[:, 0].split((rank, rope), -1)
    return (
        q_nope, case.q[..., rank:], latent, k_rope, case.k_pool[:, :, 0], case.slot_mapping,
        case.block_tables, case.context_lens, case.query_start, kv_b, 0.2,
    )  # fmt: skip


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("chunks", "heads", "rank", "rope"),
    [
        ([(40, 1), (3, 1), (0, 1), (130, 1)], 16, 32, 8),
        ([(0, 12), (5, 1), (35, 3)], 6, 16, 16),
        ([(60, 1), (0, 7)], 40, 48, 24),
    ],
)
def test_latent_attention(
    cached_sequences: Make, kernel_device: str, poisoned: None, monkeypatch: Patch,
    chunks: list[tuple[int, int]], heads: int, rank: int, rope: int, splits: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(
        paged_mla_decode, "mla_config", lambda *_, **__: Config(16, 16, splits, 4, 2)
    )
    given = latent_case(cached_sequences, chunks, kernel_device, heads, rank, rope)
    pool = given[4].clone()
    expected = paged_mla_attention_reference(*given[:4], pool, *given[5:])
    y = paged_mla_attention_triton(*given)
    assert_close(y, expected, f"{chunks=} {heads=} {rank=} {rope=} {splits=}")
    assert torch.equal(given[4], pool)


@pytest.mark.parametrize("heads", [16, 128])
def test_latent_attention_of_deepseek(
    cached_sequences: Make, kernel_device: str, poisoned: None, heads: int
) -> None:
    """Rank 512 + 64, bf16: judged by fp32 as the reference in bf16 is (it rounds elsewhere)."""
    given = latent_case(
        cached_sequences, [(20, 1), (0, 2)], kernel_device, heads, 512, 64, torch.bfloat16
    )
    wide = [x.float() if x.is_floating_point() else x for x in given[:-1]]
    exact = paged_mla_attention_reference(*wide, given[-1])
    plain = paged_mla_attention_reference(*given[:4], given[4].clone(), *given[5:])
    y = paged_mla_attention_triton(*given)
    error, allowed = ((x.float() - exact).norm() for x in (y, plain))
    assert error <= 1.3 * allowed + 1e-3 * exact.norm(), f"{heads=} {error=} {allowed=}"


@pytest.mark.parametrize("tiles", [1, 8, 128, 256, 5000])
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "int8", "fp8", "float32"])
def test_configurations_fill_the_gpu(kind: str, tiles: int) -> None:
    """No split is empty by construction, and a batch that fills the GPU is not split."""
    for context in (16, 4096, 131072):
        config = tuning.decode_config(
            kind, tiles=tiles, context=context, block_size=16, dim=128, processors=132
        )
        assert 1 <= config.splits <= max(1, -(-context // config.block_n))
        assert tiles < 264 or config.splits == 1, f"{context=} {config}"
        assert context < 131072 or tiles * config.splits >= 66, f"{context=} {config}"
