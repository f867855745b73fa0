"""Lowers a padded program to ONNX (opset 23), one graph for ONNX Runtime and TensorRT.

Own translation of a closed set of operators, one function each: `torch.onnx.export` of the same
program costs several times as much (see docs/onnx.md) and would copy the weights; here the model's
external data is the engine's weights.safetensors, which is not touched. Every node keeps the
transformers source line it came from, so that a backend's refusal can be worded in the user's
terms.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import fx

from seekforge.compile.weights import data_offsets
from seekforge.kernels.add_rms_norm import add_rms_norm
from seekforge.kernels.errors import BuildError
from seekforge.kernels.gathered_attention import gathered_attention
from seekforge.kernels.rms_norm import rms_norm
from seekforge.kernels.rope import rope
from seekforge.kernels.swiglu import swiglu
from seekforge.passes.kv_cache import GraphInput
from seekforge.passes.program import Program, module_path, source_line

aten = torch.ops.aten
OPSET = 23
# 11 reads opset 23; newer IR versions would shut out released runtimes.
IR_VERSION = 11
STACK_KEY = "pkg.torch.onnx.stack_trace"
DTYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.int64: TensorProto.INT64,
    torch.bool: TensorProto.BOOL,
}
Value = str | list[str]


def write_onnx(
    program: Program, inputs: Sequence[GraphInput], weights: Path, path: Path
) -> onnx.ModelProto:
    """Writes `path`; `weights` is the safetensors file of the program, in the same directory.

    Raises BuildError for an operator that has no translation, naming its source line.
    """
    assert program.form == "padded" and weights.parent == path.parent
    builder = OnnxBuilder(program, weights)
    for node in program.graph.nodes:
        builder.translate(node)
    outputs = [
        helper.make_tensor_value_info(
            name, DTYPES[node.meta["val"].dtype], _output_dims(name, node, inputs)
        )
        for name, node in zip(program.outputs, program.graph.output_node().args[0], strict=True)  # type: ignore[arg-type]
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
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
    )
    path.write_bytes(model.SerializeToString())
    return model


def _output_dims(name: str, node: fx.Node, inputs: Sequence[GraphInput]) -> list[int | str]:
    value = node.meta["val"]
    lead = ["rows"] if name == "logits" else ["batch", "seq"]
    return [*lead, *map(int, value.shape[len(lead) :])]


class OnnxBuilder:
    """Grows the list of ONNX nodes; `values` maps each graph node to the name of its ONNX value."""

    def __init__(self, program: Program, weights: Path) -> None:
        self.program = program
        self.weights_name = weights.name
        self.offsets = data_offsets(weights)
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.values: dict[fx.Node, Value] = {}
        self.known: dict[Any, str] = {}
        self.names: set[str] = set()
        self.outputs = dict(
            zip(program.graph.output_node().args[0], program.outputs, strict=True)  # type: ignore[arg-type]
        )
        self.origin: fx.Node | None = None

    def translate(self, node: fx.Node) -> None:
        self.origin = node
        if node.op == "placeholder":
            self.values[node] = node.name
        elif node.op == "get_attr":
            self.values[node] = self.weight(str(node.target))
        elif node.op == "call_function":
            rule = TRANSLATIONS.get(node.target)
            if rule is None:
                raise BuildError(
                    f"no ONNX translation for {node.target} (node {node.name}, from "
                    f"{source_line(node)}); add one to compile/onnx.py"
                )
            args = fx.node.map_arg(node.args, lambda n: self.values[n])
            value: Any = rule(self, node, *args)
            if node in self.outputs:
                value = self.op("Identity", value, output=self.outputs[node])
            self.values[node] = value

    def op(
        self,
        kind: str,
        *inputs: str,
        output: str | None = None,
        outputs: int = 1,
        **attributes: Any,
    ) -> Any:
        """Adds a node; equal nodes are added once. Returns its output name, or names if several."""
        key = (kind, inputs, outputs, tuple(sorted((k, str(v)) for k, v in attributes.items())))
        if output is None and key in self.known:
            return self.known[key]
        name = self.unique(f"{module_path(self.origin) if self.origin else ''}.{kind}".strip("."))
        if outputs > 1:
            results = [f"{name}:{i}" for i in range(outputs)]
        else:
            results = [output or f"{name}:0"]
        node = helper.make_node(kind, list(inputs), results, name=name, **attributes)
        trace = self.origin.meta.get("stack_trace") if self.origin else None
        if trace:
            # The innermost frame of the model's own code; the whole stack would be half the file.
            frames = [f for f in trace.split("  File ")[1:] if "/torch/" not in f.split(",")[0]]
            entry = node.metadata_props.add()
            entry.key, entry.value = STACK_KEY, "  File " + frames[-1] if frames else trace
        self.nodes.append(node)
        result: Any = results if outputs > 1 else results[0]
        if output is None:
            self.known[key] = result
        return result

    def unique(self, name: str) -> str:
        candidate, number = name, 1
        while candidate in self.names:
            number += 1
            candidate = f"{name}_{number}"
        self.names.add(candidate)
        return candidate

    def weight(self, name: str) -> str:
        """An initializer whose data lies in the weights file; a bare file name, so folders can
        move."""
        if name not in self.names:
            meta = self.program.tensor(name)
            offset, length = self.offsets[name]
            tensor = TensorProto(
                name=name,
                data_type=DTYPES[meta.dtype],
                dims=list(meta.shape),
                data_location=TensorProto.EXTERNAL,
            )
            for key, value in (
                ("location", self.weights_name), ("offset", str(offset)), ("length", str(length)),
            ):  # fmt: skip
                tensor.external_data.add(key=key, value=value)
            self.initializers.append(tensor)
            self.names.add(name)
        return name

    def constant(self, value: Any, dtype: torch.dtype = torch.int64) -> str:
        """A small constant inside the model file."""
        key = ("constant", str(value), dtype)
        if key not in self.known:
            name = self.unique("constant")
            array = np.asarray(value, dtype=np.int64 if dtype == torch.int64 else np.float32)
            tensor = numpy_helper.from_array(array, name)
            if dtype not in (torch.int64, torch.float32):
                values = torch.tensor(array).to(dtype).flatten()
                raw = values.view(torch.int16).numpy().tobytes()
                tensor = helper.make_tensor(name, DTYPES[dtype], array.shape, raw, raw=True)
            self.initializers.append(tensor)
            self.known[key] = name
        return self.known[key]

    def shape(self, sizes: Sequence[int | str]) -> str:
        """A shape: numbers, and names of one-element tensors for the dynamic ones."""
        if all(isinstance(size, int) for size in sizes):
            return self.constant(list(sizes))
        pieces = [self.constant([s]) if isinstance(s, int) else s for s in sizes]
        return str(self.op("Concat", *pieces, axis=0))

    def reshape(self, x: str, sizes: Sequence[int | str]) -> str:
        return str(self.op("Reshape", x, self.shape(sizes)))

    def cast(self, x: str, dtype: torch.dtype) -> str:
        return str(self.op("Cast", x, to=DTYPES[dtype]))


def _dtype(node: fx.Node, argument: int = 0) -> torch.dtype:
    source: Any = node.args[argument]
    dtype = source.meta["val"].dtype
    assert isinstance(dtype, torch.dtype)
    return dtype


def _embedding(b: OnnxBuilder, node: fx.Node, table: str, ids: str, *_: Any) -> Value:
    return str(b.op("Gather", table, ids, axis=0))


def _linear(b: OnnxBuilder, node: fx.Node, x: str, weight: str, bias: str | None = None) -> Value:
    # The checkpoint's own layout [out, in]: backends fold the transpose into the product.
    y = str(b.op("MatMul", x, b.op("Transpose", weight, perm=[1, 0])))
    return y if bias is None else str(b.op("Add", y, bias))


def _norm(b: OnnxBuilder, x: str, weight: str, eps: float, dtype: torch.dtype, width: int) -> str:
    if dtype == torch.float32:
        return str(b.op("RMSNormalization", x, weight, axis=-1, epsilon=eps))
    # transformers rounds before it multiplies by the weight; RMSNormalization after.
    ones = b.constant([1.0] * width, dtype)
    return str(b.op("Mul", b.op("RMSNormalization", x, ones, axis=-1, epsilon=eps), weight))


def _rms_norm(b: OnnxBuilder, node: fx.Node, x: str, weight: str, eps: float) -> Value:
    return _norm(b, x, weight, eps, _dtype(node), int(node.meta["val"].shape[-1]))


def _add_rms_norm(
    b: OnnxBuilder, node: fx.Node, x: str, residual: str, weight: str, eps: float
) -> Value:
    total = str(b.op("Add", x, residual))
    width = int(node.meta["val"][0].shape[-1])
    return [_norm(b, total, weight, eps, _dtype(node), width), total]


def _swiglu(b: OnnxBuilder, node: fx.Node, gate_up: str) -> Value:
    dtype = _dtype(node)
    gate, up = b.op("Split", gate_up, outputs=2, axis=-1, num_outputs=2)
    wide = b.cast(gate, torch.float32) if dtype != torch.float32 else gate
    silu = b.op("Mul", wide, b.op("Sigmoid", wide))
    if dtype != torch.float32:
        silu = b.cast(silu, dtype)
    return str(b.op("Mul", silu, up))


def _rope(
    b: OnnxBuilder, node: fx.Node, q: str, k: str, cos: str, sin: str, positions: str,
    interleaved: bool,
) -> Value:  # fmt: skip
    dtype = _dtype(node)
    rotary_dim = 2 * int(node.args[2].meta["val"].shape[-1])  # type: ignore[union-attr]
    if dtype != torch.float32:  # one type for x and tables
        cos, sin = b.cast(cos, dtype), b.cast(sin, dtype)
    rotated = []
    for x, argument in ((q, 0), (k, 1)):
        heads, head_dim = map(int, node.args[argument].meta["val"].shape[-2:])  # type: ignore[union-attr]
        extra: dict[str, Any] = (
            {} if rotary_dim == head_dim else {"rotary_embedding_dim": rotary_dim}
        )
        flat = _flatten_heads(b, x, heads * head_dim)
        y = b.op(
            "RotaryEmbedding", flat, cos, sin, positions, num_heads=heads,
            interleaved=int(interleaved), **extra,
        )  # fmt: skip
        # [batch, seq] as in the input (0), then heads
        rotated.append(b.reshape(y, [0, 0, heads, head_dim]))
    return rotated


def _flatten_heads(b: OnnxBuilder, x: str, width: int) -> str:
    """[batch, seq, heads, head_dim] -> [batch, seq, heads * head_dim]."""
    return b.reshape(x, [0, 0, width])


def _gathered_attention(
    b: OnnxBuilder, node: fx.Node, q: str, k: str, v: str, k_pool: str, v_pool: str,
    block_tables: str, past_lens: str, scale: float,
) -> Value:  # fmt: skip
    heads, head_dim = map(int, node.args[0].meta["val"].shape[-2:])  # type: ignore[union-attr]
    kv_heads = int(node.args[1].meta["val"].shape[-2])  # type: ignore[union-attr]
    v_dim = int(node.args[2].meta["val"].shape[-1])  # type: ignore[union-attr]
    keys: list[str] = []
    values: list[str] = []
    for new, pool, width, parts in (
        (k, k_pool, kv_heads * head_dim, keys),
        (v, v_pool, kv_heads * v_dim, values),
    ):
        cached = b.op("Gather", pool, block_tables, axis=0)  # [batch, blocks, block, heads, dim]
        parts += [b.reshape(cached, [0, -1, width]), _flatten_heads(b, new, width)]
    y = b.op(
        "Attention",
        _flatten_heads(b, q, heads * head_dim),
        b.op("Concat", *keys, axis=1),
        b.op("Concat", *values, axis=1),
        _mask(b, q, block_tables, k_pool, past_lens),
        scale=scale,
        q_num_heads=heads,
        kv_num_heads=kv_heads,
    )
    return b.reshape(y, [0, 0, heads, v_dim])


def _mask(b: OnnxBuilder, q: str, block_tables: str, pool: str, past_lens: str) -> str:
    """[batch, 1, seq, past + seq]: cached keys below past_lens, and new keys up to the query's own.

    The same for all layers: sizes are read from the first layer's tensors and equal nodes merge.
    """
    if "mask" in b.known:
        return b.known["mask"]
    zero, one = b.constant(0), b.constant(1)
    blocks = b.op("Shape", block_tables, start=1, end=2)
    block_size = b.op("Shape", pool, start=1, end=2)
    seq = b.op("Squeeze", b.op("Shape", q, start=1, end=2))
    past = b.op("Squeeze", b.op("Mul", blocks, block_size))
    key = b.op("Range", zero, b.op("Add", past, seq), one)  # [past + seq]
    query = b.reshape(b.op("Range", zero, seq, one), [-1, 1])  # [seq, 1]
    lens = b.reshape(past_lens, [-1, 1, 1, 1])
    new = b.op("Sub", key, past)
    causal = b.op("And", b.op("GreaterOrEqual", new, zero), b.op("LessOrEqual", new, query))
    b.known["mask"] = str(b.op("Or", b.op("Less", key, lens), causal))
    return b.known["mask"]


def _view(b: OnnxBuilder, node: fx.Node, x: str, sizes: list[Any]) -> Value:
    return b.reshape(x, sizes)


def _split(b: OnnxBuilder, node: fx.Node, x: str, sizes: list[int], axis: int = 0) -> Value:
    parts: Value = b.op("Split", x, b.constant(sizes), outputs=len(sizes), axis=axis)
    return parts


def _getitem(b: OnnxBuilder, node: fx.Node, values: list[str], index: int) -> Value:
    return values[index]


def _sym_size(b: OnnxBuilder, node: fx.Node, x: str, dim: int) -> Value:
    return str(b.op("Shape", x, start=dim, end=dim + 1))


def _index_select(b: OnnxBuilder, node: fx.Node, x: str, dim: int, index: str) -> Value:
    return str(b.op("Gather", x, index, axis=dim))


def _transpose(b: OnnxBuilder, node: fx.Node, x: str, first: int, second: int) -> Value:
    order = list(range(node.meta["val"].dim()))
    order[first], order[second] = order[second], order[first]
    return str(b.op("Transpose", x, perm=order))


def _binary(kind: str) -> Callable[..., Value]:
    def translate(b: OnnxBuilder, node: fx.Node, x: Any, y: Any) -> Value:
        dtype = node.meta["val"].dtype
        x, y = (v if isinstance(v, str) else b.constant(v, dtype) for v in (x, y))
        return str(b.op(kind, x, y))

    return translate


def _concat(b: OnnxBuilder, node: fx.Node, tensors: list[str], dim: int = 0) -> Value:
    return str(b.op("Concat", *tensors, axis=dim))


def _to_dtype(b: OnnxBuilder, node: fx.Node, x: str, dtype: torch.dtype) -> Value:
    return b.cast(x, dtype)


TRANSLATIONS: dict[Any, Callable[..., Value]] = {
    operator.getitem: _getitem,
    aten.embedding.default: _embedding,
    aten.linear.default: _linear,
    aten.view.default: _view,
    aten.reshape.default: _view,
    aten.split_with_sizes.default: _split,
    aten.sym_size.int: _sym_size,
    aten.index_select.default: _index_select,
    aten.transpose.int: _transpose,
    aten.cat.default: _concat,
    aten.to.dtype: _to_dtype,
    aten.add.Tensor: _binary("Add"),
    aten.mul.Tensor: _binary("Mul"),
    rms_norm: _rms_norm,
    add_rms_norm: _add_rms_norm,
    rope: _rope,
    swiglu: _swiglu,
    gathered_attention: _gathered_attention,
}
