"""Running a part of a graph on real tensors: symbolic sizes, in-place writes, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from seekforge.passes.program import Program
from seekforge.passes.region import run_region

aten = torch.ops.aten
B, S, D = 3, 5, 6


def middle(m: nn.Module, x: Tensor) -> Tensor:
    return (x.sin().view(x.shape[0] * x.shape[1], D).new_zeros(x.shape[0], 2) + 1).sum() + x.cos()


def assembled(m: nn.Module, x: Tensor) -> Tensor:
    """A tensor written part by part, through a view and through a view of a view."""
    x = x.sin()
    whole = x.new_empty(*x.shape[:-1], 2 * D)
    whole[..., :D].copy_(x)
    whole[:, :, D:][..., : D // 2].copy_(x[..., : D // 2])
    first, second = whole[..., D + D // 2 :].split([1, 2], -1)
    first.fill_(7)
    second.copy_(x[..., :2])
    return whole.exp()


def ends(program: Program, first: Any, last: Any) -> tuple[fx.Node, fx.Node]:
    (start,), (end,) = program.nodes(first), program.nodes(last)
    return start, end


def test_symbolic_sizes(traced: Callable[..., Any]) -> None:
    program, _ = traced(middle, torch.randn(2, 7, D))
    start, end = ends(program, aten.sin.default, aten.sum.default)
    result = run_region([end], {start: torch.randn(B, S, D)})
    assert torch.equal(result[0], torch.tensor(2.0 * B))


def test_in_place_nodes_run(traced: Callable[..., Any]) -> None:
    """Data movement on integers, whatever the dtype of the graph, and `given` is not changed."""
    program, _ = traced(assembled, torch.randn(2, 7, D))
    start, end = ends(program, aten.sin.default, aten.exp.default)
    x = torch.arange(B * S * D).view(B, S, D)
    (whole,) = run_region([end.args[0]], {start: x})
    seven = torch.full((B, S, 1), 7)
    assert torch.equal(whole, torch.cat((x, x[..., : D // 2], seven, x[..., :2]), -1))


def test_writes_into_views_of_given_tensors_stay_inside(traced: Callable[..., Any]) -> None:
    def function(m: nn.Module, x: Tensor) -> Tensor:
        x = x.sin()
        x[..., :2].mul_(2)
        return x.exp()

    program, _ = traced(function, torch.randn(2, 7, D))
    start, end = ends(program, aten.sin.default, aten.mul_.Tensor)
    x = torch.randn(B, S, D)
    (doubled,), kept = run_region([end], {start: x}), x.clone()
    assert torch.equal(doubled, 2 * x[..., :2])
    assert torch.equal(x, kept)


def test_what_is_not_given_is_named(traced: Callable[..., Any]) -> None:
    program, _ = traced(lambda m, x: (x.sin() + m.weight).exp(), torch.randn(2, 7, D),
                        weight=torch.randn(D))  # fmt: skip
    start, end = ends(program, aten.sin.default, aten.exp.default)
    assert run_region([end], {start: torch.randn(B, S, D)}) == "it also reads weight"
    weight = program.graph.find_nodes(op="get_attr")[0]
    given = {start: torch.zeros(B, S, D), weight: torch.zeros(D)}
    assert torch.equal(run_region([end], given)[0], torch.ones(B, S, D))
    del given[start]
    assert run_region([end], given) == "it also reads x0"


def test_a_size_that_is_not_given_is_named(traced: Callable[..., Any]) -> None:
    program, _ = traced(
        lambda m, x: x.sum((0, 1)).sin().expand(x.shape[0], D).exp(), torch.randn(2, 7, D)
    )
    start, end = ends(program, aten.sin.default, aten.exp.default)
    reason = run_region([end], {start: torch.randn(D)})
    assert isinstance(reason, str) and "is not one of the given tensors'" in reason
