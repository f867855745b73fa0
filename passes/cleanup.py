"""Clean-up: drops what changes no value, common subexpressions and dead code.

No-op casts, views, transposes, slices and checks go. Runs first, so that fusion patterns see one
spelling whatever the dtype, and after the fusions, which leave transposes that cancel. Nothing here
reorders arithmetic: results stay bitwise the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from seekforge.passes.program import Program, same_shape
from seekforge.passes.rule import PassResult

aten = torch.ops.aten

CHECKS = (
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten.sym_constrain_range_for_size.default,
)


def cleanup(program: Program, name: str = "cleanup") -> PassResult:
    """fired: nodes removed."""
    start, before = time.perf_counter(), len(program.graph.nodes)
    graph = program.graph
    for node in list(graph.nodes):
        if node.target in CHECKS or (node.op == "call_module" and node.target == "_guards_fn"):
            graph.erase_node(node)
    changed = True
    while changed:
        changed = False
        for node in list(graph.nodes):
            simplify = SIMPLIFY.get(node.target)
            value = simplify(node) if simplify else None
            if value is not None and value is not node:
                node.replace_all_uses_with(value)
                graph.erase_node(node)
                changed = True
        changed |= _merge_equal(graph)
    program.drop_unused()
    graph.lint()
    after = len(graph.nodes)
    return PassResult(name, before - after, (), before, after, time.perf_counter() - start)


def _value(node: Any) -> Any:
    return node.meta["val"] if isinstance(node, fx.Node) else node


def _same_shape(a: Any, b: fx.Node) -> bool:
    return same_shape(_value(a), _value(b))


def _cast(node: fx.Node) -> Any:
    source, dtype = node.args[0], _value(node).dtype
    if _value(source).dtype == dtype:
        return source
    # One spelling for patterns. The device in `to.device` is the trace's, not the model's wish.
    node.target, node.args, node.kwargs = aten.to.dtype, (source, dtype), {}
    return None


def _alias(node: fx.Node) -> Any:
    return node.args[0]


def _dropout(node: fx.Node) -> Any:
    training = node.args[2] if len(node.args) > 2 else False
    return None if training else node.args[0]


def _view(node: fx.Node) -> Any:
    source: Any = node.args[0]
    while source.target in VIEWS:  # a view of a view of x is a view of x
        if source.target is aten.reshape.default:  # which may have copied: a plain view could fail
            node.target = aten.reshape.default
        source = source.args[0]
        node.args = (source, *node.args[1:])
    return source if _same_shape(source, node) else None


def _expand(node: fx.Node) -> Any:
    return node.args[0] if _same_shape(node.args[0], node) else None


def _transpose(node: fx.Node) -> Any:
    source: Any = node.args[0]
    if source.target is not aten.transpose.int:
        return None
    rank = _value(node).dim()
    outer = {d % rank for d in node.args[1:]}  # type: ignore[operator]
    inner = {d % rank for d in source.args[1:]}
    return source.args[0] if outer == inner else None


def _contiguous(node: fx.Node) -> Any:
    source: Any = node.args[0]
    return source if _value(source).is_contiguous() else None


def _slice(node: fx.Node) -> Any:
    return node.args[0] if _same_shape(node.args[0], node) and _whole(node) else None


def _whole(node: fx.Node) -> bool:
    """True where a slice starts at 0 with step 1: same shape then means the whole tensor."""
    start: Any = node.args[2] if len(node.args) > 2 else None
    step: Any = node.args[4] if len(node.args) > 4 else 1
    return bool(start in (None, 0) and step == 1)


def _sym_size(node: fx.Node) -> int | None:
    value = _value(node)
    return value if isinstance(value, int) else None


VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)

SIMPLIFY: dict[Any, Callable[[fx.Node], Any]] = {
    aten.to.dtype: _cast,
    aten.to.device: _cast,
    aten.to.dtype_layout: _cast,
    aten._to_copy.default: _cast,
    aten.type_as.default: _cast,
    aten.alias.default: _alias,
    aten.detach.default: _alias,
    aten.clone.default: _contiguous,
    aten.contiguous.default: _contiguous,
    aten.dropout.default: _dropout,
    aten.view.default: _view,
    aten.reshape.default: _view,
    aten.expand.default: _expand,
    aten.transpose.int: _transpose,
    aten.slice.Tensor: _slice,
    aten.sym_size.int: _sym_size,
}


def _merge_equal(graph: fx.Graph) -> bool:
    """Replaces each pure call by an earlier one with equal operator and arguments."""
    seen: dict[Any, fx.Node] = {}
    merged = False
    for node in list(graph.nodes):
        if node.op != "call_function" or _impure(node):
            continue
        key = _hashable((node.target, node.args, node.kwargs))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            merged = True
    return merged


def _impure(node: fx.Node) -> bool:
    """True where two equal calls are not one: they write to an argument, or draw random numbers."""
    schema = getattr(node.target, "_schema", None)
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return random or bool(schema is not None and schema.is_mutable)


def _hashable(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_hashable(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _hashable(item)) for key, item in sorted(value.items()))
    # 1 == 1.0 == True in Python, but not in a graph.
    return value if isinstance(value, fx.Node) else (type(value), value)


def share_equal_weights(program: Program) -> None:
    """One `get_attr` node per weight name (export reads a tied matrix under one of its names)."""
    first: dict[Any, fx.Node] = {}
    for node in list(program.graph.nodes):
        if node.op == "get_attr" and first.setdefault(node.target, node) is not node:
            node.replace_all_uses_with(first[node.target])
            program.graph.erase_node(node)
