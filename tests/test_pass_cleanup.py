"""Clean-up: what changes no value goes, what changes one stays, and the results stay bitwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from seekforge.compile.execute import run
from seekforge.passes.cleanup import CHECKS, cleanup
from seekforge.passes.program import Program

aten = torch.ops.aten
B, S, D = 2, 7, 12


def calls(program: Program) -> list[str]:
    """Names of the operators left, without shape arithmetic."""
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    names = [str(node.target).split(".")[-2] for node in nodes if "." in str(node.target)]
    return [name for name in names if name != "sym_size"]


def simplified(traced: Callable[..., Any], function: Callable[..., Any], shape: Any) -> list[str]:
    """The operators left of function(x); checks the result bitwise, on other sizes too."""
    program, module = traced(lambda _, x: function(x), torch.randn(shape))
    cleanup(program)
    assert cleanup(program).fired == 0, "a second run still finds something"
    for sizes in ((B, S), (3, 5), (4, 1)):
        x = torch.randn(*sizes, *shape[2:])
        (y,) = run(program, module.get_parameter, x)
        assert torch.equal(y, module(x)), f"{sizes=}"
        assert y.dtype == module(x).dtype
    return calls(program)


NOTHING = {
    "cast to the same dtype": lambda x: x.to(torch.float32) + 1,
    "alias, detach": lambda x: x.detach().alias() + 1 if hasattr(x, "alias") else x.detach() + 1,
    "dropout in eval": lambda x: torch.dropout(x, 0.5, False) + 1,
    "contiguous copy": lambda x: x.contiguous().clone() + 1,
    "whole slice": lambda x: x[:, :, 0:] + 1,
    "expand to itself": lambda x: x.expand(x.shape) + 1,
    "transposed twice": lambda x: x.transpose(1, 2).transpose(-1, 1) + 1,
    "view there and back": lambda x: x.view(*x.shape[:2], 3, 4).view(x.shape) + 1,
    "three views": lambda x: x.view(*x.shape[:2], 3, 4).view(*x.shape[:2], 2, 6).view(x.shape) + 1,
    "dead code": lambda x: (x.sin(), x + 1)[1],
}


@pytest.mark.parametrize("function", NOTHING.values(), ids=NOTHING)
def test_removed(traced: Callable[..., Any], function: Callable[[Tensor], Tensor]) -> None:
    assert simplified(traced, function, (B, S, D)) == ["add"]


SOMETHING = {
    "cast that rounds": (lambda x: x.to(torch.float16).to(torch.float32), ["to", "to"]),
    "slice of a part": (lambda x: x[..., :5], ["slice"]),
    "every second": (lambda x: x[..., ::2], ["slice"]),
    "slice from 1": (lambda x: x[:, :, 1:], ["slice"]),
    "another transpose": (lambda x: x.transpose(1, 2).transpose(0, 1), ["transpose", "transpose"]),
    "expand that repeats": (lambda x: x[..., :1].expand(*x.shape), ["slice", "expand"]),
    "copy into order": (lambda x: x.transpose(1, 2).contiguous(), ["transpose", "contiguous"]),
    "view of a view": (lambda x: x.view(*x.shape[:2], 3, 4).view(-1, D), ["view"]),
    "view of a reshape that copied": (
        lambda x: x.transpose(1, 2).reshape(x.shape[0], -1).view(x.shape[0], 3, -1),
        ["transpose", "reshape"],
    ),
    "cast of the trace's device": (lambda x: x.to("meta", torch.float16), ["to"]),
}


@pytest.mark.parametrize(("function", "left"), SOMETHING.values(), ids=SOMETHING)
def test_kept(
    traced: Callable[..., Any], function: Callable[[Tensor], Tensor], left: list[str],
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    if "device" in request.node.name:  # eager would move to the meta device, the graph must not
        program, module = traced(lambda _, x: function(x), torch.randn(B, S, D))
        cleanup(program)
        x = torch.randn(B, S, D)
        assert torch.equal(run(program, module.get_parameter, x)[0], x.half())
        return
    assert simplified(traced, function, (B, S, D)) == left


def test_equal_calls_merge(traced: Callable[..., Any]) -> None:
    assert simplified(traced, lambda x: x.sin() * x.sin(), (B, S, D)) == ["sin", "mul"]


def test_nearly_equal_calls_do_not(traced: Callable[..., Any]) -> None:
    """1, 1.0 and True are equal in Python and give different dtypes."""
    program, module = traced(lambda _, p: (p * 1, p * 1.0, p + 1), torch.ones(B, S).long())
    cleanup(program)
    x = torch.arange(B * S).view(B, S)
    for y, right in zip(run(program, module.get_parameter, x), module(x), strict=True):
        assert y.dtype == right.dtype
        assert torch.equal(y, right)


def test_random_draws_do_not_merge(traced: Callable[..., Any]) -> None:
    program, _ = traced(lambda _, x: torch.rand_like(x) - torch.rand_like(x), torch.ones(B, S))
    cleanup(program)
    assert calls(program).count("rand_like") == 2


def test_outputs_keep_their_places(traced: Callable[..., Any]) -> None:
    """B51: values that are outputs themselves, twice, or an input."""
    program, module = traced(
        lambda _, x: (x.contiguous(), x.sin(), x.sin(), x.float()), torch.randn(B, S)
    )
    cleanup(program)
    x = torch.randn(3, 4)
    ours, right = run(program, module.get_parameter, x), module(x)
    assert len(ours) == 4
    assert all(map(torch.equal, ours, right))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_whole_models(exported: Callable[..., Any], family: str, dtype: torch.dtype) -> None:
    program, module = exported(family, dtype)
    result = cleanup(program)
    assert result.fired == result.nodes_before - result.nodes_after > 20
    assert not [node for node in program.graph.nodes if node.target in CHECKS]
    assert cleanup(program).fired == 0
    ids = torch.randint(0, 293, (3, 5))
    positions = torch.arange(5).expand(3, 5) + 4
    (logits,) = run(program, module.get_parameter, ids, positions, False)
    eager = module(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert torch.equal(logits, eager)
