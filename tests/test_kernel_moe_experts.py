"""Experts against transformers' eager ones, and sums that fp16 can't hold."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts

from seekforge.kernels.moe_experts import FEW, moe_experts, one_token_experts
from seekforge.kernels.tolerance import assert_close, normalised_error

E, K, I, H = 7, 3, 10, 24  # noqa: E741
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOKENS = [1, 2, FEW, FEW + 1, 33]


def draw(*tokens: int, dtype: torch.dtype = torch.float32, experts: int = E) -> tuple[Tensor, ...]:
    """x, weights, indices, gate_up, down; indices differ within a token."""
    random = torch.Generator().manual_seed(len(tokens))
    x = torch.randn(*tokens, H, generator=random).to(dtype)
    weights = torch.rand(*tokens, K, generator=random)
    indices = torch.rand(*tokens, experts, generator=random).argsort(-1)[..., :K]
    gate_up = 0.5 * torch.randn(E, 2 * I, H, generator=random)
    down = 0.5 * torch.randn(E, H, I, generator=random)
    return x, weights, indices, gate_up.to(dtype), down.to(dtype)


def in_fp64(x: Tensor, weights: Tensor, indices: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Every token with every one of its experts, one by one."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    for at in torch.cartesian_prod(*map(torch.arange, indices.shape)):
        *token, i = at.tolist()
        e = int(indices[*token, i])
        gate, up = linear(x[*token].double(), gate_up[e].double()).chunk(2)
        y[*token] += weights[*token, i].double() * linear(silu(gate) * up, down[e].double())
    return y


@pytest.mark.parametrize("tokens", TOKENS)
def test_equals_transformers(tokens: int) -> None:
    x, weights, indices, gate_up, down = draw(tokens)
    config = AutoConfig.for_model(
        "deepseek_v3", hidden_size=H, moe_intermediate_size=I, n_routed_experts=E
    )
    config._experts_implementation = "eager"
    experts = DeepseekV3Experts(config).requires_grad_(False)  # type: ignore[no-untyped-call]
    experts.gate_up_proj.copy_(gate_up)
    experts.down_proj.copy_(down)
    y = moe_experts(x, weights, indices, gate_up, down)
    assert_close(y, experts(x, indices, weights), f"{tokens=}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_near_fp64(poisoned: None, tokens: int, dtype: torch.dtype) -> None:
    args = draw(tokens, dtype=dtype)
    y, right = moe_experts(*args), in_fp64(*args)
    assert_close(y, right.to(dtype), f"{tokens=}")


@pytest.mark.parametrize("leading", [(1, 1), (2, 7), (2, 1, 3)])
def test_leading_dimensions_are_free(leading: tuple[int, ...]) -> None:
    x, weights, indices, gate_up, down = draw(*leading)
    y = moe_experts(x, weights, indices, gate_up, down)
    assert_close(y, in_fp64(x, weights, indices, gate_up, down).float(), f"{leading=}")


@pytest.mark.parametrize("tokens", [2, 33])
def test_experts_without_tokens_are_not_read(tokens: int) -> None:
    """NaN in every expert that no token chose must not show."""
    x, weights, indices, gate_up, down = draw(tokens, experts=K)
    gate_up[K:], down[K:] = math.nan, math.nan
    y = moe_experts(x, weights, indices, gate_up, down)
    assert_close(y, in_fp64(x, weights, indices, gate_up, down).float(), f"{tokens=}")


@pytest.mark.parametrize("tokens", [1, 9])
def test_all_tokens_to_the_same_experts(tokens: int) -> None:
    x, weights, _, gate_up, down = draw(tokens)
    indices = torch.tensor([[5, 0, 6]]).expand(tokens, K)
    y = moe_experts(x, weights, indices, gate_up, down)
    assert_close(y, in_fp64(x, weights, indices, gate_up, down).float(), f"{tokens=}")


def test_no_tokens() -> None:
    x, weights, indices, gate_up, down = draw(0)
    assert moe_experts(x, weights, indices, gate_up, down).shape == (0, H)


@pytest.mark.parametrize("tokens", [3, 11])
def test_any_strides(layout: Callable[[Tensor], Tensor], tokens: int) -> None:
    """B47: x, weights, indices and the experts' matrices in other layouts."""
    x, weights, indices, gate_up, down = draw(tokens)
    plain = [layout(t) for t in (x, weights, indices, gate_up, down)]
    y = moe_experts(*plain)
    assert y.is_contiguous()
    assert_close(y, moe_experts(*(t.contiguous() for t in plain)), f"{plain[0].stride()=}")


@pytest.mark.parametrize("tokens", [1, 9])
def test_sums_beyond_fp16(tokens: int) -> None:
    """B35: 50000 + 50000 - 60000 passes 65504 on the way and fits in the end; so does one
    expert's 80000 weighted by 0.25."""
    half = torch.float16
    x = torch.ones(tokens, 8, dtype=half)
    gate_up = torch.full((4, 2, 8), 1.25, dtype=half)  # gate 10, up 10: silu(10) * 10 = 99.995
    down = torch.tensor([500.0, 500.0, -600.0, 800.0], dtype=half).view(4, 1, 1).expand(4, 8, 1)
    three = torch.tensor([[0, 1, 2]]).expand(tokens, 3)
    y = moe_experts(x, torch.ones(tokens, 3), three, gate_up, down)
    assert_close(y, torch.full((tokens, 8), 39998.0, dtype=half), "three experts")
    one = torch.full((tokens, 1), 3)
    y = moe_experts(x, torch.full((tokens, 1), 0.25), one, gate_up, down)
    assert_close(y, torch.full((tokens, 8), 19999.0, dtype=half), "one expert")


@pytest.mark.parametrize("tokens", [2, 9])
def test_bf16_sum_is_rounded_once(tokens: int) -> None:
    """256 + 1 + 1 is 256 where bf16 rounds after each addition."""
    x = torch.ones(tokens, 1, dtype=torch.bfloat16)
    gate_up = torch.full((3, 2, 1), 16.0, dtype=torch.bfloat16)  # silu(16) * 16 = 256
    down = torch.tensor([1.0, 2**-8, 2**-8], dtype=torch.bfloat16).view(3, 1, 1)
    indices = torch.arange(3).expand(tokens, 3)
    y = moe_experts(x, torch.ones(tokens, 3), indices, gate_up, down)
    assert y.tolist() == [[258.0]] * tokens


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("leading", [(1,), (1, 1)])
def test_one_token_form(dtype: torch.dtype, leading: tuple[int, ...]) -> None:
    args = draw(*leading, dtype=dtype)
    y, right = one_token_experts(*args), in_fp64(*args)
    assert_close(y, right.to(dtype), f"{leading=}")
    assert normalised_error(y, right) <= 1.1 * normalised_error(moe_experts(*args), right) + 1e-13


def test_one_token_form_has_no_data_dependence() -> None:
    """It can be traced without values: nothing of the indices is read in Python."""
    args = [t.to("meta") for t in draw(1, dtype=torch.bfloat16)]
    assert one_token_experts(*args).shape == (1, H)


def test_fake_has_the_shape() -> None:
    args = [t.to("meta") for t in draw(2, 3, dtype=torch.bfloat16)]
    y = moe_experts(*args)
    assert (y.shape, y.dtype) == ((2, 3, H), torch.bfloat16)
