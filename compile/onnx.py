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

from seekforge.compile.onnx_builder import DTYPES, OnnxBuilder
from seekforge.compile.onnx_translations import TRANSLATIONS
from seekforge.kernels.errors import BuildError
from seekforge.passes.kv_cache import GraphInput, graph_outputs
from seekforge.passes.program import Program, source_line

OPSET = 23
# 11 reads opset 23; newer IR versions would shut out released runtimes.
IR_VERSION = 11


def write_onnx(
    program: Program, inputs: Sequence[GraphInput], weights: Path, path: Path, target: str
) -> onnx.ModelProto:
    """Writes `path`; `weights` is the safetensors file of the program, in the same directory.
    target: the backend that will read it, "onnxruntime", "tensorrt" or "tensorrt-rtx".

    Raises BuildError for an operator that has no translation, naming its source line.
    """
    assert program.form == "padded" and weights.parent == path.parent
    builder = OnnxBuilder(program, weights, target)
    for node in program.graph.nodes:
        _translate(builder, node)
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
    path.write_bytes(model.SerializeToString())
    return model


def _translate(builder: OnnxBuilder, node: fx.Node) -> None:
    builder.origin = node
    if node.op == "placeholder":
        builder.values[node] = node.name
    elif node.op == "get_attr":
        builder.values[node] = str(node.target)  # declared by the operator that reads it
    elif node.op == "call_function":
        rule = TRANSLATIONS.get(node.target)
        if rule is None:
            raise BuildError(
                f"no ONNX translation for {node.target} (node {node.name}, from "
                f"{source_line(node)}); add one to compile/onnx_translations.py"
            )
        args = fx.node.map_arg(node.args, lambda n: builder.values[n])
        value: Any = rule(builder, node, *args)
        if node in builder.outputs:
            value = builder.op("Identity", value, output=builder.outputs[node])
        builder.values[node] = value
