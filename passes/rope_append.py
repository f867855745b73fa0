"""rope, then paged_attention of what it rotated -> one rope_paged_attention.

For GPUs, ragged form, after KV-cache insertion: there the rotation and the write into the cache are
one launch. On the CPU Inductor fuses `rope` with its neighbours, which is better left so.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from seekforge.kernels.paged_attention import paged_attention
from seekforge.kernels.rope import rope
from seekforge.kernels.rope_paged_attention import rope_paged_attention
from seekforge.passes.program import Program
from seekforge.passes.rule import PassResult, rewrite_each

aten = torch.ops.aten


def fuse_rope_append(program: Program) -> PassResult:
    """Every paged_attention whose q and k are the two results of one rope, read by nothing else."""
    nodes = program.nodes(paged_attention)
    return rewrite_each("rope_append", program, nodes, _rope_of, _rewrite)


def _rope_of(node: fx.Node) -> tuple[fx.Node] | str:
    """The rope behind a paged_attention, or the reason why it can't be taken in."""
    ropes = []
    for index, name in enumerate("qk"):
        squeezed: Any = node.args[index]
        item = squeezed.args[0] if squeezed.target is aten.squeeze.dim else None
        if not isinstance(item, fx.Node) or item.target is not operator.getitem:
            return f"{name} is {squeezed.target}, not a squeezed result of rope"
        made, which = item.args
        if not isinstance(made, fx.Node) or made.target is not rope or which != index:
            return f"{name} is not result {index} of a rope"
        if len(squeezed.users) > 1 or len(item.users) > 1:
            return f"the rotated {name} is read by something else, too"
        ropes.append(made)
    if ropes[0] is not ropes[1]:
        return "q and k are rotated by two ropes"
    return (ropes[0],)


def _rewrite(program: Program, node: fx.Node, turned: fx.Node) -> None:
    graph = program.graph
    q, k, cos, sin, positions, interleaved = turned.args
    with graph.inserting_before(node):
        q, k, positions = (squeezed(graph, x) for x in (q, k, positions))
        _, _, v, *pools_and_index, scale = node.args
        args = (q, k, v, cos, sin, positions, *pools_and_index, scale, interleaved)
        fused = graph.call_function(rope_paged_attention, args)
    fused.meta = dict(node.meta)
    node.replace_all_uses_with(fused)
    graph.erase_node(node)


def squeezed(graph: fx.Graph, x: Any) -> fx.Node:
    """x [1, ...] without its first dimension, at the graph's insertion point."""
    if x.target is aten.unsqueeze.default and x.args[1] == 0:
        return x.args[0]  # type: ignore[no-any-return]
    made = graph.call_function(aten.squeeze.dim, (x, 0))
    made.meta = {key: x.meta.get(key) for key in ("stack_trace", "nn_module_stack")}
    made.meta["val"] = x.meta["val"].squeeze(0)
    return made
