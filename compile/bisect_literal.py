"""Translations to ONNX in float16 taken at their word: each node in the dtype that it says.

ONNX Runtime's CPU kernels have no float16 of their own: it computes such nodes in float32 and drops
the casts in between, so that what overflows on a GPU is right on the CPU. Here the nodes of one
operator are computed by ONNX's reference evaluator, which rounds after every node. Only operators
without matrix products, which would take it minutes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from safetensors import safe_open
from torch import Tensor, fx

from seekforge.compile.bisect_onnx import CutModel, ordered
from seekforge.compile.bisect_result import Found, limit_of, row_error

# Products, branches, and what the evaluator computes in ways of its own.
LEFT_OUT = {"MatMul", "Attention", "If", "Loop", "Scan", "TopK", "DequantizeLinear", "Gather"}


class RMSNormalization(OpRun):  # type: ignore[misc]
    """As ONNX defines it: normalised in float32 (stash_type 1, the default), rounded to x's dtype,
    then multiplied. The evaluator's own (onnx 1.23) squares in x's dtype."""

    op_domain = ""

    def _run(
        self, x: Any, scale: Any, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
    ) -> tuple[Any]:
        assert axis in (-1, x.ndim - 1) and stash_type == 1
        wide = x.astype(np.float32)
        normed = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + np.float32(epsilon))
        return (normed.astype(x.dtype) * scale,)


def judge_literally(
    cut: CutModel, inputs: Mapping[str, Tensor], values: Mapping[str, Tensor]
) -> float:
    """The worst share of its limit that a value comes to. inputs, values: as `CutModel.judge`
    takes them. Raises Found."""
    nodes = {name: node for node in cut.model.graph.node for name in node.output}
    known = {t.name: t for t in cut.model.graph.initializer}
    inside = {n: numpy_helper.to_array(t) for n, t in known.items() if not _outside(t)}
    worst = 0.0
    groups: dict[str, list[str]] = {}
    for name in cut.cut:
        groups.setdefault(cut.made_by[name], []).append(name)
    with safe_open(cut.weights, framework="np") as weights:
        there = set(weights.keys())
        for names in groups.values():
            needed, leaves = _needed(names, nodes, set(cut.cut))
            if any(node.op_type in LEFT_OUT or node.domain for node in needed):
                continue
            feeds: dict[str, Any] = {}
            for leaf in leaves:
                if leaf in cut.cut:
                    feeds[leaf] = values[cut.cut[leaf].name].numpy()
                elif leaf in inputs:
                    feeds[leaf] = inputs[leaf].numpy()
                elif leaf in inside:
                    feeds[leaf] = inside[leaf]
                elif leaf in there and leaf in known:
                    feeds[leaf] = weights.get_tensor(leaf)
            if len(feeds) < len(leaves):
                continue
            found = _run(needed, names, feeds)
            by_node = {cut.cut[name].name: value for name, value in found.items()}
            for name in names:
                worst = max(worst, _judge(cut, name, cut.cut[name], values, by_node, inputs))
    return worst


def _judge(
    cut: CutModel, name: str, node: fx.Node, values: Mapping[str, Tensor],
    found: Mapping[str, Tensor], inputs: Mapping[str, Tensor],
) -> float:  # fmt: skip
    reference, value = (ordered(node, given) for given in (values, found))
    error, limit = row_error(reference, value), limit_of(value)
    if error > limit:
        how = "computed in float16 as it is written"
        raise Found(cut.culprit(node, name, reference, value, {**values, **inputs}, how))
    return error / limit if limit else error


def _needed(
    names: Iterable[str], made: Mapping[str, onnx.NodeProto], known: set[str]
) -> tuple[list[onnx.NodeProto], set[str]]:
    """The nodes behind some values, in order, up to the values that are known; and these."""
    order: dict[int, onnx.NodeProto] = {}
    leaves: set[str] = set()
    queue = list(names)
    seen = set(queue)
    while queue:
        node = made[queue.pop()]
        order[id(node)] = node
        for read in filter(None, node.input):
            if read in known or read not in made:
                leaves.add(read)
            elif read not in seen:
                seen.add(read)
                queue.append(read)
    leaves -= set(names)
    place = {id(node): at for at, node in enumerate(made.values())}
    return sorted(order.values(), key=lambda node: place[id(node)]), leaves


def _run(
    nodes: list[onnx.NodeProto], names: list[str], feeds: Mapping[str, Any]
) -> dict[str, Tensor]:
    graph = helper.make_graph(
        nodes,
        "piece",
        [_info(name, array) for name, array in feeds.items()],
        [helper.make_tensor_value_info(name, onnx.TensorProto.UNDEFINED, None) for name in names],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    with np.errstate(all="ignore"):  # that it overflows is what is looked for
        results: Any = ReferenceEvaluator(model, new_ops=[RMSNormalization]).run(None, dict(feeds))
    return {
        n: torch.from_numpy(np.ascontiguousarray(r)) for n, r in zip(names, results, strict=True)
    }


def _info(name: str, array: Any) -> onnx.ValueInfoProto:
    kind = helper.np_dtype_to_tensor_dtype(array.dtype)
    return helper.make_tensor_value_info(name, kind, array.shape)


def _outside(tensor: onnx.TensorProto) -> bool:
    return bool(tensor.data_location == onnx.TensorProto.EXTERNAL)
