"""One operator for norm, rotation, write and latent attention: equal to the operators it is of."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from test_kernel_mla_attention import make
from torch import Tensor

from seekforge.kernels import mla_heads, paged_mla_decode
from seekforge.kernels.paged_mla_attention import paged_mla_attention_reference
from seekforge.kernels.rms_norm import rms_norm_reference
from seekforge.kernels.rope import rope_reference
from seekforge.kernels.rope_paged_mla_attention import (
    rope_paged_mla_attention,
    rope_paged_mla_attention_reference,
    rope_paged_mla_attention_triton,
)
from seekforge.kernels.tolerance import assert_close
from seekforge.kernels.tuning import Config

CHUNKS = {  # (tokens in the cache, new tokens) of each sequence
    "one decode": [(40, 1)],
    "first token": [(0, 1)],
    "decodes": [(0, 1), (70, 1), (16, 1)],
    "nine": [(5, 3), (30, 1), (0, 5)],
    "forty": [(17, 1), (3, 39)],
}
SIZES = [
    {"heads": 4, "nope": 8, "rope": 8, "v": 12, "rank": 16},
    {"heads": 16, "nope": 16, "rope": 12, "v": 20, "rank": 40},
]
SOME = SIZES[0]


def arguments(case: SimpleNamespace, interleaved: bool = True) -> list[object]:
    """The case's latents, queries and keys taken as not normalised and not rotated, all of them
    slices of one projection."""
    q_nope, q_rope, latent, k_rope, *rest = case.paged()
    (tokens, heads, nope), (rank, rope) = q_nope.shape, (latent.shape[1], k_rope.shape[1])
    q = torch.cat((q_nope, q_rope), -1)
    fused = torch.cat((q.flatten(1), latent, k_rope), 1)
    q, latent, k_rope = fused.split((heads * (nope + rope), rank, rope), 1)
    q_nope, q_rope = q.view(tokens, heads, -1).split((nope, rope), -1)
    weight = torch.linspace(0.5, 1.5, rank).to(latent)
    angles = torch.arange(200)[:, None] * 1e4 ** (-torch.arange(0, rope, 2) / rope)
    spans = zip(case.past_lens, case.context_lens, strict=True)
    positions = torch.cat([torch.arange(past, end) for past, end in spans])
    tables = [x.to(latent.device) for x in (angles.cos(), angles.sin(), positions)]
    return [q_nope, q_rope, latent, k_rope, weight, 1e-5, *tables, interleaved, *rest]


def with_pool(given: list[object], dtype: torch.dtype | None = None) -> list[object]:
    """A copy of the pool; all but the tables in another dtype."""
    assert isinstance(given[10], Tensor)
    given = [*given[:10], given[10].clone(), *given[11:]]
    if dtype is not None:
        given = [
            x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in given
        ]
    return given


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_three_operators(device: str, sizes: dict[str, int], interleaved: bool) -> None:
    given = arguments(make(CHUNKS["nine"], sizes=sizes, device=device), interleaved)
    q_nope, q_rope, latent, k_rope, weight, eps, cos, sin, positions, _, pool, *rest = given
    other = pool.clone()  # type: ignore[attr-defined]
    latent = rms_norm_reference(latent, weight, eps)  # type: ignore[arg-type]
    rows = (q_rope[None], k_rope[None, :, None])  # type: ignore[index]
    q, k = rope_reference(*rows, cos, sin, positions[None], interleaved)  # type: ignore
    args = (q_nope, q[0], latent, k[0, :, 0], other, *rest)
    expected = paged_mla_attention_reference(*args)  # type: ignore[arg-type]
    y = rope_paged_mla_attention_reference(*given)  # type: ignore[arg-type]
    assert torch.equal(y, expected)
    assert torch.equal(pool.nan_to_num(7), other.nan_to_num(7))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("splits", "most", "dtype"),
    [
        (1, 0, torch.bfloat16), (3, 0, torch.float32), (3, 0, torch.float16),
        (3, 1 << 30, torch.float32), (3, 1 << 30, torch.bfloat16),
    ],
)  # fmt: skip
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_kernels(
    kernel_device: str, poisoned: None, monkeypatch: pytest.MonkeyPatch,
    chunks: list[tuple[int, int]], splits: int, most: int, dtype: torch.dtype,
) -> None:  # fmt: skip
    """Slots without a token hold NaN. In half precision judged by fp32 as the reference is: it
    rounds elsewhere."""
    monkeypatch.setattr(
        paged_mla_decode, "mla_config", lambda *_, **__: Config(16, 16, splits, 4, 2)
    )
    monkeypatch.setattr(mla_heads, "MERGED_BYTES", most)
    for sizes in SIZES if chunks is not CHUNKS["forty"] else SIZES[:1]:
        case = make(chunks, block_size=16, sizes=sizes, dtype=dtype, device=kernel_device)
        given = arguments(case)
        right, wide = with_pool(given), with_pool(given, torch.float32)
        expected = rope_paged_mla_attention_reference(*right)  # type: ignore[arg-type]
        exact = rope_paged_mla_attention_reference(*wide)  # type: ignore[arg-type]
        y = rope_paged_mla_attention_triton(*given)  # type: ignore[arg-type]
        what = f"{chunks=} {splits=} {most=} {dtype} {sizes}"
        if dtype == torch.float32:
            assert_close(y, expected, what)
        error, allowed = ((x.float() - exact).norm() for x in (y, expected))
        assert error <= 1.3 * allowed + 2e-3 * exact.norm(), f"{what} {error=} {allowed=}"
        pool, other = given[10], right[10]
        assert_close(pool, other, what)  # type: ignore[arg-type]


def test_padded_rows_and_wide_tables(kernel_device: str) -> None:
    """Rows of no sequence, slot -1, an empty context; tables wider than any context."""
    case = make([(20, 1), (3, 1)], block_size=16, sizes=SOME, device=kernel_device, stale=0.5)
    alone = with_pool(arguments(case))
    expected = rope_paged_mla_attention_triton(*alone)  # type: ignore[arg-type]
    for name in ("q_nope", "q_rope", "latent", "k_rope"):
        rows = getattr(case, name)
        setattr(case, name, torch.cat((rows, torch.full_like(rows[:2], 1e9))))
    case.slot_mapping = torch.cat((case.slot_mapping, torch.full_like(case.slot_mapping, -1)))
    case.query_start = torch.cat((case.query_start, case.query_start[-1] + torch.tensor(
        [1, 2], device=kernel_device)))  # fmt: skip
    case.context_lens = torch.cat((case.context_lens, torch.ones_like(case.context_lens)))
    case.past_lens = torch.cat((case.past_lens, torch.zeros_like(case.past_lens)))
    case.block_tables = torch.cat((case.block_tables, torch.zeros_like(case.block_tables)))
    case.block_tables = torch.cat((case.block_tables, torch.zeros_like(case.block_tables)), 1)
    given = arguments(case)
    y = rope_paged_mla_attention_triton(*given)  # type: ignore[arg-type]
    assert y.shape[0] == 4
    assert_close(y[:2], expected, "rows beside padded ones")
    assert torch.equal(given[10], alone[10])  # type: ignore[arg-type]


def test_no_tokens() -> None:
    case = make([(3, 1)], sizes=SOME)
    given = arguments(case)
    for i in (0, 1, 2, 3, 8, 11, 12, 13):
        given[i] = given[i][:0]  # type: ignore[index]
    given[14] = torch.zeros(1, dtype=torch.long)
    y = rope_paged_mla_attention_triton(*given)  # type: ignore[arg-type]
    assert y.shape == (0, 4, 12)


def test_fake_agrees_with_the_operator(device: str) -> None:
    case = make(CHUNKS["nine"], sizes=SOME, device=device, stale=0.5)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(rope_paged_mla_attention, tuple(arguments(case)), test_utils=checks)
