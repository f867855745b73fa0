"""Failures provoked with the real libraries, and the message a user sees for each.

`python tests/provoked.py > docs/errors.md` writes the table; tests/test_failures.py keeps it true.
"""

from __future__ import annotations

import os
import resource
import stat
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
import onnx.parser
import torch
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from torch import fx, nn
from transformers import LlamaConfig, LlamaForCausalLM

from seekforge.compile import inductor, onnx_translations
from seekforge.compile.build import Options, build
from seekforge.compile.export import export_module
from seekforge.compile.failures import caught, explained
from seekforge.compile.failures_inductor import inductor_failure
from seekforge.compile.inductor import Job, compile_package, lower_inductor
from seekforge.compile.onnx import write_onnx
from seekforge.compile.steps import Steps
from seekforge.compile.tensorrt import build_tensorrt
from seekforge.compile.weights import WEIGHTS_NAME
from seekforge.kernels.errors import SeekforgeError
from seekforge.kernels.rms_norm import rms_norm
from seekforge.passes.kv_cache import GraphInput
from seekforge.passes.program import Program
from seekforge.runtime import tensorrt as tensorrt_session
from seekforge.runtime.onnxruntime import OnnxRuntimeSession
from seekforge.runtime.profiles import ShapeRange

Provoke = Callable[[Path], Any]
PROVOKED: dict[str, Provoke] = {}  # the situation, in words -> what provokes it in a folder
STACK = 'File "modeling_toy.py", line 41, in forward\n  {}'


def provoked(situation: str) -> Callable[[Provoke], Provoke]:
    def note(function: Provoke) -> Provoke:
        PROVOKED[situation] = function
        return function

    return note


def message(situation: str, folder: Path) -> str:
    """What a user sees; the folder's name is left out of it."""
    try:
        PROVOKED[situation](folder)
    except SeekforgeError as error:
        return explained(error).replace(str(folder), "OUT")
    raise AssertionError(f"{situation}: nothing was refused")


# TensorRT-RTX


def model_of(text: str, **tensors: np.ndarray | TensorProto) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 23]>\n{text}')
    for name, value in tensors.items():
        tensor = value if isinstance(value, TensorProto) else numpy_helper.from_array(value, name)
        model.graph.initializer.append(tensor)
    for node in model.graph.node:
        line = STACK.format(f"made {node.op_type}")
        node.metadata_props.add(key="pkg.torch.onnx.stack_trace", value=line)
        node.metadata_props.add(key="pkg.torch.onnx.fx_node", value=f"{node.name}_0")
    return model


def engine_of(
    folder: Path,
    text: str,
    opt: int = 4,
    target: str = "8.9",
    workspace: int | None = None,
    **tensors: Any,
) -> Path:
    """Builds it with a profile of 1, opt, 8 for every dynamic dimension."""
    model = model_of(text, **tensors)
    onnx.save(model, folder / "model.onnx")
    profile = {}
    for entry in model.graph.input:
        dims = [d.dim_value for d in entry.type.tensor_type.shape.dim]
        sizes = [tuple(d or size for d in dims) for size in (1, opt, 8)]
        profile[entry.name] = ShapeRange(*sizes)
    return build_tensorrt(
        folder / "model.onnx", folder / "model.engine", product="tensorrt-rtx",
        profiles=[profile], compute_capabilities=[target], workspace_bytes=workspace,
    ).engine  # fmt: skip


def packed(kind: int, name: str, *dims: int, byte: int = 0x88) -> TensorProto:
    return helper.make_tensor(name, kind, dims, bytes([byte] * (dims[0] * dims[1] // 2)), raw=True)


ADD = "g (float[n,4] x) => (float[n,4] y) { [sum] y = Add(x, x) }"
HEADS = "float16[1,2,8,32] q, float16[1,2,8,32] k, float16[1,2,8,{v}] v"
INT4 = """g (float16[4,32] x) => (float16[4,32] y) {
    [dequantise] w = DequantizeLinear <axis = 0, block_size = 32> (q, scales, zeros)
    [linear] y = MatMul(x, w) }"""
SCALES = np.ones((1, 32), np.float16)


@provoked("attention with a logit soft cap, for TensorRT-RTX")
def soft_cap(folder: Path) -> None:
    text = f"g ({HEADS.format(v=32)}) => (float16[1,2,8,32] y)"
    engine_of(folder, text + " { [attention] y = Attention <softcap = 30.0> (q, k, v) }")


@provoked("heads of V narrower than those of K, for TensorRT-RTX")
def narrow_values(folder: Path) -> None:
    text = f"g ({HEADS.format(v=16)}) => (float16[1,2,8,16] y)"
    engine_of(folder, text + " { [attention] y = Attention(q, k, v) }")


@provoked("INT4 weights with a zero point of 1, for TensorRT-RTX")
def zero_point(folder: Path) -> None:
    q, zeros = packed(TensorProto.INT4, "q", 32, 32), packed(TensorProto.INT4, "zeros", 1, 32)
    zeros.raw_data = bytes([0x11] * 16)
    engine_of(folder, INT4, q=q, scales=SCALES, zeros=zeros)


@provoked("unsigned INT4 weights, for TensorRT-RTX")
def unsigned_weights(folder: Path) -> None:
    q, zeros = packed(TensorProto.UINT4, "q", 32, 32), packed(TensorProto.UINT4, "zeros", 1, 32)
    engine_of(folder, INT4, q=q, scales=SCALES, zeros=zeros)


@provoked("an input of 16-bit unsigned integers, for TensorRT-RTX")
def element_type(folder: Path) -> None:
    engine_of(folder, "g (uint16[4] x) => (uint16[4] y) { [same] y = Identity(x) }")


@provoked("an operator that ONNX has not, for TensorRT-RTX")
def unknown_operator(folder: Path) -> None:
    engine_of(folder, "g (float[4] x) => (float[4] y) { [fancy] y = FancyNorm(x) }")


@provoked("float16 added to float32, for TensorRT-RTX")
def mixed_types(folder: Path) -> None:
    engine_of(folder, "g (float[4] x, float16[4] z) => (float[4] y) { [sum] y = Add(x, z) }")


@provoked("a reshape to another number of elements, for TensorRT-RTX")
def reshape(folder: Path) -> None:
    text = "g (float[4] x) => (float[3] y) { [shape] y = Reshape(x, sizes) }"
    engine_of(folder, text, sizes=np.array([3]))


@provoked("an input that TensorRT-RTX does not use")
def unused_input(folder: Path) -> None:
    engine_of(folder, "g (float[4] x, float[4] ghost) => (float[4] y) { [same] y = Identity(x) }")


@provoked("a workspace limit of one byte, for TensorRT-RTX")
def workspace(folder: Path) -> None:
    text = "g (float16[512,512] x) => (float16[512,512] y) { [a] z = MatMul(x, x) [b] "
    engine_of(folder, text + "w = Softmax(z) [c] y = MatMul(w, z) }", workspace=1)


@provoked("a profile whose optimum is beyond its maximum, for TensorRT-RTX")
def profile(folder: Path) -> None:
    engine_of(folder, ADD, opt=9)


@provoked("compute capability 9.0, for TensorRT-RTX")
def capability(folder: Path) -> None:
    engine_of(folder, ADD, target="9.0")


@provoked("250 MB of address space left for a TensorRT-RTX build")
def tensorrt_memory(folder: Path) -> None:
    engine_of(folder, ADD)  # all libraries are loaded
    weight = np.zeros((4096, 4096), np.float16)
    text = "g (float16[4,4096] x) => (float16[4,4096] y) { [a] z = MatMul(x, w1) [b] "
    with limited(resource.RLIMIT_AS, address_space() + (250 << 20)):
        engine_of(folder, text + "y = MatMul(z, w2) }", w1=weight, w2=weight)


@provoked("weights beside the model that were cut")
def cut_weights(folder: Path) -> None:
    model = model_of("g (float[4] x) => (float[4] y) { [sum] y = Add(x, w) }")
    model.graph.initializer.append(outside("w", "weights.safetensors"))
    (folder / "weights.safetensors").write_bytes(b"short")
    onnx.save(model, folder / "model.onnx")
    build_tensorrt(
        folder / "model.onnx", folder / "model.engine", product="tensorrt-rtx", profiles=[{}],
        compute_capabilities=["8.9"],
    )  # fmt: skip


def load_changed(folder: Path, change: Callable[[bytearray], bytearray]) -> None:
    """Loads an engine with TensorRT's own runtime, which without a GPU gets as far as the plan."""
    file = engine_of(folder, ADD)
    file.write_bytes(change(bytearray(file.read_bytes())))
    version = tensorrt_session.import_tensorrt("tensorrt-rtx").__version__
    manifest: Any = SimpleNamespace(
        backend="tensorrt-rtx", backend_version=version, compute_capability="8.9"
    )
    with patch.object(tensorrt_session, "unfit_reason", lambda _: None):
        tensorrt_session.load_engine(folder, manifest)


@provoked("a TensorRT-RTX engine written by another version")
def other_version(folder: Path) -> None:
    def change(plan: bytearray) -> bytearray:
        plan[88] ^= 3  # the plan's version, tried byte by byte
        return plan

    load_changed(folder, change)


@provoked("half a TensorRT-RTX engine")
def half_engine(folder: Path) -> None:
    load_changed(folder, lambda plan: plan[: len(plan) // 2])


@provoked("a TensorRT-RTX engine on a machine without a driver")
def no_driver(folder: Path) -> None:
    load_changed(folder, lambda plan: plan)


# ONNX's checker and ONNX Runtime


def outside(name: str, location: str) -> TensorProto:
    tensor = TensorProto(
        name=name, data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL
    )
    for key, value in (("location", location), ("offset", "0"), ("length", "16")):
        tensor.external_data.add(key=key, value=value)
    return tensor


def open_onnxruntime(folder: Path, model: onnx.ModelProto) -> None:
    """As a build does before it compares the engine with eager."""
    onnx.save(model, folder / "model.onnx")
    manifest: Any = SimpleNamespace(device="cpu")
    steps = quiet()
    steps.running = "verify"
    with caught("onnxruntime", folder / "onnxruntime.log", steps, folder / "model.onnx"):
        OnnxRuntimeSession(folder, manifest)


def quiet() -> Steps:
    return Steps("provoked", Console(file=open(os.devnull, "w")))  # noqa: PTH123, SIM115


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
    from safetensors.torch import save_file

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
    with patch("seekforge.compile.onnx.MAX_BYTES", 100):
        padded(folder, lambda graph, x: graph.call_function(torch.ops.aten.silu.default, (x,)))


# AOTInductor


def ragged(function: Callable[[fx.Graph, fx.Node], fx.Node]) -> Program:
    graph = fx.Graph()
    result = function(graph, graph.placeholder("x"))
    result.meta["stack_trace"] = '  File "transformers/modeling_toy.py", line 41, in forward'
    graph.output((result,))
    return Program(fx.GraphModule(nn.Module(), graph), {}, {}, "ragged", ["x"], ["logits"])


def tanh(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return graph.call_function(torch.ops.aten.tanh.default, (x,))


INPUTS = [GraphInput("x", torch.float32, ("tokens", 8))]


def package(folder: Path, program: Program) -> None:
    (folder / "engine").mkdir()
    lower_inductor(program, INPUTS, "cpu", folder / "engine")


@provoked("a C++ compiler that does not exist, for AOTInductor")
def no_compiler(folder: Path) -> None:
    with patch.dict(os.environ, CXX="/nonexistent/g++"):
        package(folder, ragged(tanh))


@provoked("a process of AOTInductor that the system kills")
def killed(folder: Path) -> None:
    program = folder / "killed"
    program.write_text("#!/bin/sh\nkill -9 $$\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    with patch.object(inductor.sys, "executable", str(program)):
        package(folder, ragged(tanh))


@provoked("1 GB of address space for AOTInductor")
def inductor_memory(folder: Path) -> None:
    program = folder / "limited"
    program.write_text(f'#!/bin/sh\nulimit -v 1000000\nexec {sys.executable} "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    with patch.object(inductor.sys, "executable", str(program)):
        package(folder, ragged(tanh))


def compile_here(folder: Path, program: Program) -> None:
    """In this process, where operators made here are known."""
    module = inductor._copy(program)
    try:
        compile_package(Job(module, tuple(INPUTS), "cpu", folder / "model.pt2", {}))
    except Exception:
        text = traceback.format_exc()
        log = folder / "inductor.log"
        raise inductor_failure(program, "model.pt2", "cpu", 1, text, log) from None


@provoked("an operator without a fake implementation, for AOTInductor")
def no_fake(folder: Path) -> None:
    library = torch.library.Library("provoked", "FRAGMENT")
    library.define("shapeless(Tensor x) -> Tensor")
    operator = torch.ops.provoked.shapeless.default
    compile_here(folder, ragged(lambda graph, x: graph.call_function(operator, (x,))))


@provoked("matrices that do not fit together, for AOTInductor")
def inductor_shapes(folder: Path) -> None:
    operator = torch.ops.aten.mm.default
    compile_here(folder, ragged(lambda graph, x: graph.call_function(operator, (x, x))))


# Export and the build around it


class Branches(LlamaForCausalLM):
    """A model whose code looks at values."""

    def forward(self, input_ids: Any = None, **more: Any) -> Any:  # type: ignore[override]
        if input_ids.max() > 3:
            return super().forward(input_ids=input_ids, **more)
        return super().forward(input_ids=input_ids + 1, **more)


class Fixes(LlamaForCausalLM):
    """A model whose code fixes the length."""

    def forward(self, input_ids: Any = None, **more: Any) -> Any:  # type: ignore[override]
        return super().forward(input_ids=input_ids.view(-1, 7), **more)


SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def exported(kind: type[LlamaForCausalLM]) -> None:
    with torch.device("meta"):
        module = kind(LlamaConfig(**SIZES)).eval().requires_grad_(False)
    export_module(module, {}, 64)


@provoked("a model that branches on values, for torch.export")
def branches(folder: Path) -> None:
    exported(Branches)


@provoked("a model that fixes the sequence's length, for torch.export")
def fixes(folder: Path) -> None:
    exported(Fixes)


def checkpoint(folder: Path) -> Path:
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder / "checkpoint")
    return folder / "checkpoint"


def build_here(folder: Path) -> None:
    options = Options(("onnxruntime",), max_batch=2, max_len=64, max_chunk=16, verify=False)
    build(checkpoint(folder), folder / "engines", options, quiet())


@provoked("files of at most 20 kB while weights are written")
def full_disk(folder: Path) -> None:
    path = checkpoint(folder)
    options = Options(("onnxruntime",), max_batch=2, max_len=64, max_chunk=16, verify=False)
    with limited(resource.RLIMIT_FSIZE, 20_000):
        build(path, folder / "engines", options, quiet())


@provoked("a fault of our own in a lowering")
def own_fault(folder: Path) -> None:
    def fault(*_: Any) -> Any:
        raise AssertionError("two weights were expected")

    with patch.dict(onnx_translations.TRANSLATIONS, {rms_norm: fault}):
        build_here(folder)


def address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


@contextmanager
def limited(kind: int, soft: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


# The table


def row(situation: str, text: str) -> str:
    """The situation, and of its message what does not depend on a library's version."""
    title, *lines = text.split("\n")
    parts = {key: value for key, _, value in (line.strip().partition(": ") for line in lines)}
    shown = [title, *(f"{key}: {parts[key]}" for key in ("at", "cause", "do") if key in parts)]
    cells = "<br>".join(line.replace("|", "\\|") for line in shown)
    return f"| {situation} | {cells} |"


def table(rows: Sequence[str]) -> str:
    return "\n".join(["| provoked by | what the user sees |", "|---|---|", *rows])


HEAD = """# Errors

Every failure of a build has one form, whatever it comes from:

    tensorrt-rtx refused node 'model.layers.1.self_attn.Attention' (Attention)
      at: modeling_llama.py:294 in forward: … -> FX node … -> ONNX node … -> layer …
      cause: TensorRT's attention has no logit soft cap
      do: build this model for onnxruntime or inductor
      tensorrt-rtx says: …
      log: engines/tensorrt-rtx.log

The first line says what failed; `at` leads from the model's source line to the backend's layer, as
far as it is known; the library's own words come last, and all of them are in the log. What they mean
is data, `compile/failures_known.py`: a row for each kind of message. What is wrong with the input
(an option, a checkpoint) is refused before anything heavy, in one line and with exit code 2.

Each of these is provoked with the real library by `tests/provoked.py`, which also writes this page
(`python tests/provoked.py > docs/errors.md`); the lines with the library's words and the log are left
out.

"""


def main() -> None:
    rows = []
    for situation in PROVOKED:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row(situation, message(situation, Path(folder))))
    print(HEAD + table(rows))


if __name__ == "__main__":
    main()
