"""RMSNorm: bit for bit transformers' module, and the Triton kernel against it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from seekforge.kernels.rms_norm import (
    Tile,
    as_rows,
    norm_tile,
    rms_norm,
    rms_norm_reference,
    rms_norm_triton,
)
from seekforge.kernels.tolerance import assert_close
from seekforge.kernels.triton_support import next_power_of_2

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


def draw(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x and a weight around 1."""
    random = torch.Generator().manual_seed(sum(shape))
    x = 3 * torch.randn(shape, generator=random)
    return x.to(dtype), (1 + 0.1 * torch.randn(shape[-1], generator=random)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 8, 16), (3, 5, 33), (1, 576)])
def test_reference_is_transformers(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = draw(*shape, dtype=dtype)
    module = LlamaRMSNorm(shape[-1], eps=EPS).to(dtype)
    module.weight.data = weight
    assert torch.equal(rms_norm(x, weight, EPS), module(x))


def test_cast_comes_before_the_weight_in_bf16() -> None:
    """The other order changes about a quarter of the values, so the test above can tell (B37)."""
    x, weight = draw(4, 64, dtype=torch.bfloat16)
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    other = (weight.float() * (wide * scale)).bfloat16()
    changed = (rms_norm_reference(x, weight, EPS) != other).float().mean()
    assert 0.1 < changed < 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 8, 16), (3, 5, 33), (1, 576)])
def test_kernel(
    kernel_device: str, poisoned: None, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x, weight = (t.to(kernel_device) for t in draw(*shape, dtype=dtype))
    assert_close(rms_norm_triton(x, weight, EPS), rms_norm_reference(x, weight, EPS), f"{shape=}")


def test_kernel_reads_any_strides(kernel_device: str, layout: Callable[[Tensor], Tensor]) -> None:
    x, weight = (t.to(kernel_device) for t in draw(4, 3, 24, dtype=torch.float32))
    x = layout(x)
    spread = torch.stack((weight, -weight), 1)[:, 0]  # stride 2
    expected = rms_norm_reference(x.contiguous(), weight, EPS)
    y = rms_norm_triton(x, spread, EPS)
    assert y.is_contiguous()
    assert_close(y, expected, f"{x.stride()=}")
    assert torch.equal(rms_norm_reference(x, spread, EPS), expected)


def test_kernel_without_rows(kernel_device: str) -> None:
    x, weight = (t.to(kernel_device) for t in draw(2, 16, dtype=torch.float32))
    assert rms_norm_triton(x[:0], weight, EPS).shape == (0, 16)


def test_zero_row_is_zero(kernel_device: str) -> None:
    _, weight = draw(1, 16, dtype=torch.float16)
    zero = torch.zeros(2, 16, dtype=torch.float16, device=kernel_device)
    assert torch.equal(rms_norm_triton(zero, weight.to(kernel_device), EPS), zero)


@pytest.mark.parametrize(("rows", "hidden", "block"), [(7, 16, 64), (3, 33, 1024), (9, 8, 32)])
def test_programs_of_several_rows(
    kernel_device: str, poisoned: None, rows: int, hidden: int, block: int
) -> None:
    """The last program has fewer rows than the others, or the only one all of them."""
    x, weight = (t.to(kernel_device) for t in draw(rows, hidden, dtype=torch.bfloat16))
    tile = Tile(block // next_power_of_2(hidden), 1)
    y = rms_norm_triton(x, weight, EPS, tile)
    assert_close(y, rms_norm_reference(x, weight, EPS), f"{rows=} {hidden=} {tile=}")


@pytest.mark.parametrize(
    "shape", [(5, 3, 16), (2, 5, 3, 16), (1, 5, 3, 16), (5, 1, 3, 16), (2, 2, 2, 3, 16)]
)
def test_heads_of_a_fused_projection(
    kernel_device: str, poisoned: None, shape: tuple[int, ...]
) -> None:
    """q is a slice of [q; k; v]: its heads lie one behind the other, its tokens farther apart."""
    *outer, heads, dim = shape
    wide, _ = draw(*outer, (heads + 2) * dim, dtype=torch.float32)
    x = wide.to(kernel_device)[..., : heads * dim].unflatten(-1, (heads, dim))
    weight = torch.linspace(0.5, 2, dim, device=kernel_device)
    y = rms_norm_triton(x, weight, EPS)
    assert_close(y, rms_norm_reference(x, weight, EPS), f"{shape=}")


def test_rows_are_read_in_place() -> None:
    x = torch.randn(2, 5, 10, 16)
    heads = x[:, :, 2:8]
    same, inner, outer, step = as_rows(heads)
    assert same is heads and (inner, outer, step) == (6, 160, 16)
    assert as_rows(x[:, 0, 0])[1:] == (1, 800, 0)
    for copied in (x[:, :3], x.transpose(2, 3), x.transpose(0, 1)):
        made, inner, _, _ = as_rows(copied)
        assert made is not copied and made.is_contiguous() and inner == 1


@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm"])
def test_tiles(op: str) -> None:
    for rows in (1, 3, 32, 8192, 262144):
        for hidden in (64, 128, 576, 4096, 7168, 16384):
            tile = norm_tile(op, rows, hidden)
            assert 1 <= tile.warps <= 32 and tile.rows < 2 * rows, f"{rows=} {hidden=} {tile=}"
            assert tile.rows == 1 or tile.rows * hidden <= 8192, f"{rows=} {hidden=} {tile=}"
