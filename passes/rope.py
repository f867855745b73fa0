"""RoPE: the rotation of q and k of one attention layer becomes one node that reads a table.

    q * cos + rotate_half(q) * sin, rotate_half(x) = cat(-x[half:], x[:half])

cos and sin are whatever the model computes from the positions (default, linear, llama3, YaRN): the
pass runs that part of the graph once for the positions 0..max_len-1 and keeps the result as the
table, so the engine's angles are the model's own, bit for bit. Rotating a slice of the head
(partial rotary, MLA) needs nothing special: the slices and concatenations around the rotation stay.
"""

from __future__ import annotations

import operator
import time
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, fx

from seekforge.kernels.rope import rope
from seekforge.passes.pattern import (
    Call,
    Literal,
    Match,
    Miss,
    Number,
    Sequence,
    Var,
    match,
    skip_cast,
)
from seekforge.passes.program import Program, Weight, ancestors, module_path, same_size, source_line
from seekforge.passes.rule import PassResult

aten = torch.ops.aten

POSITIONS = "position_ids"  # transformers' name of the input that angles may depend on

_x = Var("x")
_upper = Call(aten.slice.Tensor, _x, Number("dim"), Number("half"), Number("end"))
_lower = Call(aten.slice.Tensor, _x, Number("dim"), Literal(0), Number("half"))
_rotated = Call(aten.cat.default, Sequence((Call(aten.neg.default, _upper), _lower)), Literal(-1))
PATTERN = Call(
    aten.add.Tensor,
    Call(aten.mul.Tensor, _x, Call(aten.unsqueeze.default, Var("cos"), Number("heads_dim"))),
    Call(aten.mul.Tensor, _rotated, Call(aten.unsqueeze.default, Var("sin"), Number("heads_dim"))),
)


def fuse_rope(program: Program, max_len: int) -> PassResult:
    """fired: attention layers whose q and k rotation was fused. max_len: rows of the table."""
    start, before = time.perf_counter(), len(program.graph.nodes)
    layers: dict[tuple[Any, ...], list[Match]] = defaultdict(list)
    misses: list[Miss] = []
    covered: set[fx.Node] = set()
    for root in program.nodes(aten.add.Tensor):
        found = match(PATTERN, root)
        if isinstance(found, Match):
            refused = _check(found)
            if refused:
                misses.append(Miss(root.name, refused, source_line(root)))
                covered.update(found.nodes)
            else:
                layers[module_path(root), found["cos"], found["sin"]].append(found)
        elif found.depth >= 3:
            misses.append(found)
    tables = _Tables(program, max_len)
    fired = 0
    for (owner, cos, sin), pair in layers.items():
        covered.update(node for found in pair for node in found.nodes)
        refused = tables.prepare(cos, sin)
        if len(pair) != 2 or pair[0]["heads_dim"] != pair[1]["heads_dim"]:
            refused = f"{len(pair)} rotations in {owner or 'one module'}, expected q and k"
        if refused:
            root = pair[0].nodes[0]
            misses.append(Miss(root.name, refused, source_line(root)))
            continue
        _rewrite(program, pair, *tables.nodes(cos, sin))
        fired += 1
    known = {miss.node for miss in misses}
    for neg in program.nodes(aten.neg.default):
        if neg not in covered and neg.users and neg.name not in known:
            misses.append(
                Miss(neg.name, "a negation that is not part of a rotation", source_line(neg))
            )
    program.drop_unused()
    program.graph.lint()
    after = len(program.graph.nodes)
    return PassResult("rope", fired, tuple(misses), before, after, time.perf_counter() - start)


def _check(found: Match) -> str | None:
    shape = found["x"].meta["val"].shape
    if len(shape) != 4 or found["dim"] % 4 != 3:
        return f"rotates dimension {found['dim']} of {len(shape)}, expected the last of 4"
    if 2 * found["half"] != shape[-1]:
        return f"rotates halves of {found['half']} in a head of {shape[-1]}"
    if found["end"] < shape[-1]:
        return f"the upper half ends at {found['end']} of {shape[-1]}"
    heads = found["heads_dim"] % 4
    if heads not in (1, 2):
        return f"cos and sin are the same along dimension {heads}, expected the heads (1 or 2)"
    expected = [size for dim, size in enumerate(shape) if dim != heads]
    for name in ("cos", "sin"):
        angles = found[name].meta["val"].shape
        if len(angles) != 3 or not all(map(same_size, angles, expected)):
            return f"{name} is {tuple(angles)}, expected one row a token: {tuple(expected)}"
    return None


def _rewrite(
    program: Program, pair: list[Match], positions: fx.Node, cos: fx.Node, sin: fx.Node
) -> None:
    """The op is token-major [batch, seq, heads, head_dim]; the model may rotate [batch, heads, seq,
    head_dim]."""
    q, k = pair
    heads_first = q["heads_dim"] % 4 == 1
    root = k.nodes[0]
    with program.graph.inserting_before(root):
        inputs = [found["x"] for found in pair]
        if heads_first:
            inputs = [program.emit(aten.transpose.int, x, 1, 2, like=root) for x in inputs]
        both = program.emit(rope, *inputs, cos, sin, positions, False, like=root)
        rotated = [program.emit(operator.getitem, both, i, like=root) for i in range(2)]
        if heads_first:
            rotated = [program.emit(aten.transpose.int, x, 1, 2, like=root) for x in rotated]
    _move_users_after(program, q.nodes[0], rotated[0])
    for found, node in zip(pair, rotated, strict=True):
        found.nodes[0].replace_all_uses_with(node)


def _move_users_after(program: Program, old: fx.Node, new: fx.Node) -> None:
    """q's users may stand before k's rotation, where the fused node is: move those in between
    behind it."""
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    moved = {old}
    last = new
    for node in list(program.graph.nodes):
        if order[old] < order[node] < order[new] and moved & set(node.all_input_nodes):
            moved.add(node)
            last.append(node)
            last = node


class _Tables:
    """cos/sin tables as weights of the program, one pair for each pair of nodes that compute
    them."""

    def __init__(self, program: Program, max_len: int) -> None:
        self.program, self.max_len = program, max_len
        self.known: dict[tuple[fx.Node, fx.Node], tuple[fx.Node, fx.Node, fx.Node] | str] = {}

    def prepare(self, cos: fx.Node, sin: fx.Node) -> str | None:
        """Computes the tables; returns the reason if cos and sin are not a function of positions
        alone."""
        if (cos, sin) not in self.known:
            self.known[cos, sin] = self._make(cos, sin)
        made = self.known[cos, sin]
        return made if isinstance(made, str) else None

    def nodes(self, cos: fx.Node, sin: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
        """(positions, cos table, sin table)."""
        made = self.known[cos, sin]
        assert not isinstance(made, str)
        return made

    def _make(self, cos: fx.Node, sin: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | str:
        leaves = [
            n for n in {*ancestors(cos), *ancestors(sin)} if n.op in ("placeholder", "get_attr")
        ]
        inputs = [node for node in leaves if node.op == "placeholder"]
        if [node.target for node in inputs] != [POSITIONS]:
            return f"cos and sin depend on {sorted(map(str, inputs))}, expected {POSITIONS} alone"
        for leaf in leaves:
            if leaf.op == "get_attr" and leaf.target not in self.program.constants:
                return f"cos and sin depend on {leaf.target}, whose value the build does not hold"
        position = torch.arange(self.max_len)[None]
        backwards = position[:, : -(-self.max_len // 2)].flip(1)
        tables: list[fx.Node] = []
        suffix = f"_{len(self.known)}" if self.known else ""
        for name, node in (("cos", cos), ("sin", sin)):
            # Before the cast to the model's dtype: the rotation is computed in fp32.
            full = _evaluate(skip_cast(node), inputs[0], position, self.program.constants)[0]
            first, second = full.chunk(2, -1)
            again = _evaluate(skip_cast(node), inputs[0], backwards, self.program.constants)[0]
            if not torch.equal(full[backwards[0]], again):
                return f"{name} of a position depends on the other positions of the sequence"
            if not torch.equal(first, second):
                return f"{name} differs between the two halves of the head"
            table = first.to(torch.float32).contiguous()
            tables.append(
                self.program.add_weight(
                    f"rope.{name}{suffix}", tuple(table.shape), table.dtype, Weight(value=table)
                )
            )
        return inputs[0], tables[0], tables[1]


def _evaluate(
    node: fx.Node, positions: fx.Node, value: Tensor, constants: dict[str, Tensor]
) -> Tensor:
    """Runs the part of the graph that computes `node` on real positions."""
    needed = set(ancestors(node))
    env: dict[fx.Node, Any] = {}
    for step in node.graph.nodes:
        if step not in needed:
            continue
        if step is positions:
            env[step] = value
        elif step.op == "get_attr":
            env[step] = constants[step.target]
        else:
            args, kwargs = fx.node.map_arg((step.args, step.kwargs), env.__getitem__)
            env[step] = step.target(*args, **kwargs)
    result = env[node]
    assert isinstance(result, Tensor)
    return result
