"""rms_norm of the latent, rope, then paged_mla_attention of both -> one rope_paged_mla_attention.

For GPUs, ragged form, after KV-cache insertion: there norm, rotation, the write into the cache and
the query's product with W_UK are one launch. rope_append.py does the same for other attention.
Seen in DeepSeek-V2 and V3.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from seekforge.kernels.paged_mla_attention import paged_mla_attention
from seekforge.kernels.rms_norm import rms_norm
from seekforge.kernels.rope import rope
from seekforge.kernels.rope_paged_mla_attention import rope_paged_mla_attention
from seekforge.passes.cleanup import VIEWS
from seekforge.passes.pattern import describe
from seekforge.passes.program import Program
from seekforge.passes.rope_append import squeezed
from seekforge.passes.rule import PassResult, rewrite_each

aten = torch.ops.aten


def fuse_mla_append(program: Program) -> PassResult:
    """Every paged_mla_attention whose latent is a norm's result and whose q_rope and k_rope are
    those of one rope, all read by nothing else."""
    nodes = program.nodes(paged_mla_attention)
    return rewrite_each("mla_append", program, nodes, _sources_of, _rewrite)


def _sources_of(node: fx.Node) -> tuple[fx.Node, fx.Node] | str:
    """The norm and the rope in front of the attention, or why they can't be taken in."""
    normed, other = _behind_views(node.args[2], node)
    if normed.target is not rms_norm:
        return f"the latent is {describe(normed)}, not a norm's result"
    if other:
        return f"the normalised latent is also read by {other}"
    if _width(normed) != _width(node.args[2]):
        return f"{normed.name} normalises {_width(normed)} of {_width(node.args[2])} dimensions"
    ropes = []
    for index, which in ((1, "q"), (3, "k")):
        item, other = _behind_views(node.args[index], node)
        made = item.args[0] if item.target is operator.getitem else None
        if not isinstance(made, fx.Node) or made.target is not rope:
            return f"{which} is {describe(item)}, not a result of rope"
        if item.args[1] != "qk".index(which):
            return f"{which} is result {item.args[1]} of {made.name}"
        if other:
            return f"the rotated {which} is also read by {other}"
        if _width(item) != _width(node.args[index]):
            return f"the rotated {which} is read in rows of {_width(node.args[index])}"
        ropes.append(made)
    if ropes[0] is not ropes[1]:
        return "q and k are rotated by two ropes"
    width, rotated = _width(node.args[3]), 2 * _width(ropes[0].args[2])
    if width != rotated:
        return f"{ropes[0].name} rotates {rotated} of {width} dimensions"
    return normed, ropes[0]


def _behind_views(value: Any, reader: fx.Node) -> tuple[fx.Node, str]:
    """What `value` is a view of, and the name of something else that reads it ("": nothing)."""
    other = ""
    while True:
        other = next((user.name for user in value.users if user is not reader), other)
        if value.target not in (*VIEWS, aten.squeeze.dim):
            return value, other
        value, reader = value.args[0], value


def _rewrite(program: Program, node: fx.Node, normed: fx.Node, turned: fx.Node) -> None:
    q_nope, _, _, _, *pool_and_index, kv_b, scale = node.args
    latent, weight, eps = normed.args
    q_rope, k_rope, cos, sin, positions, interleaved = turned.args
    emit, rank, width = program.emit, _width(latent), _width(k_rope)
    with program.graph.inserting_before(node):
        latent = emit(aten.reshape.default, latent, [-1, rank], like=normed)
        q_rope, positions = (squeezed(program.graph, x) for x in (q_rope, positions))
        k_rope = emit(aten.reshape.default, k_rope, [-1, width], like=turned)
        args = (
            q_nope, q_rope, latent, k_rope, weight, eps, cos, sin, positions, interleaved,
            *pool_and_index, kv_b, scale,
        )  # fmt: skip
        fused = program.graph.call_function(rope_paged_mla_attention, args)
    fused.meta = dict(node.meta)
    node.replace_all_uses_with(fused)
    program.graph.erase_node(node)


def _width(node: Any) -> int:
    """The last dimension, which is static."""
    return int(node.meta["val"].shape[-1])
