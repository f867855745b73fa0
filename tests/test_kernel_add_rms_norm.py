"""Residual add + RMSNorm: bit for bit the two steps, and the Triton kernel against them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from seekforge.kernels.add_rms_norm import (
    add_rms_norm,
    add_rms_norm_reference,
    add_rms_norm_triton,
)
from seekforge.kernels.tolerance import assert_close

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


def draw(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, residual, and a weight around 1."""
    random = torch.Generator().manual_seed(sum(shape))
    x, residual = 3 * torch.randn(shape, generator=random), torch.randn(shape, generator=random)
    weight = 1 + 0.1 * torch.randn(shape[-1], generator=random)
    return x.to(dtype), residual.to(dtype), weight.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_is_transformers(dtype: torch.dtype) -> None:
    x, residual, weight = draw(3, 5, 33, dtype=dtype)
    module = LlamaRMSNorm(33, eps=EPS).to(dtype)
    module.weight.data = weight
    y, total = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, residual + x)  # rounded to the dtype before it is normalised
    assert torch.equal(y, module(residual + x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 8, 16), (3, 5, 33), (1, 576)])
def test_kernel(
    kernel_device: str, poisoned: None, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    inputs = [t.to(kernel_device) for t in draw(*shape, dtype=dtype)]
    y, total = add_rms_norm_triton(*inputs, EPS)
    expected_y, expected_total = add_rms_norm_reference(*inputs, EPS)
    assert torch.equal(total, expected_total), f"{shape=}"
    assert_close(y, expected_y, f"{shape=}")


def test_kernel_reads_any_strides(kernel_device: str, layout: Callable[[Tensor], Tensor]) -> None:
    x, residual, weight = (t.to(kernel_device) for t in draw(4, 3, 24, dtype=torch.float32))
    x, plain = layout(x), residual
    residual = torch.stack((residual, residual + 1), 1)[:, 0]
    y, total = add_rms_norm_triton(x, residual, weight, EPS)
    expected_y, expected_total = add_rms_norm_reference(x.contiguous(), plain, weight, EPS)
    assert torch.equal(total, expected_total), f"{x.stride()=}"
    assert_close(y, expected_y, f"{x.stride()=}")


def test_inputs_are_left_alone(kernel_device: str) -> None:
    inputs = [t.to(kernel_device) for t in draw(2, 16, dtype=torch.float32)]
    before = [t.clone() for t in inputs]
    add_rms_norm_triton(*inputs, EPS)
    assert all(map(torch.equal, inputs, before))
