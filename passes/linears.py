"""Several linear layers with one input become one product: what QKV and gate-up fusion share.

linear(x, W1, b1), linear(x, W2, b2)  ->  split(linear(x, [W1; W2], [b1; b2]))
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from seekforge.passes.program import Program, Weight

aten = torch.ops.aten
LINEAR = aten.linear.default


def bias_of(linear: fx.Node) -> Any:
    return linear.args[2] if len(linear.args) > 2 else None


def cannot_concatenate(
    program: Program, linears: Sequence[fx.Node], mixed_bias: bool = False
) -> str | None:
    """The reason why these linear nodes can't become one, or None. mixed_bias: a bias on some only
    is no reason."""
    inputs = {node.args[0] for node in linears}
    if len(inputs) > 1:
        return f"inputs differ: {', '.join(sorted(str(node) for node in inputs))}"
    for node in linears:
        for operand in (node.args[1], bias_of(node)):
            if operand is not None and not _from_checkpoint(program, operand):
                return f"{operand} is not a weight of the checkpoint"
    biased = [bias_of(node) is not None for node in linears]
    if any(biased) != all(biased) and not mixed_bias:
        return f"bias on some only: {dict(zip(map(str, linears), biased, strict=True))}"
    dtypes = {_meta(node.args[1]).dtype for node in linears}
    if len(dtypes) > 1:
        return f"dtypes differ: {', '.join(sorted(map(str, dtypes)))}"
    return None


def concatenate(program: Program, linears: Sequence[fx.Node], name: str) -> fx.Node:
    """Inserts the fused linear (its weight is `<name>.weight`) before the first of `linears`;
    returns it."""
    name = name.lstrip(".")  # a projection of the outermost module
    operands = [[node.args[1] for node in linears]]
    if bias_of(linears[0]) is not None:
        operands.append([bias_of(node) for node in linears])
    fused: list[fx.Node] = []
    for kind, nodes in zip(("weight", "bias"), operands, strict=False):
        metas = [_meta(node) for node in nodes]
        shape = (sum(meta.shape[0] for meta in metas), *metas[0].shape[1:])
        sources = tuple(s for node in nodes for s in program.weights[str(node.target)].sources)  # type: ignore[union-attr]
        fused.append(program.add_weight(f"{name}.{kind}", shape, metas[0].dtype, Weight(sources)))
    first = min(linears)  # fx orders nodes as they stand
    with program.graph.inserting_before(first):
        return program.emit(LINEAR, linears[0].args[0], *fused, like=first)


def separate_biases(program: Program, linears: Sequence[fx.Node]) -> list[fx.Node]:
    """`linears` without biases, where only some have one: those are added behind the product."""
    if len({bias_of(node) is None for node in linears}) == 1:
        return list(linears)
    plain = []
    for node in linears:
        x, weight, *bias = node.args
        if bias:
            with program.graph.inserting_before(node):
                product = program.emit(LINEAR, x, weight, like=node)
                added = program.emit(aten.add.Tensor, product, *bias, like=node)
            node.replace_all_uses_with(added)
            program.graph.erase_node(node)
            node = product
        plain.append(node)
    return plain


def replace_by_split(program: Program, linears: Sequence[fx.Node], fused: fx.Node) -> None:
    """Replaces `linears` by the parts of `fused`, in their order."""
    widths = [_meta(node).shape[-1] for node in linears]
    with program.graph.inserting_after(fused):
        parts = program.emit(aten.split_with_sizes.default, fused, widths, -1, like=fused)
    for index, node in reversed(list(enumerate(linears))):
        with program.graph.inserting_after(parts):
            part = program.emit(operator.getitem, parts, index, like=node)
        node.replace_all_uses_with(part)


def _meta(node: Any) -> torch.Tensor:
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value


def _from_checkpoint(program: Program, node: Any) -> bool:
    return node.op == "get_attr" and bool(program.weights[str(node.target)].sources)
