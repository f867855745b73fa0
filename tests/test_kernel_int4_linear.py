"""INT4 linear layers against the decoded weight in a plain product, and the Triton kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from seekforge.kernels import int4_linear as module
from seekforge.kernels.int4 import Int4, dequantise, quantise
from seekforge.kernels.int4_linear import (
    inlined_int4_linear,
    int4_linear,
    int4_linear_reference,
    int4_linear_triton,
)
from seekforge.kernels.tolerance import assert_close

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# out_features, in_features, group_size
SIZES = [(8, 64, 32), (65, 320, 64), (24, 72, 36), (33, 16, 16), (5, 192, 64)]


def draw(
    tokens: tuple[int, ...], n: int, k: int, group_size: int, dtype: torch.dtype, symmetric: bool
) -> tuple[Tensor, Int4, Tensor]:
    random = torch.Generator().manual_seed(n + k)
    x = torch.randn(*tokens, k, generator=random).to(dtype)
    weight = (0.5 * torch.randn(n, k, generator=random)).to(dtype)
    bias = torch.randn(n, generator=random).to(dtype)
    return x, quantise(weight, group_size, symmetric), bias


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k", "group_size"), SIZES)
def test_reference(
    poisoned: None,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    n: int,
    k: int,
    group_size: int,
) -> None:
    monkeypatch.setattr(module, "CHUNK", 7 * k)  # 7 rows at a time
    for symmetric in (True, False):
        x, w, bias = draw((2, 3), n, k, group_size, dtype, symmetric)
        right = linear(x, dequantise(w), bias)
        args = (x, w.qweight, w.scales, w.zeros, bias, group_size)
        assert_close(int4_linear(*args), right, f"{symmetric=}")
        assert_close(inlined_int4_linear(*args), right, f"inlined, {symmetric=}")
        right = linear(x, dequantise(w))
        assert_close(int4_linear(*args[:4], None, group_size), right, f"no bias, {symmetric=}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k", "group_size"), SIZES)
def test_kernel(
    kernel_device: str, poisoned: None, dtype: torch.dtype, n: int, k: int, group_size: int
) -> None:
    for tokens, symmetric, with_bias in (((1,), True, False), ((2, 9), False, True)):
        x, w, bias = draw(tokens, n, k, group_size, dtype, symmetric)
        args = [
            t if t is None else t.to(kernel_device)
            for t in (x, w.qweight, w.scales, w.zeros, bias if with_bias else None)
        ]
        y = int4_linear_triton(*args, group_size)  # type: ignore[arg-type]
        right = linear(x, dequantise(w), bias if with_bias else None)
        assert_close(y.cpu(), right, f"{tokens=} {symmetric=} {with_bias=}")


def test_kernel_reads_any_strides(kernel_device: str, layout: Callable[[Tensor], Tensor]) -> None:
    """B47"""
    x, w, bias = draw((4, 3), 24, 64, 32, torch.float32, False)
    assert w.zeros is not None
    args = [layout(t.to(kernel_device)) for t in (x, w.qweight, w.scales, w.zeros)]
    plain = [t.contiguous() for t in args]
    right = int4_linear_reference(*plain, bias.to(kernel_device), 32)
    y = int4_linear_triton(*args, bias.to(kernel_device), 32)
    assert_close(y, right, f"{args[0].stride()=}")
    assert_close(int4_linear_reference(*args, bias.to(kernel_device), 32), right, "reference")


def test_no_tokens() -> None:
    x, w, bias = draw((0,), 8, 64, 32, torch.float32, True)
    assert int4_linear(x, w.qweight, w.scales, w.zeros, bias, 32).shape == (0, 8)


def test_fake_has_the_shape() -> None:
    x, w, _ = draw((2, 3), 8, 64, 32, torch.bfloat16, True)
    y = int4_linear(x.to("meta"), w.qweight.to("meta"), w.scales.to("meta"), None, None, 32)
    assert (y.shape, y.dtype) == ((2, 3, 8), torch.bfloat16)
