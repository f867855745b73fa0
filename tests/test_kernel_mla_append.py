"""Norm, rotations, cache write and W_UK in one launch, against the operators one by one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from seekforge.kernels import mla_append
from seekforge.kernels.mla_append import mla_append_reference, mla_append_triton
from seekforge.kernels.tolerance import assert_close

BLOCKS, MAX_LEN = 14, 60
SHAPES = [  # heads, nope, rope, v, rank
    (4, 8, 8, 12, 16), (16, 16, 8, 4, 32), (5, 12, 12, 20, 48), (1, 6, 10, 8, 9),
]  # fmt: skip


def draw(
    tokens: int, heads: int, nope: int, rope: int, v: int, rank: int, *, device: str,
    dtype: torch.dtype = torch.bfloat16, block_size: int = 4,
) -> SimpleNamespace:  # fmt: skip
    """One fused projection, of which queries, latent and key are slices; a pool with gaps."""
    random = torch.Generator().manual_seed(heads + tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(dtype).to(device)

    fused = normal(tokens, heads * (nope + rope) + rank + rope)
    q, latent, k_rope = fused.split((heads * (nope + rope), rank, rope), 1)
    q_nope, q_rope = q.unflatten(1, (heads, nope + rope)).split((nope, rope), 2)
    angles = torch.arange(MAX_LEN)[:, None] * 1e4 ** (-torch.arange(0, rope, 2) / rope)
    slots = torch.randperm(BLOCKS * block_size, generator=random)[:tokens]
    slots[2:3] = -1
    return SimpleNamespace(
        q_nope=q_nope, q_rope=q_rope, latent=latent, k_rope=k_rope,
        weight=1 + 0.1 * normal(rank), eps=1e-5, cos=angles.cos().to(device),
        sin=angles.sin().to(device),
        positions=torch.randint(MAX_LEN, (tokens,), generator=random).to(device),
        interleaved=True, pool=normal(BLOCKS, 2, block_size, rank + rope)[:, 0],
        slots=slots.to(device), kv_b=normal(heads, nope + v, rank) * nope**-0.5,
    )  # fmt: skip


def compare(case: SimpleNamespace, what: str) -> None:
    ours, right = case.pool.expand(2, *case.pool.shape).clone()
    given: list[Any] = list(vars(case).values())
    q_latent, turned = mla_append_triton(*given[:10], ours, *given[11:])
    expected = mla_append_reference(*given[:10], right, *given[11:])
    assert torch.equal(turned, expected[1]) and turned.is_contiguous(), what
    assert_close(q_latent, expected[0], what)
    rank = case.latent.shape[1]
    assert torch.equal(ours[..., rank:], right[..., rank:]), what
    written = torch.zeros(ours.shape[:2], dtype=torch.bool, device=ours.device)
    written.view(-1)[case.slots[case.slots >= 0]] = True
    assert torch.equal(ours[~written], case.pool[~written]), what
    assert_close(ours[written], right[written], what)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 9, 40])
@pytest.mark.parametrize(("heads", "nope", "rope", "v", "rank"), SHAPES)
def test_kernel(
    kernel_device: str, poisoned: None, heads: int, nope: int, rope: int, v: int, rank: int,
    tokens: int, interleaved: bool,
) -> None:  # fmt: skip
    case = draw(tokens, heads, nope, rope, v, rank, device=kernel_device)
    case.interleaved = interleaved
    before = [x.clone() for x in vars(case).values() if isinstance(x, Tensor)]
    compare(case, f"{tokens=} {heads=} {nope=} {rope=} {rank=} {interleaved=}")
    left = [x for x in vars(case).values() if isinstance(x, Tensor)]
    assert all(map(torch.equal, left, before))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("values", [8, 16, 4096])
def test_dtypes_and_groups_of_heads(
    kernel_device: str, poisoned: None, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype,
    tokens: int, values: int,
) -> None:  # fmt: skip
    """One, two and all heads of a token in a program; columns of one head in several."""
    monkeypatch.setattr(mla_append, "VALUES", values)
    monkeypatch.setattr(mla_append, "columns", lambda k, n: 16)
    case = draw(tokens, 7, 8, 8, 12, 40, device=kernel_device, dtype=dtype, block_size=16)
    compare(case, f"{dtype} {tokens=} {values=}")


def test_deepseek(kernel_device: str, poisoned: None) -> None:
    compare(draw(2, 16, 128, 64, 128, 512, device=kernel_device, block_size=16), "V2-Lite")


def test_negative_slots_write_nothing(kernel_device: str) -> None:
    case = draw(3, 4, 8, 8, 12, 16, device=kernel_device)
    case.slots.fill_(-1)
    compare(case, "no slot")


def test_no_tokens(kernel_device: str) -> None:
    case = draw(0, 4, 8, 8, 12, 16, device=kernel_device)
    q_latent, turned = mla_append_triton(*vars(case).values())
    assert (q_latent.shape, turned.shape) == ((0, 4, 16), (0, 4, 8))


def test_any_strides(kernel_device: str, poisoned: None) -> None:
    """Every second value, tables and index tensors with gaps."""
    case = draw(3, 4, 8, 8, 12, 16, device=kernel_device)
    for name, value in list(vars(case).items()):
        if isinstance(value, Tensor) and name != "pool":
            setattr(case, name, torch.stack((value, value), -1)[..., 0])
    compare(case, "strides")
