"""Runs a part of a graph on real tensors: how a pass proves that a region computes what it thinks.

A region's boundary is found from the graph's structure; what lies inside may be spelled in many
ways. Running it and comparing with the operator that is to replace it settles what it computes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx


def run_region(outputs: Sequence[fx.Node], given: Mapping[fx.Node, Tensor]) -> list[Tensor] | str:
    """The values of `outputs` when the nodes of `given` have these values, on the CPU.

    Runs the nodes in between, with those that write into one of them (copy_, scatter_, div_),
    wherever in the graph they stand; the tensors of `given` stay as they are. Symbolic sizes take
    their values from the shapes of `given`. dtypes of `given` are free. Returns the reason as text
    where the region needs something that is not given.
    """
    sizes: dict[Any, int] = {}
    for node, tensor in given.items():
        for symbolic, size in zip(node.meta["val"].shape, tensor.shape, strict=True):
            if isinstance(symbolic, torch.SymInt):
                sizes[symbolic.node.expr] = size
    env: dict[fx.Node, Any] = {node: tensor.clone() for node, tensor in given.items()}
    for node in sorted(region_between(outputs, given)):  # fx orders nodes as they stand
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            size = value.node.expr
            size = sizes[size] if size in sizes else size.subs(sizes)
            if not isinstance(size, int) and not size.is_number:
                return f"the size {node.name} is not one of the given tensors'"
            env[node] = int(size)
        elif node.op != "call_function":
            return f"it also reads {node.name}"
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = node.target(*map(_on_cpu, args), **{k: _on_cpu(kwargs[k]) for k in kwargs})  # type: ignore[operator]
    return [env[node] for node in outputs]


def region_between(
    outputs: Sequence[fx.Node], given: Mapping[fx.Node, Any] | set[fx.Node]
) -> set[fx.Node]:
    """All nodes that `outputs` depend on, up to `given`, and the in-place nodes that write into
    them or into a view of them."""
    region: set[fx.Node] = set()
    queue = list(outputs)
    while queue:
        node = queue.pop()
        if node in region or node in given:
            continue
        region.add(node)
        if isinstance(node.meta.get("val"), torch.SymInt):
            continue  # its value comes from the shapes
        queue += node.all_input_nodes
        queue += [user for user in node.users if _writes_into(user, node) or _leads_to_write(user)]
    return region


def sources(node: fx.Node, through: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """Where the data of `node` comes from: its nearest ancestors that are not `through`, with those
    of what is written into them. Sizes are no data."""
    found: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    queue = [node]
    while queue:
        current = queue.pop()
        if current in seen or isinstance(current.meta.get("val"), torch.SymInt):
            continue
        seen.add(current)
        if not through(current):
            found.add(current)
            continue
        queue += current.all_input_nodes
        queue += [
            user for user in current.users if _writes_into(user, current) or _leads_to_write(user)
        ]
    return found


def numbered(nodes: Sequence[fx.Node]) -> dict[fx.Node, Tensor]:
    """Tensors of the nodes' shapes whose elements are all different: 0, 1, 2, … through all nodes.

    A region that only moves data shows with them where each element of its outputs comes from.
    Symbolic sizes become 2, 3, 4 …
    """
    sizes: dict[Any, int] = {}
    start, made = 0, {}
    for node in nodes:
        shape = []
        for size in node.meta["val"].shape:
            if isinstance(size, torch.SymInt):
                for symbol in sorted(size.node.expr.free_symbols, key=str):
                    sizes.setdefault(symbol, 2 + len(sizes))
                size = int(size.node.expr.subs(sizes))
            shape.append(size)
        count = math.prod(shape)
        made[node] = torch.arange(start, start + count).view(shape)
        start += count
    return made


def writes(node: fx.Node) -> bool:
    """True for an operator that writes into its first argument."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _writes_into(node: fx.Node, target: fx.Node) -> bool:
    return writes(node) and node.args[0] is target


def _leads_to_write(node: fx.Node) -> bool:
    """A view of a tensor, or a view of that, through which something is written."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        if node.target is not operator.getitem:  # a part of a split
            return False
    elif not schema.returns or schema.returns[0].alias_info is None:
        return False
    return any(_writes_into(user, node) or _leads_to_write(user) for user in node.users)


def _on_cpu(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value  # traced on meta
