"""Experts with INT4 weights in ONNX, in a form for each backend (measured: docs/int4-onnx.md).

ONNX Runtime: the rows of all chosen experts sorted by expert, split, and each part multiplied by
    its expert's MatMulNBits. An expert that no token chose has no rows; its weights are not read.
TensorRT: two forms, each on its part of the tokens:
    all tokens if tokens * top_k <= experts, else the first: multiply and sum with gathered
        weights, decoded in the sum;
    the rest, often none: all experts, with weight 0 for those not chosen.
    Not an If: TensorRT decodes what depends on weights alone before an If, all experts in every
    step, and takes no INT4 into a branch. Where the generation profile proves that nothing is left
    for the second form, its engine has only the first.
Sums over experts are fp32; for fp16 see compile/onnx_moe.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from seekforge.compile.onnx_builder import OnnxBuilder, Value
from seekforge.compile.onnx_int4 import (
    Packed,
    dequantised,
    offsets,
    packed,
    signed_product,
    unsigned_product,
)
from seekforge.compile.onnx_moe import FP32, TINY, cast, swiglu


def translate_int4_moe_experts(
    b: OnnxBuilder, node: fx.Node, x: str, weights: str, indices: str, *_: Any
) -> Value:
    value: Any = node.args[0].meta["val"]  # type: ignore[union-attr]
    top_k = int(node.args[2].meta["val"].shape[-1])  # type: ignore[union-attr]
    gate_up, down = packed(b, node, 3), packed(b, node, 6)
    whole, hidden = x, down.shape[1]
    if value.dim() != 2:
        x = b.reshape(x, [-1, hidden])
        weights, indices = b.reshape(weights, [-1, top_k]), b.reshape(indices, [-1, top_k])
    args = (b, x, weights, indices, gate_up, down, value.dtype, top_k)
    y = sorted_experts(*args) if b.target == "onnxruntime" else split_tokens(*args)
    return y if value.dim() == 2 else b.reshape(y, [b.size(whole, 0, value.dim() - 1), hidden])


def sorted_experts(
    b: OnnxBuilder, x: str, weights: str, indices: str, gate_up: Packed, down: Packed,
    dtype: torch.dtype, top_k: int,
) -> str:  # fmt: skip
    """Each expert on its own rows; fp32 inside."""
    experts = gate_up.shape[0]
    numbers = b.constant([[e] for e in range(experts)])
    chosen = b.op("Equal", numbers, b.reshape(indices, [1, -1]))  # [experts, tokens * top_k]
    counts = b.op("ReduceSum", b.cast(chosen, torch.int64), b.constant([1]), keepdims=0)
    # Places in [tokens, top_k], those of the first expert first.
    order = b.op("Gather", b.op("NonZero", chosen), b.constant(1), axis=0)
    rows = b.op("Gather", cast(b, x, dtype, FP32), b.op("Div", order, b.constant(top_k)), axis=0)
    inner = swiglu(b, _each(b, rows, counts, gate_up), 1)
    y = _each(b, inner, counts, down)
    places = b.op("Range", b.constant(0), b.op("Squeeze", b.size(order, 0)), b.constant(1))
    back = b.op("ScatterElements", order, order, places, axis=0)
    y = b.reshape(b.op("Gather", y, back, axis=0), [-1, top_k, down.shape[1]])
    y = b.op("MatMul", b.op("Unsqueeze", weights, b.constant([1])), y)  # [tokens, 1, hidden]
    return cast(b, b.op("Squeeze", y, b.constant([1])), FP32, dtype)


def _each(b: OnnxBuilder, rows: str, counts: str, stack: Packed) -> str:
    """rows [n, in_features], counts[e] of them for expert e -> [n, out_features]."""
    experts = stack.shape[0]
    parts = b.op("Split", rows, counts, outputs=experts, axis=0) if experts > 1 else [rows]
    results = [unsigned_product(b, part, stack.expert(e), FP32) for e, part in enumerate(parts)]
    return str(b.op("Concat", *results, axis=0))


def split_tokens(
    b: OnnxBuilder, x: str, weights: str, indices: str, gate_up: Packed, down: Packed,
    dtype: torch.dtype, top_k: int,
) -> str:  # fmt: skip
    """The first `few` tokens in the one form, the rest in the other."""
    experts = gate_up.shape[0]
    tokens, zero = b.size(x, 0), b.constant([0])
    fits = b.op("LessOrEqual", b.op("Mul", tokens, b.constant([top_k])), b.constant([experts]))
    # At least one, for TensorRT does not fuse a sum that may be empty into the product before it
    # (V2-Lite: 2.1 GB of temporaries instead of 0.7).
    few = b.op("Max", b.op("Mul", tokens, b.cast(fits, torch.int64)), b.constant([1]))
    results = []
    for form, start, end in ((chosen_experts, zero, few), (all_experts, few, tokens)):
        rows, w, chosen = (b.op("Slice", v, start, end, zero) for v in (x, weights, indices))
        results.append(form(b, rows, w, chosen, gate_up, down, dtype, top_k))
    return str(b.op("Concat", *results, axis=0))


def chosen_experts(
    b: OnnxBuilder, x: str, weights: str, indices: str, gate_up: Packed, down: Packed,
    dtype: torch.dtype, top_k: int,
) -> str:  # fmt: skip
    """Sums of products with gathered weights, fp32: TensorRT reads the chosen experts' INT4."""
    rows = b.op("Unsqueeze", cast(b, x, dtype, FP32), b.constant([1, 2]))  # [tokens, 1, 1, hidden]
    wide = _gathered(b, gate_up, indices, top_k, dtype)
    h = b.op("ReduceSum", b.op("Mul", wide, rows), b.constant([3]), keepdims=0)
    inner = b.op("Mul", swiglu(b, h, 2), b.op("Unsqueeze", weights, b.constant([2])))
    inner = b.op("Unsqueeze", inner, b.constant([2]))  # [tokens, top_k, 1, intermediate]
    wide = _gathered(b, down, indices, top_k, dtype)
    y = b.op("ReduceSum", b.op("Mul", wide, inner), b.constant([1, 3]), keepdims=0)
    return cast(b, y, FP32, dtype)


def _gathered(b: OnnxBuilder, w: Packed, indices: str, top_k: int, dtype: torch.dtype) -> str:
    """[tokens, top_k, out_features, in_features], fp32"""
    stack = b.reshape(dequantised(b, w), w.shape)
    found = cast(b, b.op("Gather", stack, indices, axis=0), dtype, FP32)
    if w.zeros is None:
        return found
    size = (w.shape[1], w.groups)
    lacking = b.op("Gather", b.reshape(offsets(b, w), [w.shape[0], *size]), indices, axis=0)
    lacking = b.op("Unsqueeze", cast(b, lacking, dtype, FP32), b.constant([4]))
    found = b.op("Add", b.reshape(found, [-1, top_k, *size, w.group_size]), lacking)
    return b.reshape(found, [-1, top_k, *w.shape[1:]])


def all_experts(
    b: OnnxBuilder, x: str, weights: str, indices: str, gate_up: Packed, down: Packed,
    dtype: torch.dtype, top_k: int,
) -> str:  # fmt: skip
    """All experts on all tokens. All gates and ups are one product, which reads INT4; `down` is
    decoded first, by a kernel of its own."""
    experts = down.shape[0]
    zeros = b.op("Expand", b.constant([[0.0]], FP32), b.shape([b.size(x, 0), experts]))
    spread = b.op("ScatterElements", zeros, indices, weights, axis=1)  # [tokens, experts]
    h = b.reshape(signed_product(b, x, gate_up, dtype), [-1, experts, gate_up.shape[1]])
    inner = b.op("Mul", swiglu(b, h, 2, dtype), b.op("Unsqueeze", spread, b.constant([2])))
    scale = None
    if dtype == torch.float16:
        scale = b.op("ReduceMax", b.op("Abs", inner), b.constant([1, 2]), keepdims=1)
        scale = b.op("Max", scale, b.constant(TINY, FP32))  # [tokens, 1, 1]
        inner = b.op("Div", inner, scale)
    inner = b.op("Transpose", cast(b, inner, FP32, dtype), perm=[1, 0, 2])
    y = cast(b, _batched(b, inner, down), dtype, FP32)
    y = b.op("ReduceSum", y, b.constant([0, 1]), keepdims=0)  # [tokens, hidden]
    if scale is not None:
        y = b.op("Mul", y, b.reshape(scale, [-1, 1]))
    return cast(b, y, FP32, dtype)


def _batched(b: OnnxBuilder, x: str, w: Packed) -> str:
    """x [experts, tokens, in_features] -> [experts, 1, tokens, out_features]; the 1 keeps TensorRT
    from a second, transposed copy of the weights (1.35 times the engine)."""
    experts, out_features, in_features = w.shape
    stack = dequantised(b, w)
    if w.zeros is not None:  # decoded anyway: no term of its own
        groups = b.reshape(stack, [w.rows, w.groups, w.group_size])
        stack = b.op("Add", groups, b.op("Unsqueeze", offsets(b, w), b.constant([2])))
    stack = b.reshape(stack, [experts, 1, out_features, in_features])
    lifted = b.op("Unsqueeze", x, b.constant([1]))
    return str(b.op("MatMul", lifted, b.op("Transpose", stack, perm=[0, 1, 3, 2])))
