"""Residual add + RMSNorm on transformers' graphs, and additions that must stay."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seekforge.compile.execute import run
from seekforge.kernels.add_rms_norm import add_rms_norm
from seekforge.kernels.rms_norm import rms_norm
from seekforge.passes import add_rms_norm as fusion
from seekforge.passes import rms_norm as norm_fusion
from seekforge.passes.cleanup import cleanup
from seekforge.passes.program import Program
from seekforge.passes.rule import PassResult, apply

B, S, D = 2, 7, 12


def fused(program: Program) -> PassResult:
    cleanup(program)
    apply(norm_fusion.RULE, program)
    return apply(fusion.RULE, program)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "alone"), [("llama", 1), ("qwen2", 1), ("qwen3", 5)])
def test_whole_models(
    exported: Callable[..., Any], family: str, alone: int, dtype: torch.dtype
) -> None:
    """2 a layer; the first norm has no addition, nor have Qwen3's norms of q and k. Bitwise."""
    program, module = exported(family, dtype)
    result = fused(program)
    assert result.fired == len(program.nodes(add_rms_norm)) == 4
    assert len(result.misses) == len(program.nodes(rms_norm)) == alone
    assert all("expected aten.add.Tensor" in miss.reason for miss in result.misses)
    ids = torch.randint(0, 293, (3, 5))
    positions = torch.arange(5).expand(3, 5)
    (logits,) = run(program, module.get_parameter, ids, positions, False)
    eager = module(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert torch.equal(logits, eager)


def test_second_run_changes_nothing(exported: Callable[..., Any]) -> None:
    program, _ = exported("llama", num_hidden_layers=1)
    fused(program)
    before = str(program.graph)
    assert apply(fusion.RULE, program).fired == 0
    assert str(program.graph) == before


def norm(m: nn.Module, x: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return m.weight * (wide * scale).to(x.dtype)


def test_the_sum_is_still_there(traced: Callable[..., Any]) -> None:
    """B51: the pre-norm sum is an output, is read before the norm and after it."""

    def function(m: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        total = x + y
        early = total.sin()
        return norm(m, total), early, total, total * 2

    inputs = torch.randn(B, S, D), torch.randn(B, S, D)
    program, module = traced(function, *inputs, weight=torch.randn(D))
    assert fused(program).fired == 1
    assert len(program.nodes(torch.ops.aten.add.Tensor)) == 0
    assert all(map(torch.equal, run(program, module.get_parameter, *inputs), module(*inputs)))


def test_two_norms_of_one_sum(traced: Callable[..., Any]) -> None:
    def function(m: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        total = x + y
        scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)
        return norm(m, total), m.other * (total * scale)

    inputs = torch.randn(B, S, D), torch.randn(B, S, D)
    program, module = traced(function, *inputs, weight=torch.randn(D), other=torch.randn(D))
    assert fused(program).fired == 1
    assert all(map(torch.equal, run(program, module.get_parameter, *inputs), module(*inputs)))


WIDE, HALF = torch.randn(B, S, D), torch.randn(B, S, D).bfloat16()
NEAR_MISSES: dict[str, tuple[Callable[..., Tensor], Tensor, Tensor, str]] = {
    "scaled residual": (
        lambda m, x, y: norm(m, torch.add(x, y, alpha=2)),
        WIDE,
        WIDE,
        "unexpected arguments.*alpha",
    ),
    "broadcast over tokens": (
        lambda m, x, y: norm(m, x + y[:, :1]),
        WIDE,
        WIDE,
        r"adds torch.float32 .*\(.*, 1, 12\)",
    ),
    "one value a token": (lambda m, x, y: norm(m, x + y[..., :1]), WIDE, WIDE, r", 1\)"),
    "number": (lambda m, x, y: norm(m, x + 1.5) + y, WIDE, WIDE, "expected a tensor, found 1.5"),
    "two dtypes": (lambda m, x, y: norm(m, x + y), WIDE, HALF, "torch.float32 .*torch.bfloat16"),
    "difference": (lambda m, x, y: norm(m, x - y), WIDE, WIDE, "expected aten.add"),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(traced: Callable[..., Any], name: str) -> None:
    function, x, y, reason = NEAR_MISSES[name]
    program, module = traced(function, x, y, weight=torch.randn(D))
    result = fused(program)
    assert result.fired == 0
    assert re.search(reason, result.misses[0].reason), result.misses[0].reason
    assert torch.equal(run(program, module.get_parameter, x, y)[0], module(x, y))
