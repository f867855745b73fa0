"""Each graph of the pipeline against the one before it, node by node, in one evaluation each.

In: a program as each pass leaves it. The values of the graph before are the reference. Only what a
pass touched is computed: nodes that are new, or read something else now. A node that both graphs
have must give what it gave; what follows is then computed from the reference, so that errors don't
add up, no later node is blamed, and a rounding that sends a token to another expert stays where it
is. Passes keep the names of the nodes they leave alone, and no name is used twice.

Where a node that both graphs have differs, its inputs are looked at one by one: the first that
differs from the input it had before is the result of the fault, and the operator that made it among
the new nodes is the culprit. KV-cache insertion changes every shape: from there on each value is
compared by rows of tokens, in the steps of `bisect_steps.py`, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from seekforge.compile.bisect_nodes import (
    Seen,
    culprit_at,
    culprit_node,
    mutated,
    needed_for,
    seen,
)
from seekforge.compile.bisect_result import Culprit, Found, limit_of, row_error
from seekforge.compile.bisect_steps import PagedStep
from seekforge.compile.run_graph import GraphRunner
from seekforge.compile.run_graph_weights import GraphWeights
from seekforge.passes.program import Program

LARGEST_SAVED = 1 << 28  # bytes of a weight that is saved with the culprit
MOST_NAMED = 6  # nodes on the way to it


@dataclass(slots=True)
class Values:
    """What the nodes of the present graph give in one step: {node name: value}."""

    step: PagedStep | None  # None: before KV-cache insertion
    inputs: dict[str, Tensor]
    values: dict[str, Tensor] = field(default_factory=dict)


class GraphWalk:
    """Follows a program through the passes. `runs`: one before KV-cache insertion, then one for
    each paged step. worst: the largest share of its limit that a judgement came to in this pass."""

    def __init__(self, weights: GraphWeights, inputs: dict[str, Tensor]) -> None:
        self.weights = weights
        self.runs = [Values(None, inputs)]
        self.seen: dict[str, Seen] = {}
        self.new = True  # no graph was before the present one
        self.worst = 0.0

    def begin(self, program: Program, given: Mapping[str, Tensor] | None = None) -> None:
        """The exported graph's own values; where `given`, those of the nodes it names must be
        equal, and are taken instead. Raises Found."""
        self.seen = seen(program)
        self.worst = 0.0
        (run,) = self.runs
        run.values = dict(given or {})
        self._evaluate("exported", program, run, program.graph.nodes, frozenset(run.values))
        self.new = False

    def compare(self, name: str, program: Program) -> None:
        """The graph after pass `name` against the one before. Raises Found."""
        now = seen(program)
        changed = [
            node
            for node in program.graph.nodes
            if node.op != "placeholder" and self.seen.get(node.name) != now[node.name]
        ]
        self.worst = 0.0
        for run in self.runs:
            self._evaluate(name, program, run, changed, frozenset(self.seen))
            run.values = {n: value for n, value in run.values.items() if n in now}
        self.seen = now

    def page(self, name: str, program: Program, steps: list[PagedStep]) -> None:
        """The graph after KV-cache insertion, in paged steps, against that before. Raises Found."""
        now = seen(program)
        (before,) = self.runs
        self.worst, self.runs = 0.0, []
        for step in steps:
            run = Values(step, step.inputs, self._rows(before.values, step))
            self._evaluate(name, program, run, program.graph.nodes, frozenset(self.seen))
            run.values = {n: value for n, value in run.values.items() if n in now}
            step.keep(outputs_of(program, run.values))
            self.runs.append(run)
        self.seen = now

    def _rows(self, values: Mapping[str, Tensor], step: PagedStep) -> dict[str, Tensor]:
        """Of values whose first dimensions are sequences and tokens those of the step's tokens."""
        found = {}
        for name, value in values.items():
            lead = self.seen[name].token_dims
            if lead:
                found[name] = value.flatten(0, lead - 1)[step.rows]
        return found

    def _evaluate(
        self, name: str, program: Program, run: Values, nodes: Iterable[fx.Node],
        common: frozenset[str],
    ) -> None:  # fmt: skip
        judge = _Judge(self, name, program, run, common)
        unstable = mutated(program.graph)
        wanted = [node for node in nodes if node.op == "call_function"]
        stays = {n: v for n, v in run.values.items() if n not in unstable}
        needed = needed_for(program.graph, wanted, stays, unstable)
        env: dict[fx.Node, Any] = {}
        for node in program.graph.nodes:
            if node not in needed:
                env[node] = stays.get(node.name)
        with torch.no_grad():
            _Settling(program, self.weights, judge).run_from(run.inputs, env)
        judge.outputs()
        run.values |= judge.made


class _Settling(GraphRunner):
    """Runs what is not known yet; the judge says what the graph goes on with."""

    def __init__(self, program: Program, weights: GraphWeights, judge: _Judge) -> None:
        super().__init__(program, weights, lambda node: False, wide=False)
        self.judge = judge

    def run_from(self, inputs: Mapping[str, Tensor], env: dict[fx.Node, Any]) -> None:
        self.given = inputs
        self.run(initial_env=env, enable_io_processing=False)

    def run_node(self, n: fx.Node) -> Any:
        return self.judge.settle(n, super().run_node(n))


class _Judge:
    """Compares values as they are computed and says what the graph goes on with."""

    def __init__(
        self, walk: GraphWalk, step: str, program: Program, run: Values, common: frozenset[str]
    ) -> None:
        self.walk, self.step, self.program, self.run = walk, step, program, run
        self.common = common
        self.unstable = mutated(program.graph)
        self.made: dict[str, Tensor] = {}

    def settle(self, node: fx.Node, value: Any) -> Any:
        if not isinstance(value, Tensor) or node.op != "call_function":
            return value
        if node.name in self.unstable:
            return value
        reference = self.run.values.get(node.name) if node.name in self.common else None
        if reference is None or reference.numel() != value.numel():
            self.made[node.name] = value
            return value
        reference = reference.reshape(value.shape)
        if not self._within(reference, value):
            raise Found(self._culprit(node, reference, value))
        self.made[node.name] = reference
        return reference.clone() if self.unstable else reference  # what is copied into may be read

    def _within(self, reference: Tensor, value: Tensor) -> bool:
        error, limit = row_error(reference, value), limit_of(value)
        share = error / limit if limit else error
        self.walk.worst = max(self.walk.worst, share)
        return share <= 1

    def outputs(self) -> None:
        """The graph's outputs may be new nodes, which nothing else compares."""
        node = self.program.graph.output_node()
        for value, reference, found in self._pairs(node):
            if not self._within(reference, found):
                raise Found(self._culprit(value, reference, found))

    def _pairs(self, node: fx.Node) -> list[tuple[fx.Node, Tensor, Tensor]]:
        """(input, its reference, its value) of those inputs of `node` that were another node
        before. Inputs correspond by their places."""
        before = self.walk.seen.get(node.name)
        now = node.all_input_nodes
        if before is None or len(before.inputs) != len(now):
            return []
        pairs = []
        for old, new in zip(before.inputs, now, strict=True):
            reference, found = self.run.values.get(old), self.made.get(new.name)
            if old == new.name or reference is None or found is None:
                continue
            if reference.numel() == found.numel():
                pairs.append((new, reference.reshape(found.shape), found))
        return pairs

    def _culprit(self, node: fx.Node, reference: Tensor, found: Tensor) -> Culprit:
        """node: what both graphs have, or an output, whose value is off."""
        first, where = node, f"{node.name} is not what it was"
        for value, good, bad in self._pairs(node):
            if row_error(good, bad) > limit_of(bad):
                first, reference, found = value, good, bad
                where = f"{node.name} reads {value.name}, which is not what it read before"
                break
        new = {n.name for n in self.program.graph.nodes} - self.common
        if self.walk.new:  # nothing was before: between two known values all nodes are
            new.add(node.name)
        culprit, others = culprit_node(first, new)
        if first is node and culprit is node:
            where = "its inputs are those it had before this step"
        step = self.run.step
        if step is not None:
            where += f", in the step '{step.name}'"
        parts = [self._described(other) for other in (*others[-MOST_NAMED:], culprit)]
        detail = f"{where}; new on the way from what is right: {', '.join(parts)}"
        return culprit_at(self.step, culprit, reference, found, detail, self._inputs(culprit))

    def _described(self, node: fx.Node) -> str:
        """The node, and of a fused weight what it is made of."""
        made = []
        for source in node.all_input_nodes:
            weight = (
                self.program.weights.get(str(source.target)) if source.op == "get_attr" else None
            )
            if weight is not None and len(weight.sources) > 1:
                shown = [name.removesuffix(".weight") for name in weight.sources[:4]]
                more = ", …" if len(weight.sources) > 4 else ""
                made.append(f" of [{', '.join(shown)}{more}]")
        return node.name + "".join(made)

    def _inputs(self, node: fx.Node) -> dict[str, Tensor]:
        found = {}
        for index, source in enumerate(node.all_input_nodes):
            value = self.made.get(source.name, self.run.values.get(source.name))
            if source.op == "placeholder":
                value = self.run.inputs.get(source.name)
            if (
                source.op == "get_attr"
                and self.program.tensor(str(source.target)).nbytes <= LARGEST_SAVED
            ):
                value = self.walk.weights.whole(self.program, str(source.target), False)
            if isinstance(value, Tensor):
                found[f"input.{index}.{source.name}"] = value
        return found


def outputs_of(program: Program, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The graph's outputs by name."""
    nodes: Any = program.graph.output_node().args[0]
    return {name: values[node.name] for name, node in zip(program.outputs, nodes, strict=True)}
