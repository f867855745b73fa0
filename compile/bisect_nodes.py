"""Nodes of graphs as a bisection sees them: what makes two equal, what they need, who is to blame.

Knows graphs; of values only the two that a culprit is reported with.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from seekforge.compile.bisect_result import Culprit, limit_of, row_error
from seekforge.passes.cleanup import VIEWS
from seekforge.passes.program import Program, module_path, source_line

aten = torch.ops.aten
# What only moves data: a wrong value behind it comes from before it.
MOVES = {
    *VIEWS, operator.getitem, aten.transpose.int, aten.permute.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.expand.default, aten.clone.default, aten.contiguous.default,
    aten.slice.Tensor, aten.split_with_sizes.default, aten.to.dtype, aten.to.device,
    aten.index_select.default, aten.cat.default,
}  # fmt: skip
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")


@dataclass(frozen=True, slots=True)
class Seen:
    """A node as it was. call: operator and arguments, with weights as they are made. inputs: names
    of what it reads. token_dims: how many of its leading dimensions count sequences and tokens;
    0: they stand elsewhere."""

    call: str
    inputs: tuple[str, ...]
    token_dims: int


def seen(program: Program) -> dict[str, Seen]:
    """Every node of a graph."""
    made = {
        name: f"{weight.sources} {weight.int4} {id(weight.value)} {program.tensor(name).dtype}"
        for name, weight in program.weights.items()
    }
    found = {}
    for node in program.graph.nodes:
        weights = [made.get(str(n.target), "") for n in node.all_input_nodes if n.op == "get_attr"]
        found[node.name] = Seen(
            f"{node.target} {node.args} {node.kwargs} {weights}",
            tuple(n.name for n in node.all_input_nodes),
            _token_dims(node),
        )
    return found


def _token_dims(node: fx.Node) -> int:
    """2 for [sequences, tokens, ...], 1 for [sequences * tokens, ...], else 0."""
    shape: tuple[Any, ...] = tuple(getattr(node.meta.get("val"), "shape", ()))
    free = [i for i, size in enumerate(shape) if isinstance(size, torch.SymInt)]
    if free == [0, 1]:
        return 2
    if free == [0] and len(shape[0].node.expr.free_symbols) > 1:
        return 1
    return 0


def operator_name(node: fx.Node) -> str:
    """`seekforge.rope`, `aten.linear`, `getitem`."""
    return str(getattr(node.target, "__name__", node.target) if node.target is operator.getitem
               else node.target).removesuffix(".default")  # fmt: skip


def layer_of(node: fx.Node) -> int | None:
    return layer_in(module_path(node))


def layer_in(path: str) -> int | None:
    """3 for `model.layers.3.mlp`."""
    found = LAYER.search(path)
    return int(found.group(1)) if found else None


def culprit_node(bad: fx.Node, new: Collection[str]) -> tuple[fx.Node, list[fx.Node]]:
    """Who made a wrong value, and the other new nodes that compute on the way to it.

    new: names of the nodes that a step made. The culprit is the last one that does more than move
    data; where all of them only move it, or none is new, it is the bad node itself.
    """
    region: dict[fx.Node, None] = {}
    queue = [bad] if bad.name in new else []
    while queue:
        node = queue.pop()
        if node in region:
            continue
        region[node] = None
        queue += [n for n in node.all_input_nodes if n.name in new and n.op == "call_function"]
    computing = sorted(n for n in region if n.target not in MOVES)
    if not computing:
        return bad, []
    return computing[-1], computing[:-1]


def mutated(graph: fx.Graph) -> frozenset[str]:
    """Names of nodes whose value is written to after it was made, with all views of them. Pools
    are inputs, and meant to be."""
    bases = set()
    for node in graph.nodes:
        for written in _written(node):
            while written.op == "call_function" and _is_view(written):
                written = written.args[0]  # type: ignore[assignment]
            if written.op == "call_function":
                bases.add(written)
    found, queue = set(bases), list(bases)
    while queue:
        for user in queue.pop().users:
            alias = _is_view(user) and user.args[0] in found
            if user not in found and (alias or set(_written(user)) & found):
                found.add(user)
                queue.append(user)
    return frozenset(node.name for node in found)


def _written(node: fx.Node) -> list[fx.Node]:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    return [
        value
        for argument, value in zip(schema.arguments, node.args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
        and isinstance(value, fx.Node)
    ]  # fmt: skip


def _is_view(node: fx.Node) -> bool:
    if node.target in VIEWS or node.target is operator.getitem:
        return True
    schema: Any = getattr(node.target, "_schema", None)
    return bool(schema and schema.returns and schema.returns[0].alias_info is not None)


def needed_for(
    graph: fx.Graph, wanted: Iterable[fx.Node], known: Mapping[str, Any], unstable: frozenset[str]
) -> set[fx.Node]:
    """The nodes to run for `wanted`: they, and what they read as far as its value is not known.

    Of values that are written to, all that writes or looks at them.
    """
    whole = [node for node in graph.nodes if node.name in unstable]
    found, queue = set[fx.Node](), list(wanted)
    while queue:
        node = queue.pop()
        if node in found:
            continue
        found.add(node)
        queue += [n for n in node.all_input_nodes if n.name not in known]
        if node.name in unstable:
            queue += whole
    return found


def culprit_at(
    step: str, node: fx.Node, reference: Tensor, found: Tensor, detail: str,
    inputs: Mapping[str, Tensor],
) -> Culprit:  # fmt: skip
    """The culprit that a graph's node is. inputs: the node's, by the names they are saved under."""
    return Culprit(
        step=step,
        node=node.name,
        operator=operator_name(node),
        layer=layer_of(node),
        module=module_path(node),
        source=source_line(node),
        error=row_error(reference, found),
        limit=limit_of(found),
        detail=detail,
        tensors={"reference": reference, "found": found, **inputs},
    )
