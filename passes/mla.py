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
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from seekforge.kernels.attention import attention
from seekforge.kernels.mla_attention import mla_attention
from seekforge.kernels.rope import rope
from seekforge.passes.cleanup import VIEWS
from seekforge.passes.linears import LINEAR, bias_of
from seekforge.passes.pattern import Miss, describe
from seekforge.passes.program import Program, source_line
from seekforge.passes.region import numbered, region_between, run_region, sources
from seekforge.passes.rope import POSITIONS
from seekforge.passes.rule import PassResult

aten = torch.ops.aten
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
        found = _read(node)
        refused = found if isinstance(found, str) else _prove(found)
        if isinstance(found, _Layer) and refused is None:
            _rewrite(program, found)
            fired += 1
        elif refused:
            misses.append(Miss(node.name, refused, source_line(node)))
    program.drop_unused()
    program.graph.lint()
    after = len(program.graph.nodes)
    return PassResult("mla", fired, tuple(misses), before, after, time.perf_counter() - start)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Where attention's operands come from: q from q_proj and the rotated q_rotated, k and v from
    kv_b, k's rotated part from k_rotated; latent and k_input are [batch, seq, width]."""

    node: fx.Node
    q_proj: fx.Node
    kv_b: fx.Node
    q_rotated: fx.Node
    k_rotated: fx.Node
    latent: fx.Node
    k_input: fx.Node

    @property
    def operands(self) -> tuple[Any, ...]:
        return self.node.args[:3]

    @property
    def rotation(self) -> fx.Node:
        assert isinstance(self.k_rotated.args[0], fx.Node)
        return self.k_rotated.args[0]

    @property
    def dims(self) -> tuple[int, int, int, int]:
        """heads, nope_dim, rope_dim, v_dim."""
        q, _, v = self.operands
        (heads, width), rope_dim = _sizes(q), _sizes(self.k_rotated)[-1]
        return heads, width - rope_dim, rope_dim, _sizes(v)[-1]


def _read(node: fx.Node) -> _Layer | str:
    """The layer as its nodes' connections say it, or why it is none ("" for ordinary attention)."""
    from_q, from_k, from_v = (sources(x, _moves) for x in node.all_input_nodes)
    rotations = {x for x in from_k if x.target is operator.getitem and x.args[0].target is rope}  # type: ignore[union-attr]
    if len(from_k) == 1:
        return ""
    if len(rotations) != 1 or from_k - rotations != from_v or len(from_v) != 1:
        return f"k comes from {_names(from_k)}, v from {_names(from_v)}"
    (kv_b,), (k_rotated,) = from_v, rotations
    if kv_b.target is not LINEAR or bias_of(kv_b) is not None:
        return f"v comes from {describe(kv_b)}, expected a linear layer without bias"
    rotation: Any = k_rotated.args[0]
    if k_rotated.args[1] != 1:
        return f"part of k comes from {describe(k_rotated)}, the query of a rope node"
    if _sizes(k_rotated)[:1] != (1,):
        return f"the rotated part of k has {_sizes(k_rotated)[0]} heads, expected one for all"
    q_rotated = from_q & set(rotation.users)
    projections = from_q - q_rotated
    if len(q_rotated) != 1 or len(projections) != 1:
        return f"q comes from {_names(from_q)}, expected a projection and {rotation.name}"
    k_input, latent = _three_dims(rotation.args[1]), _three_dims(kv_b.args[0])
    if k_input is None:
        return f"the key that {rotation.name} rotates is no view of [batch, seq, rope_dim]"
    if latent is None:
        return f"what {kv_b.name} reads is no view of a latent [batch, seq, rank]"
    others = _readers(latent) - {kv_b}
    if others:
        return f"the latent {latent.name} is also read by {_names(others)}"
    return _Layer(node, projections.pop(), kv_b, q_rotated.pop(), k_rotated, latent, k_input)


def _prove(layer: _Layer) -> str | None:
    """Where each number of q, k and v comes from, by numbers that are all different."""
    q_proj, kv_b, rotation = layer.q_proj, layer.kv_b, layer.rotation
    heads, nope, rope_dim, v_dim = layer.dims
    width = kv_b.meta["val"].shape[-1]
    if width != heads * (nope + v_dim):
        return f"{kv_b.name} makes {width} values, not {heads} heads of {nope} + {v_dim}"
    if _sizes(q_proj) != (heads * (nope + rope_dim),):
        return (
            f"{q_proj.name} makes {_sizes(q_proj)} values, not {heads} heads of {nope + rope_dim}"
        )
    given = numbered((q_proj, kv_b, layer.q_rotated, layer.k_rotated))
    moved = run_region((*layer.operands, rotation.args[0]), given)  # type: ignore[arg-type]
    if isinstance(moved, str):
        return f"what happens to q, k and v is unknown: {moved}"
    q, k, v, q_input = moved
    made = given[kv_b].reshape(*k.shape[:3], nope + v_dim)
    projected = given[q_proj].reshape(q.shape)
    q_value, k_value = given[layer.q_rotated], given[layer.k_rotated]
    if not torch.equal(v, made[..., nope:]):
        return f"v is not the last {v_dim} rows of each head of {kv_b.name}"
    if not torch.equal(k[..., :nope], made[..., :nope]):
        return f"k does not begin with the first {nope} rows of each head of {kv_b.name}"
    order = k[0, 0, 0, nope:] - k_value[0, 0, 0, 0]  # which rotated dimension stands where
    if order.sort()[0].tolist() != list(range(rope_dim)):
        return f"the last {rope_dim} dimensions of k are not those of {layer.k_rotated.name}"
    if not torch.equal(k[..., nope:], k_value[..., order].expand(-1, -1, heads, -1)):
        return f"the rotated part of k is not {layer.k_rotated.name}, the same for all heads"
    if not torch.equal(q[..., nope:], q_value[..., order]):
        return "the rotated parts of q and k are ordered differently"
    if not torch.equal(q[..., :nope], projected[..., :nope]):
        return f"q does not begin with the first {nope} dimensions of each head of {q_proj.name}"
    if not torch.equal(q_input, projected[..., nope:]):
        return f"{rotation.name} does not rotate the last {rope_dim} dimensions of q's heads"
    return None


def _rewrite(program: Program, layer: _Layer) -> None:
    node, rotation = layer.node, layer.rotation
    heads, nope, rope_dim, _ = layer.dims
    dead = region_between(
        layer.operands, {layer.kv_b, layer.q_proj, layer.k_input, *rotation.all_input_nodes[2:]}
    )
    emit, like = program.emit, node
    with program.graph.inserting_before(node):
        (positions,) = program.graph.find_nodes(op="placeholder", target=POSITIONS)
        sizes = [emit(aten.sym_size.int, positions, dim, like=like) for dim in (0, 1)]
        by_head = [*sizes, heads, nope + rope_dim]
        q = emit(aten.view.default, layer.q_proj, by_head, like=like)
        parts = emit(aten.split_with_sizes.default, q, [nope, rope_dim], -1, like=like)
        q_nope, q_rope = (emit(operator.getitem, parts, i, like=like) for i in range(2))
        one_head = emit(aten.view.default, layer.k_input, [*sizes, 1, rope_dim], like=like)
        both = emit(rope, q_rope, one_head, *rotation.args[2:], like=rotation)
        q_rope, k_rope = (emit(operator.getitem, both, i, like=rotation) for i in range(2))
        k_rope = emit(aten.view.default, k_rope, [*sizes, rope_dim], like=like)
        args = (q_nope, q_rope, layer.latent, k_rope, layer.kv_b.args[1], *node.args[3:])
        node.replace_all_uses_with(emit(mla_attention, *args, like=like))
    program.graph.erase_node(node)
    _erase(dead)


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
    given = numbered([base])
    moved = run_region([node], given)
    if isinstance(moved, str) or not torch.equal(moved[0].flatten(), given[base].flatten()):
        return None
    return base  # type: ignore[no-any-return]


def _readers(node: fx.Node) -> set[fx.Node]:
    """What reads a node, looking through views."""
    found: set[fx.Node] = set()
    for user in node.users:
        found |= _readers(user) if user.target in VIEWS else {user}
    return found


def _sizes(node: fx.Node) -> tuple[int, ...]:
    """The sizes behind [batch, seq]; none where one is dynamic (int() of it would fix it)."""
    sizes = node.meta["val"].shape[2:]
    return tuple(sizes) if all(isinstance(size, int) for size in sizes) else ()


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
