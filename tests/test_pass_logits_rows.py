"""Logits of the rows asked for, and heads where that cannot be."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seekforge.compile.execute import run
from seekforge.passes.cleanup import cleanup
from seekforge.passes.linears import LINEAR
from seekforge.passes.logits_rows import select_rows
from seekforge.passes.program import Program
from seekforge.passes.rule import PassResult

B, S, D, VOCAB = 2, 7, 12, 11
ROWS = torch.tensor([13, 0, 6, 6])


def selected(program: Program) -> PassResult:
    cleanup(program)
    with program.graph.inserting_before(program.graph.output_node()):
        rows = program.graph.placeholder("logits_rows")
    first = next(iter(program.graph.nodes))
    first.prepend(rows)
    result = select_rows(program, rows)
    program.graph.lint()
    program.graph_module.recompile()
    return result


HEADS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "linear": lambda m, x: m.head(x),
    "scaled": lambda m, x: m.head(x) * 0.25,
    "divided": lambda m, x: m.head(x) / 3,
    "cast": lambda m, x: m.head(x).to(torch.float64),
}


@pytest.mark.parametrize("name", HEADS)
def test_rows(traced: Callable[..., Any], name: str) -> None:
    """In any order, and twice; the head reads only the rows' hidden states."""
    x = torch.randn(B, S, D)
    program, module = traced(HEADS[name], x, head=nn.Linear(D, VOCAB))
    result = selected(program)
    assert (result.fired, result.misses) == (1, ())
    (head,) = program.nodes(LINEAR)
    assert head.args[0].target is torch.ops.aten.index_select.default
    (logits,) = run(program, module.get_parameter, ROWS, x)
    assert logits.shape == (len(ROWS), VOCAB)
    torch.testing.assert_close(logits, module(x).flatten(0, 1)[ROWS])
    assert run(program, module.get_parameter, ROWS[:0], x)[0].shape == (0, VOCAB)


REFUSED: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], str]] = {
    "soft cap": (lambda m, x: m.head(x).tanh(), "not the output of a linear layer: aten.tanh"),
    "a scale for each token": (lambda m, x: m.head(x) * x[..., :1], "aten.mul"),
    "sum of two heads": (lambda m, x: m.head(x) + m.head(x.sin()), "aten.add"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_heads_are_left(traced: Callable[..., Any], name: str) -> None:
    function, reason = REFUSED[name]
    x = torch.randn(B, S, D)
    program, module = traced(function, x, head=nn.Linear(D, VOCAB))
    result = selected(program)
    assert result.fired == 0
    assert re.search(reason, result.misses[0].reason), result.misses[0].reason
    assert torch.equal(run(program, module.get_parameter, ROWS, x)[0], module(x))
