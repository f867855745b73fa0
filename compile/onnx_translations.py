"""The table of translations to ONNX: one short function for each of a closed set of operators.

A translation gets the builder, the graph's node, and the node's arguments with tensors replaced by
the names of their ONNX values; it returns the name of its own value, or a list of several.
Attention is in onnx_attention.py and onnx_mla.py, mixtures of experts in onnx_moe.py,
INT4 weights in onnx_int4.py and onnx_int4_moe.py.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from seekforge.compile.onnx_attention import flatten_heads, translate_gathered_attention
from seekforge.compile.onnx_builder import OnnxBuilder, Value
from seekforge.compile.onnx_int4 import translate_int4_linear
from seekforge.compile.onnx_int4_moe import translate_int4_moe_experts
from seekforge.compile.onnx_mla import translate_gathered_mla_attention
from seekforge.compile.onnx_moe import translate_moe_experts, translate_moe_route
from seekforge.kernels.add_rms_norm import add_rms_norm
from seekforge.kernels.gathered_attention import gathered_attention
from seekforge.kernels.gathered_mla_attention import gathered_mla_attention
from seekforge.kernels.int4_linear import int4_linear
from seekforge.kernels.int4_moe_experts import int4_moe_experts
from seekforge.kernels.moe_experts import moe_experts
from seekforge.kernels.moe_route import moe_route
from seekforge.kernels.rms_norm import rms_norm
from seekforge.kernels.rope import rope
from seekforge.kernels.swiglu import swiglu

aten = torch.ops.aten


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
        flat = flatten_heads(b, x, heads * head_dim)
        y = b.op(
            "RotaryEmbedding", flat, cos, sin, positions, num_heads=heads,
            interleaved=int(interleaved), **extra,
        )  # fmt: skip
        # [batch, seq] as in the input (0), then heads
        rotated.append(b.reshape(y, [0, 0, heads, head_dim]))
    return rotated


def _view(b: OnnxBuilder, node: fx.Node, x: str, sizes: list[Any]) -> Value:
    return b.reshape(x, sizes)


def _split(b: OnnxBuilder, node: fx.Node, x: str, sizes: list[int], axis: int = 0) -> Value:
    parts: Value = b.op("Split", x, b.constant(sizes), outputs=len(sizes), axis=axis)
    return parts


def _getitem(b: OnnxBuilder, node: fx.Node, values: list[str], index: int) -> Value:
    return values[index]


def _sym_size(b: OnnxBuilder, node: fx.Node, x: str, dim: int) -> Value:
    return b.size(x, dim)


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
    gathered_attention: translate_gathered_attention,
    gathered_mla_attention: translate_gathered_mla_attention,
    moe_route: translate_moe_route,
    moe_experts: translate_moe_experts,
    int4_linear: translate_int4_linear,
    int4_moe_experts: translate_int4_moe_experts,
}
