"""RoPE: bit for bit transformers' in fp32, partial and interleaved forms, and the kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from seekforge.kernels.rope import rope, rope_reference, rope_triton, token_warps
from seekforge.kernels.tolerance import assert_close

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
B, S, HEADS, KV_HEADS, MAX_LEN = 2, 3, 4, 1, 701
POSITIONS = torch.tensor([[0, 7, 700], [1, 0, 33]])


def draw(dtype: torch.dtype, head_dim: int, rotary: int) -> list[Tensor]:
    """q, k, cos table, sin table."""
    random = torch.Generator().manual_seed(head_dim)
    q, k = (torch.randn(B, S, h, head_dim, generator=random) for h in (HEADS, KV_HEADS))
    frequencies = 1e4 ** (-torch.arange(0, rotary, 2) / rotary)
    angles = torch.arange(MAX_LEN)[:, None] * frequencies
    return [q.to(dtype), k.to(dtype), angles.cos(), angles.sin()]


def transformers_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    full = (torch.cat((t[POSITIONS], t[POSITIONS]), -1).to(q.dtype) for t in (cos, sin))
    rotated = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *full)
    return rotated[0].transpose(1, 2), rotated[1].transpose(1, 2)


def test_reference_is_transformers_in_fp32() -> None:
    q, k, cos, sin = draw(torch.float32, 16, 16)
    ours, theirs = rope(q, k, cos, sin, POSITIONS, False), transformers_rope(q, k, cos, sin)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reference_is_nearer_to_fp32_than_transformers(dtype: torch.dtype) -> None:
    """transformers rounds cos, sin and each product to the dtype; this rounds once."""
    q, k, cos, sin = draw(dtype, 16, 16)
    exact = rope_reference(q.double(), k.double(), cos, sin, POSITIONS, False)
    ours, theirs = rope(q, k, cos, sin, POSITIONS, False), transformers_rope(q, k, cos, sin)
    for x, y, right in zip(ours, theirs, exact, strict=True):
        assert (x - right).norm() < 0.8 * (y - right).norm()


def test_interleaved_reference_is_a_complex_product() -> None:
    q, k, cos, sin = draw(torch.float32, 16, 16)
    turn = torch.complex(cos, sin)[POSITIONS]
    theirs = apply_rotary_emb(q.transpose(1, 2), k.transpose(1, 2), turn)
    ours = rope(q, k, cos, sin, POSITIONS, True)
    for x, y in zip(ours, theirs, strict=True):
        assert_close(x, y.transpose(1, 2).contiguous(), "interleaved")


@pytest.mark.parametrize("interleaved", [False, True])
def test_partial_rotary_leaves_the_rest(interleaved: bool) -> None:
    """Rotary 8 of 16: the leading 8 turn as a head of 8 would, the others pass (B12)."""
    q, k, cos, sin = draw(torch.float32, 16, 8)
    whole = rope(q, k, cos, sin, POSITIONS, interleaved)
    alone = rope(q[..., :8], k[..., :8], cos, sin, POSITIONS, interleaved)
    for x, before, part in zip(whole, (q, k), alone, strict=True):
        assert torch.equal(x[..., 8:], before[..., 8:])
        assert torch.equal(x[..., :8], part)
        assert torch.equal(x[0, 0], before[0, 0])  # position 0
        assert not torch.equal(x[0, 1, :, :8], before[0, 1, :, :8])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary"), [(16, 16), (20, 12), (64, 8)])
def test_kernel(
    kernel_device: str, poisoned: None, dtype: torch.dtype, interleaved: bool,
    head_dim: int, rotary: int,
) -> None:  # fmt: skip
    inputs = [t.to(kernel_device) for t in (*draw(dtype, head_dim, rotary), POSITIONS)]
    ours, right = rope_triton(*inputs, interleaved), rope_reference(*inputs, interleaved)
    for x, y in zip(ours, right, strict=True):
        assert torch.equal(x, y), f"{head_dim=} {rotary=} {interleaved=}"


def test_kernel_reads_any_strides(kernel_device: str, layout: Callable[[Tensor], Tensor]) -> None:
    q, k, cos, sin, positions = (
        t.to(kernel_device) for t in (*draw(torch.float32, 16, 16), POSITIONS)
    )
    q, k = layout(q), k.transpose(1, 3).contiguous().transpose(1, 3)
    cos, sin = (torch.cat((t, t), -1)[:, :8] for t in (cos, sin))
    positions = positions.t().contiguous().t()
    ours = rope_triton(q, k, cos, sin, positions, False)
    plain = [t.contiguous() for t in (q, k, cos, sin, positions)]
    for x, y in zip(ours, rope_reference(*plain, False), strict=True):
        assert torch.equal(x, y), f"{q.stride()=}"
    for x, y in zip(rope_reference(q, k, cos, sin, positions, False),
                    rope_reference(*plain, False), strict=True):  # fmt: skip
        assert torch.equal(x, y)


def test_heads_that_are_no_power_of_2(kernel_device: str, poisoned: None) -> None:
    _, _, cos, sin = (t.to(kernel_device) for t in draw(torch.bfloat16, 16, 16))
    q, k = (torch.randn(B, S, h, 16, device=kernel_device).bfloat16() for h in (9, 3))
    positions = POSITIONS.to(kernel_device)
    ours = rope_triton(q, k, cos, sin, positions, False)
    for x, y in zip(ours, rope_reference(q, k, cos, sin, positions, False), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("heads", "dim", "warps"), [(32, 128, 2), (2, 16, 1), (128, 256, 16), (128, 512, 16)]
)
def test_warps_grow_with_the_heads(heads: int, dim: int, warps: int) -> None:
    assert token_warps(1, heads, dim, {"per_thread": 64}) == warps
