"""INT4 weights in ONNX (format: kernels/int4), in a form for each backend; docs/int4-onnx.md.

ONNX Runtime: its own MatMulNBits, which reads the same bytes. Products in fp32 (accuracy level 1):
    level 4 rounds the activations to int8. Blocks are powers of two from 16 on: a group that is a
    multiple of one is split into such blocks with equal scales, another one (36, 72) is decoded
    by plain operators, which ONNX Runtime does once, when it loads the model.
TensorRT: a blocked DequantizeLinear of ONNX's signed INT4, which TensorRT fuses into the product:
    the weights stay INT4 in the engine. It takes no zero points, so they are a term of their own:
        x ((q - z) s)^T = x ((q - 8) s)^T + group_size * (means of x) ((8 - z) s)^T
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from onnx import TensorProto
from torch import fx

from seekforge.compile.onnx_builder import DTYPES, OnnxBuilder, Value
from seekforge.kernels.int4 import SYMMETRIC_ZERO

MICROSOFT = "com.microsoft"
FP32_PRODUCTS = 1  # MatMulNBits' accuracy_level; 0 leaves the choice to ONNX Runtime
MIN_BLOCK, MAX_BLOCK = 16, 256


@dataclass(frozen=True, slots=True)
class Packed:
    """An INT4 weight: names of its parameters; shape [..., out_features, in_features] decoded.

    dtype: of the scales as stored. item: this expert of a stack; its shape is then without experts.
    """

    qweight: str
    scales: str
    zeros: str | None
    shape: tuple[int, ...]
    group_size: int
    dtype: torch.dtype
    item: int | None = None
    of: int = 1

    @property
    def groups(self) -> int:
        return self.shape[-1] // self.group_size

    @property
    def rows(self) -> int:
        return prod(self.shape[:-1])

    def expert(self, item: int) -> Packed:
        """One of the experts of a stack."""
        return Packed(
            self.qweight, self.scales, self.zeros, self.shape[1:], self.group_size, self.dtype,
            item, self.shape[0],
        )  # fmt: skip

    def part(self, b: OnnxBuilder, name: str, data_type: int, dims: tuple[int, ...]) -> str:
        """The bytes of one parameter as an initializer of the given type and shape."""
        item = self.item or 0
        label = f"{name}[{item}]" if self.item is not None else f"{name}:{data_type}{list(dims)}"
        return b.stored(label, name, data_type, dims, item, self.of)

    def part_scales(self, b: OnnxBuilder) -> str:
        """[rows, groups], in the dtype as stored"""
        return self.part(b, self.scales, DTYPES[self.dtype], (self.rows, self.groups))

    def part_zeros(self, b: OnnxBuilder) -> str:
        """[rows, groups], uint8"""
        assert self.zeros is not None
        return self.part(b, self.zeros, TensorProto.UINT8, (self.rows, self.groups))


def packed(b: OnnxBuilder, node: fx.Node, first: int) -> Packed:
    """The weight whose qweight is argument number `first` of the node, then scales and zeros."""
    arguments: Any = node.args[first : first + 3]
    qweight, scales = (argument.meta["val"] for argument in arguments[:2])
    *lead, half = map(int, qweight.shape)
    names = [None if argument is None else str(argument.target) for argument in arguments]
    stored = b.program.weights[str(names[0])].int4
    signed = b.target != "onnxruntime"
    assert stored is None or stored.signed == signed, f"{names[0]}: {stored} for {b.target}"
    return Packed(
        str(names[0]), str(names[1]), names[2], (*lead, 2 * half),
        2 * half // int(scales.shape[-1]), scales.dtype,
    )  # fmt: skip


def translate_int4_linear(
    b: OnnxBuilder, node: fx.Node, x: str, qweight: str, scales: str, zeros: str | None,
    bias: str | None, group_size: int,
) -> Value:  # fmt: skip
    value: Any = node.args[0].meta["val"]  # type: ignore[union-attr]
    weight = packed(b, node, 1)
    product = unsigned_product if b.target == "onnxruntime" else signed_product
    y = product(b, x, weight, value.dtype, value.dim())
    return y if bias is None else str(b.op("Add", y, bias))


def unsigned_product(b: OnnxBuilder, x: str, w: Packed, dtype: torch.dtype, dim: int = 2) -> str:
    """x [..., in_features] in `dtype` times the weight [out_features, in_features]."""
    out_features, in_features = w.shape
    block = min(w.group_size & -w.group_size, MAX_BLOCK)
    if block < MIN_BLOCK:
        return str(b.op("MatMul", x, b.op("Transpose", decoded(b, w, dtype), perm=[1, 0])))
    blocks, repeats = in_features // block, w.group_size // block
    bytes_ = w.part(b, w.qweight, TensorProto.UINT8, (out_features, blocks, block // 2))
    scales = w.part_scales(b)
    if w.dtype != dtype:
        scales = b.cast(scales, dtype)
    inputs = [x, bytes_, _repeated(b, scales, w, repeats)]
    if w.zeros is not None:
        inputs.append(_paired(b, _repeated(b, w.part_zeros(b), w, repeats), blocks))
    return str(
        b.op(
            "MatMulNBits", *inputs, domain=MICROSOFT, K=in_features, N=out_features, bits=4,
            block_size=block, accuracy_level=FP32_PRODUCTS,
        )
    )  # fmt: skip


def decoded(b: OnnxBuilder, w: Packed, dtype: torch.dtype) -> str:
    """The weight [out_features, in_features] by plain operators, rounded once to `dtype`."""
    out_features, in_features = w.shape
    half = (out_features, in_features // 2, 1)
    bytes_ = w.part(b, w.qweight, TensorProto.UINT8, half)
    low = b.op("BitwiseAnd", bytes_, b.constant(15, torch.uint8))
    high = b.op("BitShift", bytes_, b.constant(4, torch.uint8), direction="RIGHT")
    q = b.reshape(b.op("Concat", low, high, axis=2), [out_features, w.groups, w.group_size])
    zero = b.constant(float(SYMMETRIC_ZERO), torch.float32)
    if w.zeros is not None:
        zero = b.reshape(b.cast(w.part_zeros(b), torch.float32), [out_features, w.groups, 1])
    scales = b.cast(w.part_scales(b), torch.float32)
    steps = b.op("Sub", b.cast(q, torch.float32), zero)
    weight = b.op("Mul", steps, b.reshape(scales, [out_features, w.groups, 1]))
    return b.cast(b.reshape(weight, [out_features, in_features]), dtype)


def _repeated(b: OnnxBuilder, x: str, w: Packed, repeats: int) -> str:
    """[rows, groups] -> [rows, groups * repeats], each value `repeats` times."""
    if repeats == 1:
        return x
    wide = b.op("Expand", b.reshape(x, [w.rows, w.groups, 1]), b.constant([1, 1, repeats]))
    return b.reshape(wide, [w.rows, w.groups * repeats])


def _paired(b: OnnxBuilder, zeros: str, blocks: int) -> str:
    """uint8 0..15 [rows, blocks] -> two a byte, the first in the low nibble; the last alone where
    there is an odd number."""
    if blocks % 2:
        zeros = b.op("Pad", zeros, b.constant([0, 0, 0, 1]))
    low, high = (
        b.op("Slice", zeros, b.constant([i]), b.constant([blocks + 1]), b.constant([1]),
             b.constant([2]))
        for i in (0, 1)
    )  # fmt: skip
    shifted = b.op("BitShift", high, b.constant(4, torch.uint8), direction="LEFT")
    return str(b.op("BitwiseOr", low, shifted))


def signed_product(b: OnnxBuilder, x: str, w: Packed, dtype: torch.dtype, dim: int = 2) -> str:
    """x [..., in_features], of `dim` dimensions, times the weight [rows, in_features]."""
    y = str(b.op("MatMul", x, b.op("Transpose", dequantised(b, w), perm=[1, 0])))
    if w.zeros is None:
        return y
    means = group_means(b, x, w, dtype, dim)
    term = b.op("MatMul", means, b.op("Transpose", offsets(b, w), perm=[1, 0]))
    return str(b.op("Add", y, b.op("Mul", term, b.constant(float(w.group_size), dtype))))


def dequantised(b: OnnxBuilder, w: Packed) -> str:
    """(q - 8) s, [rows, in_features]: two dimensions also for experts, TensorRT then keeps one copy
    of a weight that is read in two ways."""
    q = w.part(b, w.qweight, TensorProto.INT4, (w.rows, w.shape[-1]))
    return str(b.op("DequantizeLinear", q, w.part_scales(b), axis=1, block_size=w.group_size))


def offsets(b: OnnxBuilder, w: Packed) -> str:
    """(8 - z) s, [rows, groups]: what every weight of a group lacks in `dequantised`."""
    zeros = b.cast(w.part_zeros(b), w.dtype)
    lacking = b.op("Sub", b.constant(float(SYMMETRIC_ZERO), w.dtype), zeros)
    return str(b.op("Mul", lacking, w.part_scales(b)))


def group_means(b: OnnxBuilder, x: str, w: Packed, dtype: torch.dtype, dim: int) -> str:
    """Means over each group of input features, [..., groups]; fp32 inside: sums of fp16
    activations pass 65504."""
    grouped = b.reshape(x, [*[0] * (dim - 1), w.groups, w.group_size])
    wide = grouped if dtype == torch.float32 else b.cast(grouped, torch.float32)
    means = b.op("ReduceMean", wide, b.constant([-1]), keepdims=0)
    return str(means if dtype == torch.float32 else b.cast(means, dtype))
