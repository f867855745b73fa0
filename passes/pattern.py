"""Patterns over ATen graphs: trees of calls with named holes, matched from the root backwards.

A match binds names to nodes or numbers. A failed match says where and why, which the report shows
as the reason of a near-miss. Matching never changes the graph.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from seekforge.passes.program import source_line

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Miss:
    """Why a pattern does not match: the node it failed at, the reason, and how many calls had
    matched."""

    node: str
    reason: str
    source: str
    depth: int = 0


@dataclass(slots=True)
class Match:
    """Names to nodes or numbers, and the call nodes that the pattern covered (root first)."""

    bound: dict[str, Any] = field(default_factory=dict)
    nodes: list[fx.Node] = field(default_factory=list)

    def __getitem__(self, name: str) -> Any:
        return self.bound[name]

    def copy(self) -> Match:
        return Match(dict(self.bound), list(self.nodes))


class Pattern:
    """Matches one argument of a node: another node, or a literal."""

    def match(self, value: Any, so_far: Match, at: fx.Node) -> Match | Miss:
        """Extends so_far, or says why not; `at` is the consumer of `value`."""
        raise AssertionError("abstract")


@dataclass(frozen=True, slots=True)
class Var(Pattern):
    """Any node; a second use of the name must be the same node."""

    name: str
    weight: bool = False

    def match(self, value: Any, so_far: Match, at: fx.Node) -> Match | Miss:
        if not isinstance(value, fx.Node):
            return _miss(at, f"{self.name}: expected a tensor, found {value!r}", so_far)
        if self.weight and value.op != "get_attr":
            return _miss(at, f"{self.name}: expected a weight, found {describe(value)}", so_far)
        known = so_far.bound.get(self.name, value)
        if known is not value:
            return _miss(at, f"{self.name} is {known} in one place and {value} in another", so_far)
        found = so_far.copy()
        found.bound[self.name] = value
        return found


@dataclass(frozen=True, slots=True)
class Number(Pattern):
    """A literal number; a second use of the name must be the same number."""

    name: str

    def match(self, value: Any, so_far: Match, at: fx.Node) -> Match | Miss:
        if not isinstance(value, (int, float)):
            return _miss(at, f"{self.name}: expected a number, found {value}", so_far)
        known = so_far.bound.get(self.name, value)
        if known != value:
            return _miss(at, f"{self.name} is {known} in one place and {value} in another", so_far)
        found = so_far.copy()
        found.bound[self.name] = value
        return found


@dataclass(frozen=True, slots=True)
class Literal(Pattern):
    """Exactly this value (numbers, lists of numbers, booleans)."""

    value: Any

    def match(self, value: Any, so_far: Match, at: fx.Node) -> Match | Miss:
        if isinstance(value, fx.Node) or value != self.value:
            return _miss(at, f"expected {self.value}, found {value}", so_far)
        return so_far


class Anything(Pattern):
    """Any argument, not looked at."""

    def match(self, value: Any, so_far: Match, at: fx.Node) -> Match | Miss:
        return so_far


@dataclass(frozen=True, slots=True)
class Cast(Pattern):
    """The inner pattern, under one change of dtype or none (fp32 graphs have none).

    name: bound to the value after the cast.
    """

    inner: Pattern
    name: str

    def match(self, value: Any, so_far: Match, at: fx.Node) -> Match | Miss:
        found = self.inner.match(skip_cast(value), so_far, at)
        return Var(self.name).match(value, found, at) if isinstance(found, Match) else found


@dataclass(frozen=True, slots=True)
class Sequence(Pattern):
    """A list argument, element by element."""

    items: tuple[Pattern, ...]

    def match(self, value: Any, so_far: Match, at: fx.Node) -> Match | Miss:
        if not isinstance(value, (list, tuple)) or len(value) != len(self.items):
            return _miss(at, f"expected a list of {len(self.items)}, found {value}", so_far)
        return _match_all(self.items, value, so_far, at)


class Call(Pattern):
    """A call of one operator. Arguments beyond those given must be absent; `commutes` tries both
    orders."""

    def __init__(self, target: Any, *args: Pattern, commutes: bool = False) -> None:
        self.target, self.args, self.commutes = target, args, commutes

    def match(self, value: Any, so_far: Match, at: fx.Node) -> Match | Miss:
        if not isinstance(value, fx.Node) or value.target != self.target:
            return _miss(at, f"expected {name_of(self.target)}, found {describe(value)}", so_far)
        if value.kwargs:
            return _miss(value, f"unexpected arguments {dict(value.kwargs)}", so_far)
        if len(value.args) != len(self.args):
            return _miss(value, f"expected {len(self.args)} arguments, found {value.args}", so_far)
        here = so_far.copy()
        here.nodes.append(value)
        orders = [self.args, self.args[::-1]] if self.commutes else [self.args]
        best: Miss | None = None
        for order in orders:
            result = _match_all(order, value.args, here, value)
            if isinstance(result, Match):
                return result
            if best is None or result.depth > best.depth:
                best = result
        assert best is not None
        return best


def match(pattern: Pattern, root: fx.Node) -> Match | Miss:
    """Matches `pattern` with `root` as its last node."""
    return pattern.match(root, Match(), root)


def skip_cast(value: Any) -> Any:
    """The node before one change of dtype, or the value itself; a second cast is a rounding."""
    if isinstance(value, fx.Node) and value.target is aten.to.dtype:
        return value.args[0]
    return value


def name_of(target: Any) -> str:
    if target is operator.getitem:
        return "getitem"
    return str(target).removeprefix("torch.ops.").removesuffix(".default")


def describe(value: Any) -> str:
    if not isinstance(value, fx.Node):
        return repr(value)
    what = name_of(value.target) if value.op == "call_function" else value.op
    return f"{what} ({value.name})"


def _match_all(patterns: Any, values: Any, so_far: Match, at: fx.Node) -> Match | Miss:
    for pattern, value in zip(patterns, values, strict=True):
        result = pattern.match(value, so_far, at)
        if isinstance(result, Miss):
            return result
        so_far = result
    return so_far


def _miss(node: fx.Node, reason: str, so_far: Match) -> Miss:
    return Miss(node.name, reason, source_line(node), len(so_far.nodes))
