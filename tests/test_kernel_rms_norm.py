"""RMSNorm: bit for bit transformers' module, and the Triton kernel against it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from seekforge.kernels.rms_norm import rms_norm, rms_norm_reference, rms_norm_triton
from seekforge.kernels.tolerance import assert_close

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
