"""Which layer Inductor compiles wrongly, and which of its nodes.

In: the final graph with its values in one step. Each part of it (what comes before the layers, each
layer, what comes behind) is compiled by itself and run on the right inputs; layers of equal shape
share one package, as their weights are not part of it. Of the first part that is off, every node
becomes an output in a second package. A fault that Inductor makes only across layers, or only
where nothing else reads a value, does not show so.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from seekforge.compile.bisect_graphs import Values
from seekforge.compile.bisect_nodes import culprit_at, layer_of
from seekforge.compile.bisect_result import Culprit, limit_of, row_error
from seekforge.compile.inductor import ONE_TOKEN, Job, compile_package, module_of
from seekforge.compile.run_graph_weights import GraphWeights
from seekforge.passes.kv_cache import RAGGED, GraphInput
from seekforge.passes.program import Program, module_path


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive nodes of the graph. given: what they read from outside. results: which of them
    are read there, or all."""

    nodes: list[fx.Node]
    given: list[fx.Node]
    results: list[fx.Node]


@dataclass(slots=True)
class Packages:
    """Compiled parts by their code; equal code is compiled once."""

    folder: Path
    device: str
    fixed: dict[str, int]
    made: dict[str, tuple[Any, list[str]]] = field(default_factory=dict)

    def run(
        self, program: Program, part: Part, weights: GraphWeights, values: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """{node: value} of the part's results."""
        piece, inputs = _program_of(program, part)
        module = module_of(piece)
        names = [str(node.target) for node in module.graph.find_nodes(op="get_attr")]
        key = _code(piece, module)
        if key not in self.made:
            path = self.folder / f"part-{len(self.made)}.pt2"
            compile_package(Job(module, tuple(inputs), self.device, path, self.fixed))
            package = torch._inductor.aoti_load_package(str(path), run_single_threaded=True)
            self.made[key] = package, names
        package, compiled = self.made[key]
        place = dict(zip(compiled, names, strict=True))
        constants = {
            name: weights.whole(piece, place[name], False).to(self.device)
            for name in package.get_constant_fqns()
        }
        package.load_constants(constants, check_full_update=True, user_managed=True)
        given = [values[entry.name].to(self.device) for entry in inputs]
        found = package.loader.run(given)
        return {n.name: t.cpu() for n, t in zip(part.results, found, strict=True)}


def layer_culprit(
    program: Program, weights: GraphWeights, run: Values, device: str
) -> Culprit | None:
    """The first node that a compiled part gets wrong, or None."""
    assert run.step is not None
    values = {**run.values, **run.inputs}
    one = len(run.inputs["token_ids"]) == 1 and len(run.inputs["logits_rows"]) == 1
    with tempfile.TemporaryDirectory(prefix="seekforge-") as folder:
        packages = Packages(Path(folder), device, ONE_TOKEN if one and device == "cpu" else {})
        for part in parts_of(program):
            found = packages.run(program, part, weights, values)
            bad = _first_off(part.results, found, values)
            if bad is None:
                continue
            every = Part(part.nodes, part.given, [n for n in part.nodes if n.name in run.values])
            all_found = packages.run(program, every, weights, values)
            node = _first_off(every.results, all_found, values)
            alone = node is not None
            node, shown = (node, all_found) if node is not None else (bad, found)
            return _culprit(program, node, values, shown[node.name], run.step.name, alone, weights)
    return None


def parts_of(program: Program) -> Iterator[Part]:
    """The graph in its own order, cut where the layer changes. What has no module (views of the
    inputs, added by passes) goes with what stands before it."""
    nodes: list[fx.Node] = []
    now: int | None = None
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        if module_path(node) and layer_of(node) != now and nodes:
            yield _part(nodes)
            nodes = []
        if module_path(node):
            now = layer_of(node)
        nodes.append(node)
    if nodes:
        yield _part(nodes)


def _part(own: list[fx.Node]) -> Part:
    """Sizes, and results of operators that have several, are computed again where they are read."""
    inside, queue = set(own), list(own)
    while queue:
        for source in queue.pop().all_input_nodes:
            if source.op == "call_function" and source not in inside and not _is_tensor(source):
                inside.add(source)
                queue.append(source)
    nodes = sorted(inside)  # fx orders nodes as they stand
    given: dict[fx.Node, None] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in inside and source.op != "get_attr":
                given[source] = None
    results = [
        node for node in own if any(user not in inside for user in node.users) and _is_tensor(node)
    ]
    return Part(nodes, list(given), results)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _program_of(program: Program, part: Part) -> tuple[Program, list[GraphInput]]:
    """A part as a program of its own, with its inputs."""
    dims = _dim_names(program)
    graph, copies, inputs = fx.Graph(), dict[fx.Node, fx.Node](), list[GraphInput]()
    for node in part.given:
        value = node.meta["val"]
        copies[node] = graph.placeholder(node.name)
        shape = tuple(size if isinstance(size, int) else dims[str(size)] for size in value.shape)
        inputs.append(GraphInput(node.name, value.dtype, shape))
    for node in part.nodes:
        for source in node.all_input_nodes:
            if source.op == "get_attr" and source not in copies:
                copies[source] = graph.node_copy(source)
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in part.results))
    module = fx.GraphModule(program.graph_module, graph)
    names = {str(node.target) for node in graph.find_nodes(op="get_attr")}
    weights = {name: program.weights[name] for name in names}
    return Program(module, weights, {}, "ragged", [i.name for i in inputs]), inputs


def _dim_names(program: Program) -> dict[str, str]:
    """{symbolic size: name of the dimension} of the graph's inputs."""
    found: dict[str, str] = {}
    for node in program.graph.find_nodes(op="placeholder"):
        names: Sequence[str] = RAGGED.get(str(node.target), ("blocks", "block_size"))
        for size, name in zip(node.meta["val"].shape, names, strict=False):
            found.setdefault(str(size), name)
    return found


def _code(program: Program, module: fx.GraphModule) -> str:
    """A graph's text without the names of its nodes and weights."""
    places: dict[fx.Node, int] = {}
    lines = []
    for node in module.graph.nodes:
        args = map_arg((node.args, node.kwargs), lambda n: f"%{places[n]}")
        what = str(node.target) if node.op == "call_function" else node.op
        if node.op == "get_attr":
            tensor = program.tensor(str(node.target))
            what = f"{node.op} {tensor.dtype} {tuple(tensor.shape)}"
        lines.append(f"{what} {args}")
        places[node] = len(places)
    return "\n".join(lines)


def _first_off(
    nodes: Sequence[fx.Node], found: Mapping[str, Tensor], values: Mapping[str, Tensor]
) -> fx.Node | None:
    for node in nodes:
        value, reference = found[node.name], values.get(node.name)
        if reference is None or row_error(reference, value) > limit_of(value):
            return node
    return None


def _culprit(
    program: Program, node: fx.Node, values: Mapping[str, Tensor], found: Tensor, step: str,
    alone: bool, weights: GraphWeights,
) -> Culprit:  # fmt: skip
    told = "" if alone else "only where its layer's other values stay inside; "
    detail = f"{told}Inductor's code gives another value on the right inputs, in the step '{step}'"
    inputs = {
        f"input.{i}.{n.name}": (
            weights.whole(program, str(n.target), False) if n.op == "get_attr" else values[n.name]
        )
        for i, n in enumerate(node.all_input_nodes)
        if n.op == "get_attr" or n.name in values
    }
    return culprit_at("lowered", node, values[node.name], found, detail, inputs)
