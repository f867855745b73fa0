"""The rule engine: applies a rule everywhere it matches and accounts for where it does not.

A rule is data: a pattern, the operator that marks a candidate (its anchor), a check that may refuse
a match with a reason, and the rewrite. Values that something else still reads are kept: a rewrite
replaces the uses of the root, and only dead nodes are removed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from seekforge.passes.pattern import Match, Miss, Pattern, match
from seekforge.passes.program import Program, source_line


@dataclass(frozen=True, slots=True)
class PassResult:
    """What one pass did. misses: candidates left as they were, each with the reason."""

    name: str
    fired: int
    misses: tuple[Miss, ...] = ()
    nodes_before: int = 0
    nodes_after: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Rule:
    """name: of the pass. root: operator of the pattern's last node. anchor: operator that marks a
    candidate.

    check returns the reason to refuse a match, or None; rewrite changes the graph for one match.
    """

    name: str
    root: Any
    anchor: Any
    pattern: Pattern
    rewrite: Callable[[Program, Match], None]
    check: Callable[[Program, Match], str | None] = lambda program, found: None


def apply(rule: Rule, program: Program) -> PassResult:
    """Applies `rule` to every match in `program`; dead nodes and unread weights are removed."""
    start, before = time.perf_counter(), len(program.graph.nodes)
    fired = 0
    covered: set[fx.Node] = set()
    failures: list[tuple[fx.Node, Miss]] = []
    for root in program.nodes(rule.root):
        found = match(rule.pattern, root)
        if isinstance(found, Miss):
            failures.append((root, found))
            continue
        refused = rule.check(program, found)
        if refused:
            failures.append((root, Miss(root.name, refused, source_line(root), len(found.nodes))))
            continue
        covered.update(found.nodes)
        rule.rewrite(program, found)
        fired += 1
    misses = tuple(
        _reason(anchor, failures) for anchor in program.nodes(rule.anchor) if anchor not in covered
    )
    program.drop_unused()
    program.graph.lint()
    return PassResult(
        rule.name, fired, misses, before, len(program.graph.nodes), time.perf_counter() - start
    )


def rewrite_each(
    name: str,
    program: Program,
    candidates: Iterable[fx.Node],
    find: Callable[[fx.Node], Any],
    rewrite: Callable[..., None],
) -> PassResult:
    """For what no pattern describes. find: what `rewrite` takes behind the program and the
    candidate, as a tuple, or the reason why this one stays as it is."""
    start, before = time.perf_counter(), len(program.graph.nodes)
    fired, misses = 0, []
    for node in candidates:
        found = find(node)
        if isinstance(found, str):
            misses.append(Miss(node.name, found, source_line(node), 1))
            continue
        rewrite(program, node, *found)
        fired += 1
    program.drop_unused()
    program.graph.lint()
    after = len(program.graph.nodes)
    return PassResult(name, fired, tuple(misses), before, after, time.perf_counter() - start)


def _reason(anchor: fx.Node, failures: list[tuple[fx.Node, Miss]]) -> Miss:
    """The deepest failure among the roots that the anchor leads to within a few steps."""
    reach, frontier = {anchor}, [anchor]
    for _ in range(6):
        frontier = [user for node in frontier for user in node.users if user not in reach]
        reach.update(frontier)
    near = [miss for root, miss in failures if root in reach]
    if not near:
        return Miss(anchor.name, "nothing of the pattern follows it", source_line(anchor))
    return max(near, key=lambda miss: miss.depth)
