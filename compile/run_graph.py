"""Runs a program's graph node by node and keeps the values asked for, whatever the model's size.

In: a program between any two passes, a function that reads checkpoint tensors, inputs by name. Out:
the values of the nodes asked for. Weights are in memory only while a node that reads them runs: of
a large embedding the rows of the tokens are read, a large linear layer is computed in blocks of
rows, and of experts only those that a token chose are read, a few at a time.

Runs in the graph's own dtype, or `wide`: every weight, value and cast in float32, so that two
graphs that compute the same differ by the order of sums alone. Needs no GPU: operators that only
GPUs use have a reference here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from seekforge.compile.run_graph_weights import GraphWeights
from seekforge.kernels.errors import BuildError
from seekforge.kernels.int4 import Int4
from seekforge.kernels.int4_linear import int4_linear
from seekforge.kernels.int4_moe_experts import int4_moe_experts
from seekforge.kernels.moe_experts import moe_experts
from seekforge.kernels.shared_experts import (
    int4_moe_shared_experts,
    int4_product,
    moe_shared_experts,
)
from seekforge.kernels.swiglu import swiglu_reference
from seekforge.passes.cleanup import CHECKS
from seekforge.passes.linears import LINEAR
from seekforge.passes.program import Program, source_line

EMBEDDING = torch.ops.aten.embedding.default
NARROW = {torch.bfloat16, torch.float16}
Wanted = Collection[str] | Callable[[fx.Node], bool]


def run_graph(
    program: Program,
    read: Callable[[str], Tensor],
    inputs: Mapping[str, Tensor],
    wanted: Wanted,
    int4: Callable[[str, int, bool, torch.dtype], Int4] | None = None,
    *,
    wide: bool = False,
    weights: GraphWeights | None = None,
) -> dict[str, Tensor]:
    """{node name: its value} of the nodes that are `wanted`, by name or by predicate. Of a node
    with several results the `getitem` nodes behind it are what can be wanted.

    inputs: by the placeholders' names; pools among them are written to, as in an engine.
    read, int4: as in `GraphWeights`, which may be given instead to keep weights from run to run.
    Raises BuildError that names the node that can't be computed, with its source line.
    """
    runner = GraphRunner(program, weights or GraphWeights(read, int4), _predicate(wanted), wide)
    with torch.no_grad():
        runner.run_with(inputs)
    return runner.kept


def output_nodes(program: Program) -> list[fx.Node]:
    """The nodes of the graph's outputs, the logits first."""
    found = program.graph.output_node().args[0]
    assert isinstance(found, (tuple, list))
    return [node for node in found if isinstance(node, fx.Node)]


def _predicate(wanted: Wanted) -> Callable[[fx.Node], bool]:
    if callable(wanted):
        return wanted
    names = frozenset(wanted)
    return lambda node: node.name in names


class _Weight:
    """A weight that no node has read yet."""

    def __init__(self, name: str) -> None:
        self.name = name


class GraphRunner(fx.Interpreter):
    def __init__(
        self,
        program: Program,
        weights: GraphWeights,
        wanted: Callable[[fx.Node], bool],
        wide: bool,
    ) -> None:
        super().__init__(program.graph_module, graph=program.graph)
        self.extra_traceback = False
        self.program, self.weights, self.wanted, self.wide = program, weights, wanted, wide
        self.kept: dict[str, Tensor] = {}
        self.given: Mapping[str, Tensor] = {}

    def run_with(self, inputs: Mapping[str, Tensor]) -> None:
        self.given = inputs
        self.run(enable_io_processing=False)

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.given.get(str(target))  # `use_cache` of an exported graph is read by nothing

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return _Weight(str(target))

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        assert target == "_guards_fn", f"{target}: not a call of an operator"

    def run_node(self, n: fx.Node) -> Any:
        try:
            value = super().run_node(n)
        except Exception as error:
            raise BuildError(f"{n.format_node()}: {error} (from {source_line(n)})") from error
        if isinstance(value, Tensor) and self.wanted(n):
            self.kept[n.name] = value.detach().clone()  # pools are written to later
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in CHECKS:  # of the trace's own device and shapes
            return None
        args, kwargs = _settled(args, self.wide), _settled(kwargs, self.wide)
        special = _SPECIAL.get(target)
        if special is not None and not kwargs and any(map(self._is_large, args)):
            return special(self, args)
        args, kwargs = self._read(args), self._read(kwargs)
        return super().call_function(target, args, kwargs)

    def _is_large(self, value: Any) -> bool:
        return isinstance(value, _Weight) and not self.weights.is_small(self.program, value.name)

    def _read(self, value: Any) -> Any:
        if isinstance(value, _Weight):
            return self.weights.whole(self.program, value.name, self.wide)
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._read, value))
        if isinstance(value, dict):
            return {key: self._read(part) for key, part in value.items()}
        return value

    def embedding(self, args: Any) -> Tensor:
        table, ids = args[:2]  # the others concern training
        return self.weights.rows(self.program, table.name, self._read(ids), self.wide)

    def linear(self, args: Any) -> Tensor:
        x, weight, bias = (*args, None)[:3]
        pieces = self.weights.pieces(self.program, weight.name, self.wide)
        y = torch.cat([torch.nn.functional.linear(x, piece) for piece in pieces], -1)
        return y if bias is None else y + self._read(bias)

    def experts(self, args: Any) -> Tensor:
        """As many experts at a time as make a block."""
        target = moe_experts if len(args) == 5 else int4_moe_experts
        x, scales, indices, *rest = args
        first = self.program.tensor(rest[0].name)
        count = max(1, self.weights.block // max(1, first[0].numel()))
        chosen = indices.unique().tolist()
        y = torch.zeros(x.shape, dtype=torch.float32)
        for start in range(0, len(chosen), count):
            group = chosen[start : start + count]
            parts = [
                self.weights.experts(self.program, value.name, group, self.wide)
                if isinstance(value, _Weight)
                else value
                for value in rest
            ]
            place = torch.zeros_like(indices)
            inside = torch.zeros_like(scales)
            for i, expert in enumerate(group):
                place[indices == expert] = i
                inside[indices == expert] = scales[indices == expert]
            y += target(x, inside, place, *parts).float()
        return y.to(x.dtype)

    def shared_experts(self, args: Any) -> Tensor:
        inner = swiglu_reference(self.linear((args[0], args[5])))
        return self.experts(args[:5]) + self.linear((inner, args[6]))

    def int4_shared_experts(self, args: Any) -> Tensor:
        gate_up, down = self._read(args[10:13]), self._read(args[13:])
        inner = swiglu_reference(int4_product(int4_linear, args[0], gate_up))
        return self.experts(args[:10]) + int4_product(int4_linear, inner, down)


_SPECIAL: dict[Any, Callable[[GraphRunner, Any], Tensor]] = {
    EMBEDDING: GraphRunner.embedding,
    LINEAR: GraphRunner.linear,
    moe_experts: GraphRunner.experts,
    int4_moe_experts: GraphRunner.experts,
    moe_shared_experts: GraphRunner.shared_experts,
    int4_moe_shared_experts: GraphRunner.int4_shared_experts,
}


def _settled(value: Any, wide: bool) -> Any:
    """Arguments of a call, with the CPU for the device of the trace, and where values are `wide`
    float32 for every narrower dtype."""
    if isinstance(value, (tuple, list)):
        return type(value)(_settled(part, wide) for part in value)
    if isinstance(value, dict):
        return {key: _settled(part, wide) for key, part in value.items()}
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return torch.float32 if wide and isinstance(value, torch.dtype) and value in NARROW else value
