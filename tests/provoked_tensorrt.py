"""What TensorRT-RTX refuses, while parsing, building and loading."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
from onnx import TensorProto, helper
from provoked import address_space, limited, model_of, outside, provoked

from seekforge.compile.tensorrt import DEFAULT, build_tensorrt
from seekforge.compile.tensorrt_options import TensorRTOptions
from seekforge.runtime import tensorrt as tensorrt_session
from seekforge.runtime.profiles import ShapeRange


def engine_of(
    folder: Path,
    text: str,
    opt: int = 4,
    options: TensorRTOptions = DEFAULT,
    workspace: int | None = None,
    memory: int = -1,
    **tensors: Any,
) -> Path:
    """Builds it with a profile of 1, opt, 8 for every dynamic dimension (opt 0: without one), in so
    many more bytes of memory (-1: any)."""
    model = model_of(text, **tensors)
    onnx.save(model, folder / "model.onnx")
    profile = {}
    for entry in model.graph.input:
        dims = [d.dim_value for d in entry.type.tensor_type.shape.dim]
        sizes = [tuple(d or size for d in dims) for size in (1, opt or 4, 8)]
        profile[entry.name] = ShapeRange(*sizes)
    with limited(resource.RLIMIT_AS, address_space() + memory if memory >= 0 else -1):
        return build_tensorrt(
            folder / "model.onnx", folder / "model.engine", product="tensorrt-rtx",
            profiles=[profile] if opt else [], options=options, workspace_bytes=workspace,
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


@provoked("a profile whose optimum is beyond its maximum")
def wrong_profile(folder: Path) -> None:
    engine_of(folder, ADD, opt=9)


@provoked("a dynamic dimension without a profile, for TensorRT-RTX")
def no_profile(folder: Path) -> None:
    engine_of(folder, ADD, opt=0)


@provoked("compute capability 9.0, for TensorRT-RTX")
def capability(folder: Path) -> None:
    engine_of(folder, ADD, options=TensorRTOptions(("9.0",)))


@provoked("a TensorRT-RTX engine without its weights, built on a machine without a GPU")
def stripped(folder: Path) -> None:
    text = "g (float16[n,4] x) => (float16[n,4] y) { [linear] y = MatMul(x, w) }"
    weight = np.ones((4, 4), np.float16)
    engine_of(folder, text, options=TensorRTOptions(strip=True), w=weight)


@provoked("300 MB of address space left for a TensorRT-RTX build")
def tensorrt_memory(folder: Path) -> None:
    engine_of(folder, ADD)  # all libraries are loaded
    weight = np.zeros((4096, 8192), np.float16)  # of 64 MB: always mapped afresh
    text = "g (float16[4,4096] x) => (float16[4,4096] y) { [a] z = MatMul(x, w1) [b] "
    engine_of(folder, text + "y = MatMul(z, w2) }", memory=300 << 20, w1=weight, w2=weight.T)


@provoked("weights beside the model that were cut")
def cut_weights(folder: Path) -> None:
    model = model_of("g (float[4] x) => (float[4] y) { [sum] y = Add(x, w) }")
    model.graph.initializer.append(outside("w", "weights.safetensors"))
    (folder / "weights.safetensors").write_bytes(b"short")
    onnx.save(model, folder / "model.onnx")
    build_tensorrt(
        folder / "model.onnx", folder / "model.engine", product="tensorrt-rtx", profiles=[{}],
    )  # fmt: skip


def load_changed(folder: Path, change: Callable[[bytearray], bytearray]) -> None:
    """Loads an engine with TensorRT's own runtime, which without a GPU gets as far as the plan."""
    folder = folder / "tensorrt-rtx"
    folder.mkdir()
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
