"""INT4 experts against `moe_experts` with the decoded weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from seekforge.kernels.int4 import Int4, dequantise, quantise
from seekforge.kernels.int4_moe_experts import int4_moe_experts, one_token_int4_experts
from seekforge.kernels.moe_experts import moe_experts_reference
from seekforge.kernels.tolerance import assert_close

E, K, I, H = 7, 3, 10, 32  # noqa: E741
G = 16  # does not divide I: the down projection has one group of 10
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(
    *tokens: int, dtype: torch.dtype = torch.float32, symmetric: bool = True, experts: int = E
) -> tuple[tuple[Tensor, Tensor, Tensor], Int4, Int4]:
    random = torch.Generator().manual_seed(len(tokens))
    x = torch.randn(*tokens, H, generator=random).to(dtype)
    weights = torch.rand(*tokens, K, generator=random)
    indices = torch.rand(*tokens, experts, generator=random).argsort(-1)[..., :K]
    gate_up = (0.5 * torch.randn(E, 2 * I, H, generator=random)).to(dtype)
    down = (0.5 * torch.randn(E, H, I, generator=random)).to(dtype)
    return (x, weights, indices), quantise(gate_up, G, symmetric), quantise(down, I, symmetric)


def arguments(given: tuple[Tensor, ...], gate_up: Int4, down: Int4) -> tuple[object, ...]:
    packed = [(w.qweight, w.scales, w.zeros) for w in (gate_up, down)]
    return (*given, *packed[0], *packed[1], G)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [(1,), (2,), (33,), (2, 3)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_equals_decoded_experts(
    poisoned: None, dtype: torch.dtype, tokens: tuple[int, ...], symmetric: bool
) -> None:
    given, gate_up, down = draw(*tokens, dtype=dtype, symmetric=symmetric)
    right = moe_experts_reference(*given, dequantise(gate_up), dequantise(down))
    y = int4_moe_experts(*arguments(given, gate_up, down))
    assert_close(y, right, f"{tokens=} {symmetric=}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_one_token_form(dtype: torch.dtype, symmetric: bool) -> None:
    given, gate_up, down = draw(1, 1, dtype=dtype, symmetric=symmetric)
    right = moe_experts_reference(*given, dequantise(gate_up), dequantise(down))
    y = one_token_int4_experts(*arguments(given, gate_up, down))  # type: ignore[arg-type]
    assert_close(y, right, f"{symmetric=}")


@pytest.mark.parametrize("tokens", [2, 33])
def test_experts_without_tokens_are_not_read(tokens: int) -> None:
    given, gate_up, down = draw(tokens, experts=K)
    right = int4_moe_experts(*arguments(given, gate_up, down))
    gate_up.scales[K:] = down.scales[K:] = float("nan")
    assert torch.equal(int4_moe_experts(*arguments(given, gate_up, down)), right)


def test_any_strides(layout: Callable[[Tensor], Tensor]) -> None:
    """B47"""
    given, gate_up, down = draw(5)
    laid = tuple(layout(t) for t in given)
    y = int4_moe_experts(*arguments(laid, gate_up, down))
    right = int4_moe_experts(*arguments(tuple(t.contiguous() for t in laid), gate_up, down))
    assert_close(y, right, f"{laid[0].stride()=}")


def test_no_tokens_and_fake() -> None:
    given, gate_up, down = draw(0)
    assert int4_moe_experts(*arguments(given, gate_up, down)).shape == (0, H)
    given, gate_up, down = draw(2, 3)
    meta = [t.to("meta") if isinstance(t, Tensor) else t for t in arguments(given, gate_up, down)]
    assert int4_moe_experts(*meta).shape == (2, 3, H)
