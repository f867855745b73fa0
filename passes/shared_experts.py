"""Routed experts plus shared ones -> one operator: two launches for one token in place of six.

    moe_experts(x, …) + linear(swiglu(linear(x, gate_up)), down)  ->  moe_shared_experts(x, …)
    int4_moe_experts and two int4_linear                          ->  int4_moe_shared_experts

For GPUs, ragged form, after INT4. Seen in DeepSeek-V2 and V3 (one or two shared experts, fused into
one MLP). Elsewhere separate nodes are better: the compiler fuses the addition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from seekforge.kernels.int4_linear import int4_linear
from seekforge.kernels.int4_moe_experts import int4_moe_experts
from seekforge.kernels.moe_experts import moe_experts
from seekforge.kernels.shared_experts import int4_moe_shared_experts, moe_shared_experts
from seekforge.kernels.swiglu import swiglu
from seekforge.passes.linears import LINEAR
from seekforge.passes.program import Program, same_shape
from seekforge.passes.rule import PassResult, rewrite_each

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Form:
    """Of an experts' operator: the linear layer of its format, its argument that is the bias (those
    between x and it are the weight), the arguments of either whose dtype is the weight's (INT4: the
    scales), and the operator for both."""

    linear: Any
    bias: int
    weight: int
    linear_weight: int
    both: Any


FORMS: dict[Any, Form] = {
    moe_experts: Form(LINEAR, 2, 3, 1, moe_shared_experts),
    int4_moe_experts: Form(int4_linear, 4, 4, 2, int4_moe_shared_experts),
}


def fuse_shared_experts(program: Program) -> PassResult:
    """Every experts node whose result is added to that of an MLP that reads the same x."""
    nodes = [node for target in FORMS for node in program.nodes(target)]
    return rewrite_each("shared_experts", program, nodes, _shared_of, _rewrite)


def _shared_of(experts: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | str:
    """The addition, gate_up and down of the shared experts beside these, or the reason why not."""
    form = FORMS[experts.target]
    users = list(experts.users)
    add = users[0] if len(users) == 1 else None
    if add is None or add.target is not aten.add.Tensor or add.kwargs:
        return f"their result goes to {', '.join(map(str, experts.users))}, not to one addition"
    down: Any = next((value for value in add.args if value is not experts), None)
    chain: list[Any] = [down]
    for expected in (form.linear, swiglu, form.linear):
        found = chain[-1]
        if not isinstance(found, fx.Node) or found.target is not expected:
            of = found.target if isinstance(found, fx.Node) else found
            return f"beside them is {found}, which is {of}, not {expected}"
        if len(found.users) > 1:
            return f"{found} is read by something else, too"
        if expected is not swiglu and found.args[form.bias : form.bias + 1] not in ((), (None,)):
            return f"{found} has a bias"
        chain.append(found.args[0])
    if chain[-1] is not experts.args[0]:
        return f"the shared experts read {chain[-1]}, these {experts.args[0]}"
    if not same_shape(down.meta["val"], experts.meta["val"]):
        return f"{down} and {experts} differ in shape"
    gate_up = chain[2]
    dtype = _dtype(experts.args[form.weight])
    for node in (gate_up, down):
        if _dtype(node.args[form.linear_weight]) != dtype:
            return f"the weight of {node} is {_dtype(node.args[form.linear_weight])}, not {dtype}"
    return add, gate_up, down


def _rewrite(
    program: Program, experts: fx.Node, add: fx.Node, gate_up: fx.Node, down: fx.Node
) -> None:
    form = FORMS[experts.target]
    weights = (*gate_up.args[1 : form.bias], *down.args[1 : form.bias])
    with program.graph.inserting_before(add):
        new = program.emit(form.both, *experts.args, *weights, like=experts)
    add.replace_all_uses_with(new)
    program.graph.erase_node(add)


def _dtype(node: Any) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype
