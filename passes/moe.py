"""Mixture of experts: each layer's routing becomes one `moe_route` node in front of `moe_experts`.

The part of the graph between the router's linear layer and the weights and indices that the
experts read is replaced as a whole, once `passes/routing.py` has shown that `moe_route` computes
the same; a routing that differs in any step stays as it is, with the reason. Around it:

* The gate and the experts read the residual stream with the dimensions it has, without a view as
  [tokens, hidden] and back.
* The router's weight is stored in fp32 where the model casts it to fp32 in every step, and its
  bias in any case.
* A rounding of the weights to the model's dtype is left out: the experts are summed in fp32.
"""

from __future__ import annotations

import operator
import time
from typing import Any

import torch
from torch import fx

from seekforge.kernels.moe_experts import moe_experts
from seekforge.kernels.moe_route import moe_route
from seekforge.passes.cleanup import VIEWS
from seekforge.passes.linears import LINEAR
from seekforge.passes.pattern import Miss, skip_cast
from seekforge.passes.program import Program, fake_mode, same_shape, same_size, source_line
from seekforge.passes.routing import Routing, prove, read_routing, weights_of
from seekforge.passes.rule import PassResult

aten = torch.ops.aten


def fuse_moe(program: Program) -> PassResult:
    """fired: MoE layers that are one moe_route and one moe_experts now."""
    start, before = time.perf_counter(), len(program.graph.nodes)
    fired, misses = 0, []
    for experts in program.nodes(moe_experts):
        if any(node.target is moe_route for node in weights_of(experts).all_input_nodes):
            continue  # a second run
        found = read_routing(experts)
        refused = found if isinstance(found, str) else _refuse(found) or prove(found)
        if isinstance(found, Routing) and refused is None:
            _rewrite(program, found)
            fired += 1
        elif refused:
            misses.append(Miss(experts.name, refused, source_line(weights_of(experts))))
    program.drop_unused()
    program.graph.lint()
    after = len(program.graph.nodes)
    return PassResult("moe", fired, tuple(misses), before, after, time.perf_counter() - start)


def _refuse(found: Routing) -> str | None:
    router, experts = _unflattened(_gate_input(found.gate)), _unflattened(found.experts.args[0])
    first, second = router.meta["val"].shape, experts.meta["val"].shape
    if len(first) != len(second) or not all(map(same_size, first, second)):
        return f"the router reads {router}, the experts {experts}, which differ in shape"
    return None


def _rewrite(program: Program, found: Routing) -> None:
    experts, gate = found.experts, found.gate
    weight = _stored(program, gate)
    with program.graph.inserting_before(experts):
        x = _unflattened(_gate_input(gate))
        dtype = gate.args[0].meta["val"].dtype  # type: ignore[union-attr]
        if x.meta["val"].dtype != dtype:
            x = program.emit(aten.to.dtype, x, dtype, like=gate)
        logits = program.emit(LINEAR, x, weight, *gate.args[2:], like=gate)
        route = program.emit(moe_route, logits, found.bias, *found.settings.arguments(), like=gate)
        chosen = [program.emit(operator.getitem, route, i, like=gate) for i in range(2)]
        x = _unflattened(experts.args[0])
        new = program.emit(moe_experts, x, *chosen, *experts.args[3:], like=experts)
    for user in list(experts.users):
        if user.target in VIEWS and same_shape(user.meta["val"], new.meta["val"]):
            user.replace_all_uses_with(new)
            program.graph.erase_node(user)
    if experts.users:
        with program.graph.inserting_before(experts):
            flat = [-1, *experts.meta["val"].shape[1:]]
            experts.replace_all_uses_with(
                program.emit(aten.reshape.default, new, flat, like=experts)
            )
    program.graph.erase_node(experts)
    # Dead-code elimination keeps nodes that write in place. Nothing else reads what these write.
    if all(user in found.region for node in found.region for user in node.users):
        for node in reversed(found.region):
            program.graph.erase_node(node)
    if found.bias is not None and list(found.bias.users) == [route]:
        _store_as(program, found.bias, torch.float32)


def _gate_input(gate: fx.Node) -> Any:
    """What the router reads, before its cast to fp32."""
    return skip_cast(_unflattened(gate.args[0]))


def _unflattened(value: Any) -> fx.Node:
    """The value before views of its leading dimensions."""
    while value.target in VIEWS:
        source = value.args[0]
        if not same_size(source.meta["val"].shape[-1], value.meta["val"].shape[-1]):
            break
        value = source
    assert isinstance(value, fx.Node)
    return value


def _stored(program: Program, gate: fx.Node) -> Any:
    """The router's weight; in the dtype that every step would cast it to, where nothing else reads
    it."""
    weight: Any = gate.args[1]
    if weight.target is not aten.to.dtype or weight.args[0].op != "get_attr":
        return weight
    stored, dtype = weight.args
    if any(user.target is not aten.to.dtype or user.args[1] != dtype for user in stored.users):
        return weight
    for cast in list(stored.users):
        cast.replace_all_uses_with(stored)
        program.graph.erase_node(cast)
    _store_as(program, stored, dtype)
    return stored


def _store_as(program: Program, stored: fx.Node, dtype: torch.dtype) -> None:
    """Makes `dtype` the dtype of a parameter."""
    meta = program.tensor(str(stored.target)).to(dtype)
    path, _, leaf = str(stored.target).rpartition(".")
    owner = program.graph_module.get_submodule(path)
    delattr(owner, leaf)
    owner.register_buffer(leaf, meta)
    stored.meta["val"] = fake_mode(program.graph).from_tensor(meta, static_shapes=True)
