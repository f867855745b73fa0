"""RoPE: the rotation of q and k of one attention layer becomes one node that reads a table.

passes/rotations.py knows how models spell it. cos and sin are whatever the model computes from the
positions (default, linear, llama3, YaRN with its factors): the pass runs that part of the graph
once for the positions 0..max_len-1 and keeps the result as the table, so the engine's angles are
the model's own, bit for bit. Rotating a slice of the head (partial rotary, MLA) needs nothing
special: the slices and concatenations around the rotation stay.

The operator leaves the pairs of an interleaved rotation where they are; where the model has the
even dims in front afterwards, that permutation follows the operator.
"""

from __future__ import annotations

import operator
import time
from collections import defaultdict
from typing import Any

import torch
from torch import fx

from seekforge.kernels.rope import rope
from seekforge.passes.pattern import Miss, match, skip_cast
from seekforge.passes.program import Program, Weight, ancestors, module_path, source_line
from seekforge.passes.region import run_region
from seekforge.passes.rotations import ANCHORS, SPELLINGS, Rotation, angle_tables
from seekforge.passes.rule import PassResult

aten = torch.ops.aten

POSITIONS = "position_ids"  # transformers' name of the input that angles may depend on


def fuse_rope(program: Program, max_len: int) -> PassResult:
    """fired: attention layers whose q and k rotation was fused. max_len: rows of the table."""
    start, before = time.perf_counter(), len(program.graph.nodes)
    layers: dict[tuple[Any, ...], list[Rotation]] = defaultdict(list)
    misses: list[Miss] = []
    covered: set[fx.Node] = set()
    for target, pattern, read in SPELLINGS:
        for root in program.nodes(target):
            if root in covered:
                continue
            found = match(pattern, root)
            if isinstance(found, Miss):
                if found.depth >= 3:
                    misses.append(found)
                continue
            covered.update(found.nodes)
            rotation = read(found)
            if isinstance(rotation, str):
                misses.append(Miss(root.name, rotation, source_line(root)))
                continue
            form = (rotation.interleaved, rotation.split)
            layers[module_path(root), rotation.angles, form].append(rotation)
    tables = _Tables(program, max_len)
    fired = 0
    for (owner, angles, _), pair in layers.items():
        refused = tables.prepare(angles)
        if len(pair) != 2 or pair[0].heads_dim != pair[1].heads_dim:
            refused = f"{len(pair)} rotations in {owner or 'one module'}, expected q and k"
        if refused:
            misses.append(Miss(pair[0].root.name, refused, source_line(pair[0].root)))
            continue
        _rewrite(program, pair, *tables.nodes(angles))
        fired += 1
    known = {miss.node for miss in misses}
    for target, reason in ANCHORS.items():
        for anchor in program.nodes(target):
            if anchor not in covered and anchor.users and anchor.name not in known:
                misses.append(Miss(anchor.name, reason, source_line(anchor)))
    program.drop_unused()
    program.graph.lint()
    after = len(program.graph.nodes)
    return PassResult("rope", fired, tuple(misses), before, after, time.perf_counter() - start)


def _rewrite(
    program: Program, pair: list[Rotation], positions: fx.Node, cos: fx.Node, sin: fx.Node
) -> None:
    """The op is token-major [batch, seq, heads, head_dim]; the model may rotate [batch, heads, seq,
    head_dim]."""
    q, k = pair
    heads_first = q.heads_dim % 4 == 1
    with program.graph.inserting_before(k.root):
        inputs = [rotation.input(program) for rotation in pair]
        if heads_first:
            inputs = [program.emit(aten.transpose.int, x, 1, 2, like=k.root) for x in inputs]
        both = program.emit(rope, *inputs, cos, sin, positions, q.interleaved, like=k.root)
        rotated = [program.emit(operator.getitem, both, i, like=k.root) for i in range(2)]
        rotated = [r.output(program, node) for r, node in zip(pair, rotated, strict=True)]
        if heads_first:
            rotated = [program.emit(aten.transpose.int, x, 1, 2, like=k.root) for x in rotated]
    _move_users_after(q.root, rotated[0])
    for rotation, node in zip(pair, rotated, strict=True):
        rotation.root.replace_all_uses_with(node)


def _move_users_after(old: fx.Node, new: fx.Node) -> None:
    """q's users may stand before k's rotation, where the fused node is: move those in between
    behind it."""
    moved = {old}
    node, last = old.next, new
    while node is not new:
        following = node.next
        if moved & set(node.all_input_nodes):
            moved.add(node)
            last.append(node)
            last = node
        node = following


class _Tables:
    """cos/sin tables as weights of the program, one pair for each set of nodes that compute
    angles."""

    def __init__(self, program: Program, max_len: int) -> None:
        self.program, self.max_len = program, max_len
        self.known: dict[tuple[fx.Node, ...], tuple[fx.Node, fx.Node, fx.Node] | str] = {}

    def prepare(self, angles: tuple[fx.Node, ...]) -> str | None:
        """Computes the tables; returns the reason if they are no function of positions alone."""
        if angles not in self.known:
            self.known[angles] = self._make(angles)
        made = self.known[angles]
        return made if isinstance(made, str) else None

    def nodes(self, angles: tuple[fx.Node, ...]) -> tuple[fx.Node, fx.Node, fx.Node]:
        """(positions, cos table, sin table)."""
        made = self.known[angles]
        assert not isinstance(made, str)
        return made

    def _make(self, angles: tuple[fx.Node, ...]) -> tuple[fx.Node, fx.Node, fx.Node] | str:
        # Before the cast to the model's dtype: the rotation is computed in fp32.
        wide = [skip_cast(node) for node in angles]
        leaves = {n for node in wide for n in ancestors(node) if n.op != "call_function"}
        inputs = [node for node in leaves if node.op == "placeholder"]
        if [node.target for node in inputs] != [POSITIONS]:
            return f"cos and sin depend on {sorted(map(str, inputs))}, expected {POSITIONS} alone"
        given = {}
        for leaf in leaves - set(inputs):
            if leaf.target not in self.program.constants:
                return f"cos and sin depend on {leaf.target}, whose value the build does not hold"
            given[leaf] = self.program.constants[str(leaf.target)]
        position = torch.arange(self.max_len)[None]
        # Without the first and the longest: what depends on either shows.
        first = min(1, self.max_len - 1)
        backwards = position[:, first : max(2, -(-self.max_len // 2))].flip(1)
        values = run_region(wide, {**given, inputs[0]: position})
        again = run_region(wide, {**given, inputs[0]: backwards})
        if isinstance(values, str) or isinstance(again, str):
            return f"cos and sin can't be computed from the positions: {values}"
        for node, full, other in zip(angles, values, again, strict=True):
            if not torch.equal(full[0][backwards[0]], other[0]):
                return f"{node} of a position depends on the other positions of the sequence"
        made = angle_tables([value[0] for value in values])
        if isinstance(made, str):
            return made
        suffix = f"_{len(self.known)}" if self.known else ""
        tables = [
            self.program.add_weight(
                f"rope.{name}{suffix}", tuple(table.shape), table.dtype, Weight(value=table)
            )
            for name, table in zip(("cos", "sin"), made, strict=True)
        ]
        return inputs[0], tables[0], tables[1]
