"""What the passes did to the graph, layer by layer, as the report shows it.

`Recorder.observe` watches the pipeline; the backend's part is added when it is known. Out: plain
data in which layers that went through the same are told once, so it does not grow with depth.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from seekforge.compile.report_links import links
from seekforge.compile.report_nodes import ShownNode, shown_layers
from seekforge.passes.pipeline import Observer
from seekforge.passes.program import Program


@dataclass(frozen=True, slots=True)
class Lowered:
    """One thing of the backend's: a node of its own graph, a kernel, a call. made_from: names of
    the final graph's nodes, where that is known. layer: where nothing is."""

    name: str
    kind: str
    made_from: tuple[str, ...]
    layer: int | None = None


@dataclass(slots=True)
class Recorder:
    """num_layers: of the model. steps: each pass's name, and by layer the graph that it left.
    lowered: a title, and what the backend made of the last graph."""

    num_layers: int
    steps: list[tuple[str, list[list[ShownNode]]]] = field(default_factory=list)
    lowered: list[tuple[str, list[Lowered]]] = field(default_factory=list)

    def observe(self, name: str, program: Program) -> None:
        layers = shown_layers(program, self.num_layers)
        if self.steps:  # most nodes are as they were: keep one object of each
            known = {node: node for layer in self.steps[-1][1] for node in layer}
            layers = [[known.get(node, node) for node in layer] for layer in layers]
        self.steps.append((name, layers))

    def beside(self, other: Observer) -> Observer:
        """An observer that calls `other`, then this one."""

        def both(name: str, program: Program) -> None:
            other(name, program)
            self.observe(name, program)

        return both

    def data(self) -> dict[str, Any]:
        """sources: [line, function, code]. nodes: [name, operator, args, shape, module, source]
        with an index into sources or -1. kinds: layers, and their steps. A step has "name", "nodes"
        (indices; missing: as before) and "links": [position before, position after, or where in
        another layer]. lowered: {"title", "items": [name, kind], "links"} by positions too.
        """
        table = _Table()
        changes = [self._links(at) for at in range(1, len(self.steps))]
        homes = {n.name: i for i, layer in enumerate(self._last()) for n in layer}
        placed = [(title, items, _layers(items, homes)) for title, items in self.lowered]
        kinds = []
        for layers in self._alike():
            first, steps = layers[0], []
            before: list[ShownNode] = []
            for at, (name, graph) in enumerate(self.steps):
                nodes = graph[first]
                step: dict[str, Any] = {"name": name}
                if at == 0 or nodes != before:
                    step["nodes"] = [table.node(node) for node in nodes]
                    step["links"] = _here(changes[at - 1], before, nodes, graph) if at else []
                steps.append(step)
                before = nodes
            lowered = [
                _lowered(title, items, homes_, first, before) for title, items, homes_ in placed
            ]
            kinds.append({"layers": self._label(layers), "count": len(layers), "steps": steps,
                          "lowered": lowered})  # fmt: skip
        return {"sources": table.sources, "nodes": table.nodes, "kinds": kinds}

    def _last(self) -> list[list[ShownNode]]:
        return self.steps[-1][1] if self.steps else []

    def _links(self, at: int) -> list[tuple[str, str]]:
        before, after = (list(itertools.chain(*self.steps[i][1])) for i in (at - 1, at))
        return links(before, after)

    def _alike(self) -> list[list[int]]:
        """Layers with the same operators in every graph; the last, of nothing, by itself."""
        kinds: dict[Hashable, list[int]] = defaultdict(list)
        for layer in range(self.num_layers + 1 if self.steps else 0):
            history = tuple(
                tuple((node.operator, node.shape, len(node.refs)) for node in graph[layer])
                for _, graph in self.steps
            )
            kinds[layer == self.num_layers, history].append(layer)
        return list(kinds.values())

    def _label(self, layers: Sequence[int]) -> str:
        """`0`, `1-29`, `1, 4-6`; empty for what belongs to no layer."""
        if layers[0] == self.num_layers:
            return ""
        runs: list[list[int]] = []
        for layer in layers:
            if runs and layer == runs[-1][-1] + 1:
                runs[-1].append(layer)
            else:
                runs.append([layer])
        return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


@dataclass(slots=True)
class _Table:
    """Equal nodes and sources are written once."""

    nodes: list[list[Any]] = field(default_factory=list)
    sources: list[list[str]] = field(default_factory=list)
    known: dict[Any, int] = field(default_factory=dict)

    def node(self, node: ShownNode) -> int:
        if node not in self.known:
            self.known[node] = len(self.nodes)
            source = -1 if node.source is None else self._source(node)
            self.nodes.append(
                [node.name, node.operator, node.args, node.shape, node.module, source]
            )
        return self.known[node]

    def _source(self, node: ShownNode) -> int:
        if node.source not in self.known:
            self.known[node.source] = len(self.sources)
            self.sources.append(list(node.source or ()))
        return self.known[node.source]


def _here(
    pairs: Iterable[tuple[str, str]],
    before: Sequence[ShownNode],
    after: Sequence[ShownNode],
    graph: Sequence[Sequence[ShownNode]],
) -> list[list[Any]]:
    """The pairs that start in this layer; those that end in others as text."""
    old, new = (_positions(nodes) for nodes in (before, after))
    found: dict[str, list[str]] = defaultdict(list)
    for was, now in pairs:
        if was in old:
            found[was].append(now)
    made: list[list[Any]] = []
    for was, became in found.items():
        made += [[old[was], new[now]] for now in became if now in new]
        away = [now for now in became if now not in new]
        if len(away) == 1:
            layer = next(
                i for i, nodes in enumerate(graph) if any(n.name == away[0] for n in nodes)
            )
            where = f"layer {layer}" if layer < len(graph) - 1 else "outside the layers"
            made.append([old[was], f"{away[0]}, {where}"])
        elif away:
            made.append([old[was], f"{len(away)} nodes of other layers"])
    return made


def _positions(nodes: Sequence[ShownNode]) -> dict[str, int]:
    return {node.name: at for at, node in enumerate(nodes)}


def _layers(items: Sequence[Lowered], homes: dict[str, int]) -> list[set[int]]:
    """The layers of each item: those of the nodes it was made from, else its own."""
    placed = []
    for item in items:
        found = {homes[name] for name in item.made_from if name in homes}
        placed.append(found or ({item.layer} if item.layer is not None else set()))
    return placed


def _lowered(
    title: str, items: Sequence[Lowered], layers: Sequence[set[int]], layer: int,
    nodes: Sequence[ShownNode],
) -> dict[str, Any]:  # fmt: skip
    mine = [item for item, found in zip(items, layers, strict=True) if layer in found]
    at = _positions(nodes)
    return {
        "title": title,
        "items": [[item.name, item.kind] for item in mine],
        "links": [[at[n], i] for i, item in enumerate(mine) for n in item.made_from if n in at],
    }
