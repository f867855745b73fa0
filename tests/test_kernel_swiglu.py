"""SwiGLU: bit for bit transformers' MLP activation, and the Triton kernel against it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN

from seekforge.kernels.swiglu import swiglu, swiglu_reference, swiglu_triton
from seekforge.kernels.tolerance import assert_close

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return (4 * torch.randn(shape, generator=torch.Generator().manual_seed(1))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_is_transformers(dtype: torch.dtype) -> None:
    gate, up = draw(2, 3, 5, 33, dtype=dtype)
    assert torch.equal(swiglu(torch.cat((gate, up), -1)), ACT2FN["silu"](gate) * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 8, 32), (3, 5, 66), (2, 2100)])  # 1050: two blocks of 1024
def test_kernel(
    kernel_device: str, poisoned: None, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = draw(*shape, dtype=dtype).to(kernel_device)
    assert_close(swiglu_triton(x), swiglu_reference(x), f"{shape=}")


def test_kernel_reads_any_strides(kernel_device: str, layout: Callable[[Tensor], Tensor]) -> None:
    x = layout(draw(4, 3, 24, dtype=torch.float32).to(kernel_device))
    assert_close(swiglu_triton(x), swiglu_reference(x.contiguous()), f"{x.stride()=}")


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_extremes(kernel_device: str) -> None:
    """Large gates pass or vanish; nothing overflows on the way."""
    gate = torch.tensor([[-1e4, -90.0, 0.0, 90.0, 1e4, 1.0]], device=kernel_device)
    up = torch.full_like(gate, 2.0)
    y = swiglu_triton(torch.cat((gate, up), -1))
    assert_close(y, torch.nn.functional.silu(gate) * up, "extremes")
