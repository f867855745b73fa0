"""Gate-up + SwiGLU on transformers' graphs, and other activations that must stay."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from seekforge.compile.execute import run
from seekforge.kernels.swiglu import swiglu
from seekforge.kernels.tolerance import assert_close
from seekforge.passes.cleanup import cleanup
from seekforge.passes.linears import LINEAR
from seekforge.passes.program import Program
from seekforge.passes.rule import PassResult, apply
from seekforge.passes.swiglu import RULE

B, S, D, I = 2, 7, 12, 10  # noqa: E741


def fused(program: Program) -> PassResult:
    cleanup(program)
    return apply(RULE, program)


def linears(bias: bool = False, up: int = I, up_bias: bool | None = None) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "gate": nn.Linear(D, I, bias=bias),
        "up": nn.Linear(D, up, bias=bias if up_bias is None else up_bias),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_whole_models(exported: Callable[..., Any], family: str, dtype: torch.dtype) -> None:
    program, module = exported(family, dtype)
    before = len(program.nodes(LINEAR))
    result = fused(program)
    assert (result.fired, result.misses) == (2, ())
    assert len(program.nodes(LINEAR)) == before - 2
    weight = program.weights["model.layers.1.mlp.gate_up_proj.weight"]
    names = ("gate_proj", "up_proj")  # in this order
    assert weight.sources == tuple(f"model.layers.1.mlp.{name}.weight" for name in names)
    assert not [name for name in program.weights if "gate_proj" in name or "mlp.up_proj" in name]
    ids = torch.randint(0, 293, (3, 5))
    positions = torch.arange(5).expand(3, 5)
    (logits,) = run(program, module.get_parameter, ids, positions, False)
    eager = module(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert_close(logits, eager, family)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("silu_first", [True, False])
def test_silu_is_on_the_gate(traced: Callable[..., Any], silu_first: bool, bias: bool) -> None:
    """silu(g) * u and u * silu(g) both fuse, and neither swaps the halves (B52)."""

    def function(m: nn.Module, x: Tensor) -> Tensor:
        gate, up = m.gate(x), m.up(x)
        return silu(gate) * up if silu_first else up * silu(gate)

    x = torch.randn(B, S, D)
    program, module = traced(function, x, **linears(bias))
    assert fused(program).fired == 1
    assert len(program.nodes(swiglu)) == len(program.nodes(LINEAR)) == 1
    y, right = run(program, module.get_parameter, x)[0], module(x)
    assert_close(y, right, f"{silu_first=} {bias=}")
    swapped = module.gate(x) * silu(module.up(x))
    assert (y - right).norm() < 1e-4 * (y - swapped).norm()


def test_up_before_gate(traced: Callable[..., Any]) -> None:
    x = torch.randn(B, S, D)
    program, module = traced(lambda m, x: m.up(x) * silu(m.gate(x)), x, **linears())
    assert fused(program).fired == 1
    assert_close(run(program, module.get_parameter, x)[0], module(x), "up first")


def test_second_run_changes_nothing(exported: Callable[..., Any]) -> None:
    program, _ = exported("llama", num_hidden_layers=1)
    fused(program)
    before = str(program.graph)
    again = apply(RULE, program)
    assert (again.fired, again.misses) == (0, ())
    assert str(program.graph) == before


def test_values_that_others_read_stay(traced: Callable[..., Any]) -> None:
    """B51: silu(gate) and up are outputs too."""

    def function(m: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        gate, up = silu(m.gate(x)), m.up(x)
        return gate * up, gate, up

    x = torch.randn(B, S, D)
    program, module = traced(function, x, **linears())
    assert fused(program).fired == 1
    for y, right in zip(run(program, module.get_parameter, x), module(x), strict=True):
        assert_close(y, right, "B51")


def test_two_in_one_module(traced: Callable[..., Any]) -> None:
    """The two fused weights do not take one name."""

    def function(m: nn.Module, x: Tensor) -> Tensor:
        return silu(m.gate(x)) * m.up(x) - silu(m.gate2(x)) * m.up2(x)

    more = {"gate2": nn.Linear(D, I), "up2": nn.Linear(D, I)}
    x = torch.randn(B, S, D)
    program, module = traced(function, x, **linears(), **more)
    assert fused(program).fired == 2
    assert_close(run(program, module.get_parameter, x)[0], module(x), "two")


NEAR_MISSES: dict[str, tuple[Callable[..., Tensor], dict[str, nn.Module], str]] = {
    "gelu": (lambda m, x: gelu(m.gate(x)) * m.up(x), linears(), ""),
    "sigmoid": (lambda m, x: torch.sigmoid(m.gate(x)) * m.up(x), linears(), ""),
    "both activated": (
        lambda m, x: silu(m.gate(x)) * silu(m.up(x)), linears(),
        "expected aten.linear, found aten.silu",
    ),
    "sum": (lambda m, x: silu(m.gate(x)) + m.up(x), linears(), "nothing of the pattern follows"),
    "gate alone": (lambda m, x: silu(m.gate(x)) * x[..., :I], linears(), "expected aten.linear"),
    "other input": (
        lambda m, x: silu(m.gate(x)) * m.up(x.sin()), linears(), "inputs differ: sin, x0"
    ),
    "bias on one": (
        lambda m, x: silu(m.gate(x)) * m.up(x), linears(True, up_bias=False), "bias on some only"
    ),
    "widths differ": (
        lambda m, x: silu(m.gate(x)) * m.up(x), linears(up=1),
        r"gate \(.*10\) and up \(.*1\) differ",
    ),
    "one layer twice": (
        lambda m, x: silu(m.gate(x)) * m.gate(x), linears(), "gate and up are one layer"
    ),
    "weight that is computed": (
        lambda m, x: silu(m.gate(x)) * nn.functional.linear(x, m.up.weight * 2),
        linears(), "mul.* is not a weight of the checkpoint",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(traced: Callable[..., Any], name: str) -> None:
    function, parts, reason = NEAR_MISSES[name]
    x = torch.randn(B, S, D)
    program, module = traced(function, x, **parts)
    before = len(program.nodes(LINEAR))
    result = fused(program)
    assert result.fired == 0
    assert len(program.nodes(LINEAR)) == before - (name == "one layer twice")  # merged by cleanup
    if reason:
        assert re.search(reason, result.misses[0].reason), result.misses[0].reason
    else:
        assert result.misses == ()  # without silu it is not a candidate
    assert torch.equal(run(program, module.get_parameter, x)[0], module(x))
