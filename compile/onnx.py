"""Lowers a padded program to ONNX (opset 23) for ONNX Runtime and TensorRT.

Own translation of a closed set of operators (onnx_translations.py): `torch.onnx.export` of the same
program costs several times as much (see docs/onnx.md) and would copy the weights; here the model's
external data is the engine's weights.safetensors, which is not touched. The graph is the same for
both backends but for mixtures of experts, latent attention and INT4 weights, where what is fast on
one is not accepted, or not fast, on the other (docs/moe-onnx.md, docs/int4-onnx.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
from onnx import helper
from torch import fx

from seekforge.compile.failures import failure, worded
from seekforge.compile.onnx_builder import DTYPES, OnnxBuilder
from seekforge.compile.onnx_nodes import OnnxNodes
from seekforge.compile.onnx_translations import TRANSLATIONS
from seekforge.passes.kv_cache import GraphInput, graph_outputs
from seekforge.passes.program import Program, source_line

OPSET = 23
# 11 reads opset 23; newer IR versions would shut out released runtimes.
IR_VERSION = 11
MAX_BYTES = (1 << 31) - 1  # of one protobuf message


def write_onnx(
    program: Program, inputs: Sequence[GraphInput], weights: Path, path: Path, target: str
) -> onnx.ModelProto:
    """Writes `path`; `weights` is the safetensors file of the program, in the same directory.
    target: the backend that will read it, "onnxruntime", "tensorrt" or "tensorrt-rtx".

    Raises BuildError for an operator that has no translation, naming its source line.
    """
    assert program.form == "padded" and weights.parent == path.parent
    builder = translated(program, weights, target)
    outputs = [
        helper.make_tensor_value_info(o.name, DTYPES[o.dtype], list(o.dims))
        for o in graph_outputs(program)
    ]
    graph = helper.make_graph(
        builder.nodes,
        "seekforge",
        [helper.make_tensor_value_info(i.name, DTYPES[i.dtype], list(i.dims)) for i in inputs],
        outputs,
        initializer=builder.initializers,
    )
    model = helper.make_model(
        graph,
        producer_name="seekforge",
        opset_imports=[
            helper.make_opsetid("", OPSET),
            *(helper.make_opsetid(domain, 1) for domain in sorted(builder.domains)),
        ],
        ir_version=IR_VERSION,
    )
    _write(model, path)
    _check(model, path)
    return model


def translated(program: Program, weights: Path, target: str) -> OnnxBuilder:
    """The builder with the ONNX nodes of the whole graph; its `values` has the names of theirs."""
    builder = OnnxBuilder(program, weights, target)
    for node in program.graph.nodes:
        _translate(builder, node)
    return builder


def _write(model: onnx.ModelProto, path: Path) -> None:
    """B48: protobuf keeps no more than 2 GB; the weights lie outside, so only a graph of millions
    of nodes comes near."""
    if model.ByteSize() > MAX_BYTES:
        raise worded(
            f"{path}: the ONNX graph takes {model.ByteSize()} bytes without its weights",
            f"an ONNX file holds at most {MAX_BYTES}, and libraries save more as an empty file",
            "build for inductor, or split the model",
        )
    path.write_bytes(model.SerializeToString())


def _check(model: onnx.ModelProto, path: Path) -> None:
    """The checker's opinion of the nodes; it refuses outside data that is a hard link, as the
    weights of a bundle are, so they are inputs to it."""
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    del bare.graph.initializer[:]
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entry = helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            bare.graph.input.append(entry)
        else:
            bare.graph.initializer.append(tensor)
    try:
        onnx.checker.check_model(bare)
    except onnx.checker.ValidationError as error:
        nodes = OnnxNodes(path)
        named = nodes.mentioned(str(error))
        at = nodes.chain(named[0]) if named else ()
        raise failure("onnx", f"refused {path}", str(error), at=at) from None


def _translate(builder: OnnxBuilder, node: fx.Node) -> None:
    builder.origin = node
    if node.op == "placeholder":
        builder.values[node] = node.name
    elif node.op == "get_attr":
        builder.values[node] = str(node.target)  # declared by the operator that reads it
    elif node.op == "call_function":
        rule = TRANSLATIONS.get(node.target)
        if rule is None:
            raise worded(
                f"no ONNX translation for {node.target}",
                "the passes left an operator in the graph that is not of the closed set",
                "add its translation to compile/onnx_translations.py, or build for inductor",
                [source_line(node), f"FX node {node.name}"],
            )
        args = fx.node.map_arg(node.args, lambda n: builder.values[n])
        value: Any = rule(builder, node, *args)
        if node in builder.outputs:
            value = builder.op("Identity", value, output=builder.outputs[node])
        builder.values[node] = value
