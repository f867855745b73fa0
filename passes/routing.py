"""Reads what the routing of a MoE layer computes from its nodes, and proves it by running them.

In: a `moe_experts` node. Out: where its routing begins, and the arguments of `moe_route` that give
the same experts and weights; or the reason why there are none. How a version of transformers spells
the masking of groups does not matter: the nodes between the router's logits and the experts are run
on random logits and biases, and must do what `moe_route` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from seekforge.kernels.moe_route import moe_route_reference
from seekforge.passes.cleanup import VIEWS
from seekforge.passes.linears import LINEAR
from seekforge.passes.pattern import describe, name_of, skip_cast
from seekforge.passes.region import run_region

aten = torch.ops.aten

SCORINGS = {aten.softmax.int: "softmax", aten.sigmoid.default: "sigmoid"}
MAXIMA = (aten.max.dim, aten.amax.default)
DIVISIONS = (aten.div.Tensor, aten.div_.Tensor)
PRODUCTS = (aten.mul.Tensor, aten.mul_.Tensor)

ROWS = 16  # tokens routed in each trial
NEAR = 1e-5  # relative difference of weights that other orders of summation may make


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments of moe_route behind logits and bias, in its order."""

    top_k: int
    scoring: str
    groups: int
    top_groups: int
    group_score: str
    normalise: bool
    scale: float

    def arguments(self) -> tuple[int, str, int, int, str, bool, float]:
        return (
            self.top_k, self.scoring, self.groups, self.top_groups, self.group_score,
            self.normalise, self.scale,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Routing:
    """One layer: the router's linear node, the weight it adds to the scores or None, the nodes
    behind them up to the experts (in order), and what these compute."""

    experts: fx.Node
    gate: fx.Node
    bias: fx.Node | None
    region: tuple[fx.Node, ...]
    settings: Settings


def weights_of(experts: fx.Node) -> fx.Node:
    """The weights before they are rounded to the model's dtype."""
    node = skip_cast(experts.args[1])
    assert isinstance(node, fx.Node)
    return node


def read_routing(experts: fx.Node) -> Routing | str:
    """The routing in front of the experts as its nodes say it, or what is not understood.

    Nothing is proven yet: `prove` does that.
    """
    region: set[fx.Node] = set()
    edge: set[fx.Node] = set()
    queue = [node for node in experts.args[1:3] if isinstance(node, fx.Node)]
    while queue:
        node = queue.pop()
        if node.op != "call_function" or node.target is LINEAR:
            edge.add(node)
        elif node not in region:
            region.add(node)
            queue += node.all_input_nodes
    gates = [node for node in edge if node.target is LINEAR]
    others = sorted((node for node in edge if node.target is not LINEAR), key=str)
    if len(gates) != 1:
        return f"the routing depends on {len(gates)} linear layers, expected the router alone"
    if len(others) > 1 or any(node.op != "get_attr" for node in others):
        return f"the routing depends on {', '.join(map(describe, others))}, expected one bias"
    count = _shape(gates[0])[-1:]
    if others and _shape(others[0]) != count:
        return f"the bias {others[0]} is {_shape(others[0])}, expected {count}"
    ordered = tuple(node for node in experts.graph.nodes if node in region)
    settings = _read_settings(ordered, gates[0], experts.args[2])
    if isinstance(settings, str):
        return settings
    return Routing(experts, gates[0], others[0] if others else None, ordered, settings)


def _read_settings(region: tuple[fx.Node, ...], gate: fx.Node, indices: Any) -> Settings | str:
    scorings = [SCORINGS[node.target] for node in region if node.target in SCORINGS]
    if len(scorings) != 1:
        names = ", ".join(dict.fromkeys(name_of(n.target) for n in region if _is_aten(n)))
        return f"expected one softmax or sigmoid of the router's logits, found {names}"
    final = indices.args[0] if indices.args else None
    if not isinstance(final, fx.Node) or final.target is not aten.topk.default:
        return f"expected the indices of a topk, found {describe(indices)}"
    normalise, scale = False, 1.0
    for node in region:
        factor = node.args[1] if len(node.args) > 1 else None
        if node.target in PRODUCTS and isinstance(factor, (int, float)):
            scale *= factor
        if node.target in DIVISIONS:
            normalise |= isinstance(factor, fx.Node)
            scale /= factor if isinstance(factor, (int, float)) else 1
    groups = _read_groups(region, _shape(gate)[-1], final)
    if isinstance(groups, str):
        return groups
    return Settings(_shape(indices)[-1], scorings[0], *groups, normalise, scale)


def _read_groups(
    region: tuple[fx.Node, ...], experts: int, final: fx.Node
) -> tuple[int, int, str] | str:
    """(groups, top_groups, group_score); groups 1 where there are none or all are kept."""
    rank = len(_shape(final.args[0]))
    views = [node for node in region if node.target in VIEWS and len(_shape(node)) == rank + 1]
    if not views:
        return 1, 1, "max"
    groups, size = _shape(views[0])[-2:]
    if groups * size != experts:
        return f"{views[0]} makes {groups} groups of {size} of {experts} experts"
    scores = [node for node in views[0].users if node.target in (*MAXIMA, aten.topk.default)]
    if len(scores) != 1:
        return f"expected one score of each group, found {len(scores)} of {views[0]}"
    by_best = scores[0].target in MAXIMA or scores[0].args[1] == 1
    choices = [
        node for node in region
        if node.target is aten.topk.default and node not in (final, scores[0])
    ]  # fmt: skip
    if len(choices) != 1 or _shape(choices[0].args[0])[-1] != groups:
        return f"expected one topk of the {groups} groups, found {choices}"
    top_groups: Any = choices[0].args[1]
    if top_groups >= groups:
        return 1, 1, "max"
    return groups, top_groups, "max" if by_best else "top2"


def prove(found: Routing) -> str | None:
    """Runs the region beside moe_route on random logits and biases; returns where they differ.

    Logits are far enough apart that bf16 tells them from one another. Biases: around 0, and all
    negative, where a mask of 0 would let excluded experts win. Very negative logits show what is
    added to the sum that divides.
    """
    *leading, count = _shape(found.gate)
    settings = found.settings
    kept = settings.top_groups * count // settings.groups
    if settings.top_k > kept:
        return f"chooses {settings.top_k} experts, but the groups kept have {kept}"
    random = torch.Generator().manual_seed(0)
    shape = (ROWS,) if len(leading) == 1 else (2, ROWS // 2)
    step = 2.0 ** -max(0, (count - 1).bit_length() - 4)  # logits within -8..8
    for shift in (0.0, -24.0):
        for offset in (None,) if found.bias is None else (0.0, -2.0):
            order = torch.rand((*shape, count), generator=random).argsort(-1)
            given = {found.gate: (order - count // 2) * step + shift}
            if found.bias is not None and offset is not None:
                given[found.bias] = 0.3 * torch.randn(count, generator=random) + offset
            given = {node: value.to(node.meta["val"].dtype) for node, value in given.items()}
            differs = _compare(found, given)
            if differs:
                about = "" if offset is None else f", biases around {offset}"
                return f"logits around {shift}{about}: {differs}"
    return None


def _compare(found: Routing, given: dict[fx.Node, Tensor]) -> str | None:
    """The first token that the region routes otherwise than moe_route."""
    bias = given[found.bias] if found.bias is not None else None
    right = moe_route_reference(given[found.gate], bias, *found.settings.arguments())
    indices: Any = found.experts.args[2]
    actual = run_region([weights_of(found.experts), indices], given)
    if isinstance(actual, str):
        return f"the routing cannot be run alone: {actual}"
    (w, i), (right_w, right_i) = (_by_expert(*pair) for pair in (actual, right))
    for token in range(ROWS):
        chosen, expected = i[token].tolist(), right_i[token].tolist()
        if chosen != expected:
            return f"chooses experts {chosen}, not {expected} as {found.settings}"
        if not torch.allclose(w[token], right_w[token], rtol=NEAR, atol=0):
            values = [[round(v, 6) for v in x[token].tolist()] for x in (w, right_w)]
            return f"gives weights {values[0]}, not {values[1]} as {found.settings}"
    return None


def _by_expert(weights: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """[tokens, top_k], the chosen experts in ascending order."""
    indices, order = indices.flatten(0, -2).sort(-1)
    return weights.flatten(0, -2).float().gather(-1, order), indices


def _is_aten(node: fx.Node) -> bool:
    return name_of(node.target).startswith("aten")


def _shape(node: Any) -> tuple[Any, ...]:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else ()
