"""What ONNX's checker, ONNX Runtime and our own translation refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import onnx
import torch
from provoked import model_of, outside, provoked, quiet
from safetensors.torch import save_file
from torch import fx, nn

from seekforge.compile import onnx_translations
from seekforge.compile.failures import caught
from seekforge.compile.onnx import write_onnx
from seekforge.compile.weights import WEIGHTS_NAME
from seekforge.passes.kv_cache import GraphInput
from seekforge.passes.program import Program
from seekforge.runtime.onnxruntime import OnnxRuntimeSession

ADD = "g (float[n,4] x) => (float[n,4] y) { [sum] y = Add(x, x) }"


def open_onnxruntime(folder: Path, model: onnx.ModelProto) -> None:
    """As a build does before it compares the engine with eager."""
    onnx.save(model, folder / "model.onnx")
    manifest: Any = SimpleNamespace(device="cpu")
    steps = quiet()
    steps.running = "verify"
    with caught("onnxruntime", folder / "onnxruntime.log", steps, folder / "model.onnx"):
        OnnxRuntimeSession(folder, manifest)


@provoked("bfloat16 for ONNX Runtime on the CPU")
def bfloat16(folder: Path) -> None:
    text = "g (bfloat16[4,4] x) => (bfloat16[4,4] y) { [linear] y = MatMul(x, x) }"
    open_onnxruntime(folder, model_of(text))


@provoked("an operator that ONNX Runtime has not")
def unknown_to_onnxruntime(folder: Path) -> None:
    text = "g (float[4] x) => (float[4] y) { [fancy] y = FancyNorm(x) }"
    open_onnxruntime(folder, model_of(text))


@provoked("an opset from the future, for ONNX Runtime")
def future_opset(folder: Path) -> None:
    model = model_of(ADD)
    model.opset_import[0].version = 99
    open_onnxruntime(folder, model)


@provoked("an IR version from the future, for ONNX Runtime")
def future_format(folder: Path) -> None:
    model = model_of(ADD)
    model.ir_version = 99
    open_onnxruntime(folder, model)


@provoked("float16 added to float32, for ONNX Runtime")
def mixed_in_onnxruntime(folder: Path) -> None:
    text = "g (float[4] x, float16[4] z) => (float[4] y) { [sum] y = Add(x, z) }"
    open_onnxruntime(folder, model_of(text))


@provoked("matrices that do not fit together, for ONNX Runtime")
def shapes(folder: Path) -> None:
    text = "g (float[4,4] x, float[3,3] z) => (float[4,3] y) { [linear] y = MatMul(x, z) }"
    open_onnxruntime(folder, model_of(text))


@provoked("weights that are not beside the model, for ONNX Runtime")
def missing_weights(folder: Path) -> None:
    model = model_of("g (float[4] x) => (float[4] y) { [sum] y = Add(x, w) }")
    model.graph.initializer.append(outside("w", "weights.safetensors"))
    open_onnxruntime(folder, model)


@provoked("weights said to lie in another folder, for ONNX Runtime")
def weights_elsewhere(folder: Path) -> None:
    model = model_of("g (float[4] x) => (float[4] y) { [sum] y = Add(x, w) }")
    model.graph.initializer.append(outside("w", "../weights.safetensors"))
    open_onnxruntime(folder, model)


def padded(folder: Path, function: Callable[[fx.Graph, fx.Node], fx.Node]) -> None:
    """`write_onnx` of a graph with one weight."""
    graph = fx.Graph()
    result = function(graph, graph.placeholder("x"))
    result.meta["val"] = torch.empty(3, 4)
    result.meta["stack_trace"] = '  File "transformers/modeling_toy.py", line 41, in forward'
    graph.output((result,))
    program = Program(fx.GraphModule(nn.Module(), graph), {}, {}, "padded", ["x"], ["logits"])
    save_file({"w": torch.zeros(1)}, folder / WEIGHTS_NAME)
    entries = [GraphInput("x", torch.float32, ("rows", 4))]
    write_onnx(program, entries, folder / WEIGHTS_NAME, folder / "model.onnx", "onnxruntime")


@provoked("an operator that no pass replaced, for ONNX")
def untranslated(folder: Path) -> None:
    padded(folder, lambda graph, x: graph.call_function(torch.ops.aten.sinh.default, (x,)))


@provoked("a translation that writes an attribute ONNX has not")
def wrong_translation(folder: Path) -> None:
    rule = {torch.ops.aten.silu.default: lambda b, _, x: b.op("Sigmoid", x, slope=2.0)}
    with patch.dict(onnx_translations.TRANSLATIONS, rule):
        padded(folder, lambda graph, x: graph.call_function(torch.ops.aten.silu.default, (x,)))


@provoked("a graph of more than 2 GB (the limit lowered to 100 bytes)")
def large_graph(folder: Path) -> None:
    rule = {torch.ops.aten.silu.default: lambda b, _, x: b.op("Sigmoid", x)}
    with (
        patch("seekforge.compile.onnx.MAX_BYTES", 100),
        patch.dict(onnx_translations.TRANSLATIONS, rule),
    ):
        padded(folder, lambda graph, x: graph.call_function(torch.ops.aten.silu.default, (x,)))
