"""RoPE and cache write in one launch: the same bits as rope and then kv_write."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from seekforge.kernels.kv_write import kv_write_reference, kv_write_triton
from seekforge.kernels.rope_append import rope_append_reference, rope_append_triton

T, BLOCKS, MAX_LEN = 5, 6, 40
KINDS = {"plain": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


def draw(
    heads: int, kv_heads: int, dim: int, v_dim: int, rotary: int, *, device: str,
    dtype: torch.dtype = torch.bfloat16, kind: str = "plain", block_size: int = 4,
) -> SimpleNamespace:  # fmt: skip
    """One fused projection, of which q, k and v are slices; random pools, the third slot -1."""
    random = torch.Generator().manual_seed(heads + dim)
    widths = [heads * dim, kv_heads * dim, kv_heads * v_dim]
    fused = torch.randn(T, sum(widths), generator=random).to(dtype).to(device)
    q, k, v = fused.split(widths, 1)
    angles = torch.arange(MAX_LEN)[:, None] * 1e4 ** (-torch.arange(0, rotary, 2) / rotary)
    pools, scales = [], []
    for width in (dim, v_dim):
        pool = torch.randn(BLOCKS, block_size, kv_heads, width, generator=random).to(dtype)
        scale = None
        if kind == "int8":
            scale = torch.rand(BLOCKS, block_size, kv_heads, generator=random).to(device)
        if kind == "fp8":
            scale = torch.linspace(0.004, 0.05, kv_heads).to(device)
        pools.append(pool.to(KINDS[kind] or dtype).to(device))
        scales.append(scale)
    slots = torch.randperm(BLOCKS * block_size, generator=random)[:T]
    slots[2] = -1
    return SimpleNamespace(
        q=q.unflatten(1, (heads, dim)), k=k.unflatten(1, (kv_heads, dim)),
        v=v.unflatten(1, (kv_heads, v_dim)), cos=angles.cos().to(device),
        sin=angles.sin().to(device), positions=torch.tensor([0, 39, 0, 7, 8], device=device),
        pools=pools, scales=scales, slots=slots.to(device),
    )  # fmt: skip


def arguments(case: SimpleNamespace, interleaved: bool = False) -> list[object]:
    pools = [pool.clone() for pool in case.pools]
    scales = [None if scale is None else scale.clone() for scale in case.scales]
    return [
        case.q, case.k, case.v, case.cos, case.sin, case.positions, *pools, case.slots,
        interleaved, *scales,
    ]  # fmt: skip


def same(x: Tensor | None, y: Tensor | None) -> bool:
    """Bit for bit; scales may be None."""
    if x is None or y is None:
        return x is y
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "v_dim", "rotary"),
    [(4, 2, 16, 16, 16), (9, 3, 20, 24, 12), (2, 1, 64, 32, 8)],
)
def test_kernel(
    kernel_device: str, poisoned: None, kind: str, interleaved: bool,
    heads: int, kv_heads: int, dim: int, v_dim: int, rotary: int,
) -> None:  # fmt: skip
    case = draw(heads, kv_heads, dim, v_dim, rotary, device=kernel_device, kind=kind)
    ours, right = arguments(case, interleaved), arguments(case, interleaved)
    y, expected = rope_append_triton(*ours), rope_append_reference(*right)  # type: ignore[arg-type]
    assert y.is_contiguous() and torch.equal(y, expected), f"{heads=} {dim=} {rotary=}"
    for i in (6, 7, 10, 11):
        assert same(ours[i], right[i]), f"{kind} {heads=} {dim=} argument {i}"  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("warps", [None, 1, 8])
def test_dtypes_and_warps(
    kernel_device: str, poisoned: None, dtype: torch.dtype, warps: int | None
) -> None:
    case = draw(6, 3, 16, 16, 16, device=kernel_device, dtype=dtype, block_size=16)
    ours, right = arguments(case), arguments(case)
    y = rope_append_triton(*ours, warps=warps)  # type: ignore[arg-type]
    assert torch.equal(y, rope_append_reference(*right))  # type: ignore[arg-type]
    assert same(ours[6], right[6]) and same(ours[7], right[7])  # type: ignore[arg-type]


def test_a_negative_slot_leaves_the_pools_alone(kernel_device: str) -> None:
    case = draw(2, 1, 16, 16, 16, device=kernel_device)
    case.slots.fill_(-1)
    given = arguments(case)
    y = rope_append_triton(*given)  # type: ignore[arg-type]
    assert y.isfinite().all()
    assert same(given[6], case.pools[0]) and same(given[7], case.pools[1])  # type: ignore[arg-type]


def test_inputs_are_left_alone_and_read_in_place(kernel_device: str) -> None:
    case = draw(4, 2, 16, 16, 16, device=kernel_device)
    assert not case.q.is_contiguous() and case.q.stride(0) == 4 * 16 + 2 * 16 * 2
    before = case.q.clone(), case.k.clone(), case.v.clone()
    rope_append_triton(*arguments(case))  # type: ignore[arg-type]
    assert all(map(torch.equal, (case.q, case.k, case.v), before))


@pytest.mark.parametrize("kind", KINDS)
def test_write_alone(kernel_device: str, kind: str) -> None:
    """kv_write's kernel against its reference, and that against writing token by token."""
    case = draw(2, 3, 20, 24, 4, device=kernel_device, kind=kind)
    ours, right = arguments(case), arguments(case)
    kv_write_triton(*ours[1:3], *ours[6:9], *ours[10:])  # type: ignore[arg-type]
    kv_write_reference(*right[1:3], *right[6:9], *right[10:])  # type: ignore[arg-type]
    for i in (6, 7, 10, 11):
        assert same(ours[i], right[i]), f"{kind} argument {i}"  # type: ignore[arg-type]
    assert not same(ours[6], case.pools[0])  # type: ignore[arg-type]
    if kind == "plain":
        plain = arguments(case)
        for token, slot in enumerate(case.slots.tolist()):
            if slot >= 0:
                for new, pool in ((case.k, plain[6]), (case.v, plain[7])):
                    pool.flatten(0, 1)[slot] = new[token]  # type: ignore[attr-defined]
        assert same(plain[6], right[6]) and same(plain[7], right[7])  # type: ignore[arg-type]
