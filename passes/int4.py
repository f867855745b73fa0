"""INT4 insertion: linear layers and experts with weights of the checkpoint become INT4 operators.

    linear(x, W, b)                          ->  int4_linear(x, qweight, scales, zeros, b)
    moe_experts(x, w, i, gate_up, down)      ->  int4_moe_experts(x, w, i, qweight, scales, zeros …)

Runs after the fusions, so that a fused projection is quantised as one: groups lie along the input
features, and each row of the fused weight is a row of one checkpoint tensor. Only says how the new
parameters are made; the weight writer quantises tensor by tensor.

Left as they are: the head and the embedding; routers (256 rows of a model with 37 G active weights
decide which of them count); `kv_b_proj` of latent attention, whose absorbed form reads its rows
(0.4 % of V2-Lite's weights); what the user names; input features that no group size divides.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from seekforge.kernels.errors import InputError
from seekforge.kernels.int4_groups import group_size_of
from seekforge.kernels.int4_linear import int4_linear
from seekforge.kernels.int4_moe_experts import int4_moe_experts
from seekforge.kernels.moe_experts import moe_experts
from seekforge.kernels.moe_route import moe_route
from seekforge.passes.int4_options import HEAD
from seekforge.passes.int4_options import Int4Options as Int4Options
from seekforge.passes.linears import LINEAR, bias_of
from seekforge.passes.pattern import Miss
from seekforge.passes.program import Int4Part, Program, Weight, source_line
from seekforge.passes.rule import PassResult


def insert_int4(program: Program, options: Int4Options) -> PassResult:
    """fired: layers turned into INT4 operators. Misses: those that were not, with the reason.

    Raises InputError where nothing can be quantised, or a name to skip is of no weight.
    """
    start, before = time.perf_counter(), len(program.graph.nodes)
    sources = [source for weight in program.weights.values() for source in weight.sources]
    for pattern in options.skip:
        if pattern != HEAD and not any(matches(source, [pattern]) for source in sources):
            raise InputError(f"--skip {pattern}: no weight of the checkpoint has that in its name")
    fired, misses = 0, []
    for node in [*program.nodes(LINEAR), *program.nodes(moe_experts)]:
        weights: list[Any] = list(node.args[1:2] if node.target is LINEAR else node.args[3:5])
        refused = next(filter(None, (_refused(program, w, options) for w in weights)), None)
        if refused is None and any(user.target is moe_route for user in node.users):
            refused = "a router"
        if refused:
            misses.append(Miss(node.name, refused, source_line(node)))
            continue
        packed = [part for weight in weights for part in _packed(program, weight, options)]
        size = _group_size(weights[0], options)
        with program.graph.inserting_before(node):
            if node.target is LINEAR:
                args = (node.args[0], *packed, bias_of(node), size)
                new = program.emit(int4_linear, *args, like=node)
            else:
                args = (*node.args[:3], *packed, size)
                new = program.emit(int4_moe_experts, *args, like=node)
        node.replace_all_uses_with(new)
        program.graph.erase_node(node)
        fired += 1
    if not fired:
        reasons = sorted({miss.reason for miss in misses})
        raise InputError(
            f"no layer can be quantised with group size {options.group_size}: "
            f"{'; '.join(reasons[:4]) or 'the model has no linear layers'}"
        )
    program.drop_unused()
    program.graph.lint()
    after = len(program.graph.nodes)
    return PassResult("int4", fired, tuple(misses), before, after, time.perf_counter() - start)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """True where one of `patterns` is a dotted part of a parameter's name: "mlp.gate" is in
    "layers.1.mlp.gate.weight", not in "layers.1.mlp.gate_proj.weight"."""
    dotted = f".{name.removesuffix('.weight')}."
    return any(f".{pattern.strip('.')}." in dotted for pattern in patterns)


def int4_sizes(program: Program) -> dict[str, int]:
    """Group size of each INT4 weight of the program, by its name."""
    return {
        name[: -len("_qweight")]: weight.int4.group_size
        for name, weight in program.weights.items()
        if weight.int4 is not None and weight.int4.part == "qweight"
    }


def int4_tensors(program: Program) -> dict[str, int]:
    """Group size of each checkpoint tensor that is stored in INT4."""
    return {
        source: weight.int4.group_size
        for weight in program.weights.values()
        if weight.int4 is not None
        for source in weight.sources
    }


def sign_int4(program: Program) -> None:
    """Stores quantised weights as ONNX's signed INT4, for backends that take the type itself."""
    for name, weight in program.weights.items():
        if weight.int4 is not None and weight.int4.part == "qweight":
            program.weights[name] = replace(weight, int4=replace(weight.int4, signed=True))


def _refused(program: Program, weight: Any, options: Int4Options) -> str | None:
    sources = program.weights[str(weight.target)].sources if weight.op == "get_attr" else ()
    if not sources:
        return f"{weight.name} is no weight of the checkpoint"
    skipped = [
        matches(source, options.skip) or (options.only is not None and source not in options.only)
        for source in sources
    ]
    if all(skipped):
        return f"{sources[0]} is to be left as it is"
    if any(skipped):
        odd = [source for source, skip in zip(sources, skipped, strict=True) if skip]
        if options.only is not None:
            raise InputError(
                f"of the weights that are fused into one, {', '.join(odd[:4])} are not INT4 and "
                f"{', '.join(s for s in sources if s not in odd)} are; quantise all or none of them"
            )
        return f"of the fused weights, {', '.join(odd[:4])} are to be left as they are"
    if any(user.target is torch.ops.aten.embedding.default for user in weight.users):
        return f"{sources[0]} is the embedding too"
    features = int(weight.meta["val"].shape[-1])
    if group_size_of(features, options.group_size) is None:
        return f"no group size divides {features} input features"
    return None


def _group_size(weight: Any, options: Int4Options) -> int:
    size = group_size_of(int(weight.meta["val"].shape[-1]), options.group_size)
    assert size is not None
    return size


def _packed(program: Program, weight: fx.Node, options: Int4Options) -> list[fx.Node | None]:
    """The nodes of qweight, scales and zeros of one weight."""
    name = str(weight.target)
    meta, size = program.tensor(name), _group_size(weight, options)
    *lead, features = meta.shape
    shapes = {
        "qweight": ((*lead, features // 2), torch.uint8),
        "scales": ((*lead, features // size), meta.dtype),
        "zeros": ((*lead, features // size), torch.uint8),
    }
    nodes: list[fx.Node | None] = []
    for part, (shape, dtype) in shapes.items():
        if part == "zeros" and options.symmetric:
            nodes.append(None)
            continue
        made = Weight(program.weights[name].sources, int4=Int4Part(part, size, options.symmetric))
        # model.q_proj.weight -> model.q_proj.qweight; experts' gate_up_proj -> gate_up_proj_qweight
        full = f"{name[:-6]}{part}" if name.endswith(".weight") else f"{name}_{part}"
        nodes.append(program.add_weight(full, shape, dtype, made))
    return nodes
