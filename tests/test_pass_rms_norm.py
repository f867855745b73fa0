"""RMSNorm fusion on transformers' graphs, and look-alikes that must stay."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seekforge.compile.execute import run
from seekforge.kernels.rms_norm import rms_norm
from seekforge.passes.cleanup import cleanup
from seekforge.passes.program import Program
from seekforge.passes.rms_norm import RULE
from seekforge.passes.rule import PassResult, apply

B, S, D = 2, 7, 12


def fused(program: Program) -> PassResult:
    cleanup(program)
    return apply(RULE, program)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "norms"), [("llama", 5), ("qwen2", 5), ("qwen3", 9)])
def test_whole_models(
    exported: Callable[..., Any], family: str, norms: int, dtype: torch.dtype
) -> None:
    """Bitwise: the same arithmetic in the same order, casts included."""
    program, module = exported(family, dtype)
    result = fused(program)
    assert (result.fired, result.misses) == (norms, ())
    assert len(program.nodes(rms_norm)) == norms
    for batch, seq in ((1, 8), (3, 5)):
        ids = torch.randint(0, 293, (batch, seq))
        positions = torch.arange(seq).expand(batch, seq)
        (logits,) = run(program, module.get_parameter, ids, positions, False)
        eager = module(input_ids=ids, position_ids=positions, use_cache=False).logits
        assert torch.equal(logits, eager), f"{batch=} {seq=}"


def test_second_run_changes_nothing(exported: Callable[..., Any]) -> None:
    program, _ = exported("llama", num_hidden_layers=1)
    fused(program)
    before = str(program.graph)
    again = apply(RULE, program)
    assert (again.fired, again.misses) == (0, ())
    assert str(program.graph) == before


def norm(x: Tensor, weight: Tensor, dim: int = -1, rounded: torch.dtype | None = None) -> Tensor:
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.pow(2).mean(dim, keepdim=True) + 1e-5)
    return weight * (wide * scale).to(rounded or x.dtype)


def test_values_that_others_read_stay(traced: Callable[..., Any]) -> None:
    """B51: the variance's root and the normalised value before the weight are outputs too."""

    def function(m: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return m.weight * (x * scale), x * scale, scale

    program, module = traced(function, torch.randn(B, S, D), weight=torch.randn(D))
    assert fused(program).fired == 1
    x = torch.randn(3, 4, D)
    assert all(map(torch.equal, run(program, module.get_parameter, x), module(x)))


def test_either_order_of_factors(traced: Callable[..., Any]) -> None:
    def function(m: nn.Module, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (scale * wide).to(x.dtype) * m.weight

    x = torch.randn(B, S, D).bfloat16()
    program, module = traced(function, x, weight=torch.randn(D).bfloat16())
    assert fused(program).fired == 1
    assert torch.equal(run(program, module.get_parameter, x)[0], module(x))


def test_rounded_input_is_rounded_still(traced: Callable[..., Any]) -> None:
    """fp32 -> bf16 -> fp32 -> norm: the input of the norm is the bf16 value."""
    x = torch.randn(B, S, D)
    program, module = traced(
        lambda m, x: norm(x.to(BF16), m.weight), x, weight=torch.randn(D).bfloat16()
    )
    assert fused(program).fired == 1
    assert torch.equal(run(program, module.get_parameter, x)[0], module(x))


BF16, FP32 = torch.bfloat16, torch.float32
NEAR_MISSES: dict[str, tuple[Callable[..., Tensor], torch.dtype, Tensor, str]] = {
    "mean over another dimension": (
        lambda m, x: norm(x, m.weight, dim=1), FP32, torch.randn(D),
        r"expected \[-1\], found \[1\]",
    ),
    "mean of magnitudes": (
        lambda m, x: m.weight * (x * torch.rsqrt(x.abs().mean(-1, keepdim=True) + 1e-5)),
        FP32, torch.randn(D), "expected aten.pow",
    ),
    "power 4": (
        lambda m, x: m.weight * (x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-5)),
        FP32, torch.randn(D), "expected 2, found 4",
    ),
    "one weight for all": (
        lambda m, x: norm(x, m.weight), FP32, torch.randn(1), "does not span the last dimension",
    ),
    "weight of three dimensions": (
        lambda m, x: norm(x, m.weight), FP32, torch.randn(1, 1, D), "does not span",
    ),
    "weight of another dtype": (
        lambda m, x: norm(x, m.weight), BF16, torch.randn(D), "weight is torch.float32, input",
    ),
    "normalised in bf16": (
        lambda m, x: m.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)),
        BF16, torch.randn(D).bfloat16(), "normalised in torch.bfloat16, not float32",
    ),
    "rounded on the way": (
        lambda m, x: norm(x, m.weight, rounded=BF16), FP32, torch.randn(D),
        "cast to torch.bfloat16",
    ),
    "another tensor is normalised": (
        lambda m, x: m.weight * (x.sin() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)),
        FP32, torch.randn(D), "wide is",
    ),
    "weight that is computed": (
        lambda m, x: norm(x, m.weight + 1), FP32, torch.randn(D), "weight: expected a weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(traced: Callable[..., Any], name: str) -> None:
    function, dtype, weight, reason = NEAR_MISSES[name]
    x = torch.randn(B, S, D).to(dtype)
    program, module = traced(function, x, weight=weight)
    result = fused(program)
    (miss,) = result.misses
    assert result.fired == 0
    assert re.search(reason, miss.reason), miss.reason
    assert ".py:" in miss.source
    assert torch.equal(run(program, module.get_parameter, x)[0], module(x))
