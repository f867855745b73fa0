"""MLA: attention whose keys and values come from one latent becomes `mla_attention`.

Seen in DeepSeek-V2 and V3: K and V of all heads are `kv_b_proj` of the normalised latent, and the
rotated part of K is one for all heads. Between projections, rotation and attention, transformers
only moves data (views, transposes, splits, copies). Where each number goes is read off by running
that region on numbered tensors: whatever its spelling, the result is exact.

After the pass the latent and the rotated key part are all that attention reads of K and V, so they
are all that the cache will hold. A permutation of the rotated part that q and k share does not
change their product and is dropped (V3 de-interleaves both).
"""

from __future__ import annotations

import operator
import time
from typing import Any

import torch
from torch import Tensor, fx

from seekforge.kernels.attention import attention
from seekforge.kernels.mla_attention import mla_attention
from seekforge.kernels.rope import rope
from seekforge.passes.cleanup import VIEWS
from seekforge.passes.linears import LINEAR, bias_of
from seekforge.passes.pattern import Miss, describe
from seekforge.passes.program import Program, source_line
from seekforge.passes.region import region_between, run_region, sources
from seekforge.passes.rule import PassResult

aten = torch.ops.aten
BATCH, SEQ = 2, 3  # of the numbered tensors
MOVES = {
    *VIEWS, aten.transpose.int, aten.permute.default, aten.split_with_sizes.default,
    aten.split.Tensor, aten.slice.Tensor, aten.cat.default, aten.expand.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.new_empty.default, aten.copy_.default,
    aten.clone.default, aten.contiguous.default,
}  # fmt: skip


def fuse_mla(program: Program) -> PassResult:
    """fired: attention layers rewritten. Layers with keys of their own are no near-misses."""
    start, before = time.perf_counter(), len(program.graph.nodes)
    fired, misses = 0, []
    for node in program.nodes(attention):
        refused = _fuse(program, node)
        if refused is None:
            fired += 1
        elif refused:
            misses.append(Miss(node.name, refused, source_line(node)))
    program.drop_unused()
    program.graph.lint()
    after = len(program.graph.nodes)
    return PassResult("mla", fired, tuple(misses), before, after, time.perf_counter() - start)


def _fuse(program: Program, node: fx.Node) -> str | None:
    """Rewrites one layer; returns None, or why it was left ("" for ordinary attention)."""
    q, k, v, scale, layer = node.args
    assert isinstance(q, fx.Node) and isinstance(k, fx.Node) and isinstance(v, fx.Node)
    from_v, from_k, from_q = (sources(x, _moves) for x in (v, k, q))
    rotations = {x for x in from_k if x.target is operator.getitem}
    if len(from_k) == 1:
        return ""
    if len(rotations) != 1 or from_k - rotations != from_v or len(from_v) != 1:
        return f"k comes from {_names(from_k)}, v from {_names(from_v)}"
    (kv_b,), (k_rotated,) = from_v, rotations
    if kv_b.target is not LINEAR or bias_of(kv_b) is not None:
        return f"v comes from {describe(kv_b)}, expected a linear layer without bias"
    rotation: Any = k_rotated.args[0]
    if rotation.target is not rope or k_rotated.args[1] != 1:
        return f"part of k comes from {describe(k_rotated)}, expected the key of a rope node"
    if _sizes(k_rotated)[0] != 1:
        return f"the rotated part of k has {_sizes(k_rotated)[0]} heads, expected one for all"
    q_rotated = from_q & set(rotation.users)
    if len(q_rotated) != 1 or len(from_q) != 2:
        return f"q comes from {_names(from_q)}, expected a projection and {rotation.name}"
    (q_proj,) = from_q - q_rotated

    heads, width = _sizes(q)
    rope_dim = _sizes(k_rotated)[-1]
    nope, v_dim = width - rope_dim, _sizes(v)[-1]
    kv_value, k_value, q_value = (_numbered(x) for x in (kv_b, k_rotated, *q_rotated))
    keys = run_region((k, v), {kv_b: kv_value, k_rotated: -1 - k_value})
    queries = run_region((q,), {q_proj: _numbered(q_proj), next(iter(q_rotated)): -1 - q_value})
    if isinstance(keys, str) or isinstance(queries, str):
        return (
            f"what happens to q, k and v is unknown: {keys if isinstance(keys, str) else queries}"
        )
    # -1 - n marks the numbers of the rotated parts.
    columns = kv_value.reshape(BATCH, SEQ, -1).unflatten(-1, (heads, -1))
    if columns.shape[-1] != nope + v_dim or not torch.equal(keys[1], columns[..., nope:]):
        return f"v is not the last {v_dim} rows of each head of {kv_b.name}"
    if not torch.equal(keys[0][..., :nope], columns[..., :nope]):
        return f"k does not begin with the first {nope} rows of each head of {kv_b.name}"
    order = -1 - keys[0][0, 0, 0, nope:]  # which rotated dimension stands where
    if order.sort()[0].tolist() != list(range(rope_dim)):
        return f"the last {rope_dim} dimensions of k are not those of {k_rotated.name}"
    if not torch.equal(keys[0][..., nope:], -1 - k_value[..., order].expand(-1, -1, heads, -1)):
        return f"the rotated part of k is not {k_rotated.name}, the same for all heads"
    if not torch.equal(queries[0][..., nope:], -1 - q_value[..., order]):
        return "the rotated parts of q and k are ordered differently"
    projected = _numbered(q_proj)
    offset = int(queries[0][0, 0, 0, 0])
    own = projected[..., offset : offset + heads * width].unflatten(-1, (heads, -1))
    if not torch.equal(queries[0][..., :nope], own[..., :nope]):
        return f"q does not begin with the first {nope} dimensions of each head of {q_proj.name}"
    q_input = run_region((rotation.args[0],), {q_proj: projected})
    if isinstance(q_input, str) or not torch.equal(q_input[0], own[..., nope:]):
        return f"what {rotation.name} rotates are not the last {rope_dim} dimensions of q's heads"
    k_input = _three_dims(rotation.args[1])
    if k_input is None:
        return f"the key that {rotation.name} rotates is no projection's last {rope_dim} dimensions"
    latent = _three_dims(kv_b.args[0])
    if latent is None:
        return f"what {kv_b.name} reads is no view of a latent [batch, seq, rank]"
    others = _readers(latent) - {kv_b}
    if others:
        return f"the latent {latent.name} is also read by {_names(others)}"

    dead = region_between((q, k, v), {kv_b, q_proj, k_input, *rotation.args[2:5]})
    emit, like = program.emit, node
    with program.graph.inserting_before(node):
        (positions,) = program.graph.find_nodes(op="placeholder", target="position_ids")
        sizes = [emit(aten.sym_size.int, positions, dim, like=like) for dim in (0, 1)]
        if heads * width != _sizes(q_proj)[-1]:
            end = offset + heads * width
            q_proj = emit(aten.slice.Tensor, q_proj, -1, offset, end, like=like)
        by_head = emit(aten.view.default, q_proj, [*sizes, heads, width], like=like)
        parts = emit(aten.split_with_sizes.default, by_head, [nope, rope_dim], -1, like=like)
        q_nope, q_rope = (emit(operator.getitem, parts, i, like=like) for i in range(2))
        one_head = emit(aten.view.default, k_input, [*sizes, 1, rope_dim], like=like)
        both = emit(rope, q_rope, one_head, *rotation.args[2:], like=rotation)
        q_rope, k_rope = (emit(operator.getitem, both, i, like=rotation) for i in range(2))
        k_rope = emit(aten.view.default, k_rope, [*sizes, rope_dim], like=like)
        args = (q_nope, q_rope, latent, k_rope, kv_b.args[1], scale, layer)
        fused = emit(mla_attention, *args, like=node)
    node.replace_all_uses_with(fused)
    program.graph.erase_node(node)
    _erase(dead)
    return None


def _moves(node: fx.Node) -> bool:
    """True for what only moves data inside attention: [batch, seq, width] is where that begins."""
    if isinstance(node.meta["val"], (list, tuple)):  # of a split
        return node.target in MOVES
    if node.target is operator.getitem:
        split: Any = node.args[0]
        return split.target in MOVES and node.meta["val"].dim() > 3
    return node.target in MOVES and node.meta["val"].dim() > 3


def _three_dims(node: Any) -> fx.Node | None:
    """The [batch, seq, width] node whose numbers `node` has in the same order, with a dimension of
    1 more."""
    base = node
    while base.meta["val"].dim() != 3:
        if base.target not in (*VIEWS, aten.transpose.int, aten.unsqueeze.default):
            return None
        base = base.args[0]
    numbers = _numbered(base)
    moved = run_region((node,), {base: numbers})
    if isinstance(moved, str) or not torch.equal(moved[0].flatten(), numbers.flatten()):
        return None
    return base  # type: ignore[no-any-return]


def _readers(node: fx.Node) -> set[fx.Node]:
    """What reads a node, looking through views."""
    found: set[fx.Node] = set()
    for user in node.users:
        found |= _readers(user) if user.target in VIEWS else {user}
    return found


def _numbered(node: fx.Node) -> Tensor:
    """A tensor of node's shape, BATCH and SEQ for its dynamic sizes, that holds 0, 1, 2 …"""
    dynamic = iter((BATCH, SEQ))
    shape = [size if isinstance(size, int) else next(dynamic) for size in node.meta["val"].shape]
    count = 1
    for size in shape:
        count *= size
    return torch.arange(count).view(shape)


def _sizes(node: fx.Node) -> tuple[int, ...]:
    """The last two sizes, or the one of [batch, seq, width]."""
    return tuple(int(size) for size in node.meta["val"].shape[2:])


def _erase(dead: set[fx.Node]) -> None:
    """Erases nodes that only each other read: dead-code elimination keeps what copies into them.

    A value that something else reads stays, with all that it is made of.
    """
    dead = {node for node in dead if not isinstance(node.meta["val"], torch.SymInt)}
    read = [node for node in dead if any(user not in dead for user in node.users)]
    for node in sorted(dead - region_between(read, set()), reverse=True):
        node.graph.erase_node(node)


def _names(nodes: set[fx.Node]) -> str:
    return " and ".join(sorted(node.name for node in nodes)) or "nothing"
