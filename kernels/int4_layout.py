"""How the GPU's INT4 products read a weight: as it is stored (kernels/int4), 16 bytes a lane.

A unit is 128 input features: 64 bytes of a row, 32 words of 16 bits, word j the features 4j..4j+3.
A lane t of the four that share a row loads the words 8t..8t+7. Nibble p of every word is one
operand of the matrix unit, and the features 4j + p of x are the other: a sum over k may take k in
any order, so that no weight moves between lanes.

    bf16  0x4300 | q  is 128 + q       fp16  0x6400 | q  is 1024 + q       both exact

so two weights become integers by one logical instruction, and q - zero by one subtraction. The
scale is applied to the fp32 sum of a group's products, which is more exact than a rounded weight,
or, where a unit holds several groups, to the weight (which is then the reference's). Results differ
from the reference by rounding only.

The kernel for many tokens (int4_gemm_hopper.cu) has x in shared memory as it is, and takes from
each 32-bit word the byte that a lane needs there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seekforge.kernels.triton_support import constexpr_function, gl, gluon_jit
from seekforge.kernels.tuning import overlaps_launches

UNIT = 128


@constexpr_function
def _decode_asm(bf16: bool, scaled: bool) -> str:
    kind, magic = ("bf16x2", "0x43004300") if bf16 else ("f16x2", "0x64006400")
    lines = [f".reg .b32 s, c; mov.b32 c, {magic};"]
    for p in range(4):
        word = "s" if p else "$4"
        if p:
            lines.append(f"shr.u32 s, $4, {4 * p};")
        lines.append(f"lop3.b32 ${p}, {word}, 0x000f000f, c, 0xea;")
        lines.append(f"sub.rn.{kind} ${p}, ${p}, $5;")
        if scaled:
            lines.append(f"mul.rn.{kind} ${p}, ${p}, $6;")
    return "{ " + " ".join(lines) + " }"


@gluon_jit
def decode(words, zero, scale, BF16: gl.constexpr, SCALED: gl.constexpr):  # type: ignore[no-untyped-def]
    """Words of four weights -> the four, apart: q - zero, or (q - zero) * scale where SCALED.

    zero: 128 (bf16) or 1024 (fp16) larger than the zero; scale: unused where not SCALED.
    """
    asm: gl.constexpr = _decode_asm(BF16, SCALED)
    if SCALED:
        w0, w1, w2, w3 = gl.inline_asm_elementwise(
            asm, "=&r,=&r,=&r,=&r,r,r,r", [words, zero, scale],
            (gl.int16, gl.int16, gl.int16, gl.int16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        w0, w1, w2, w3 = gl.inline_asm_elementwise(
            asm, "=&r,=&r,=&r,=&r,r,r", [words, zero],
            (gl.int16, gl.int16, gl.int16, gl.int16), is_pure=True, pack=2,
        )  # fmt: skip
    dtype: gl.constexpr = gl.bfloat16 if BF16 else gl.float16
    return (
        w0.to(dtype, bitcast=True), w1.to(dtype, bitcast=True),
        w2.to(dtype, bitcast=True), w3.to(dtype, bitcast=True),
    )  # fmt: skip


@gluon_jit
def split(words, BF16: gl.constexpr):  # type: ignore[no-untyped-def]
    """64-bit words of four values -> the four, apart."""
    x0, x1, x2, x3 = gl.inline_asm_elementwise(
        """{ .reg .b32 a, b, c, d; mov.b64 {a, b}, $4; mov.b64 {c, d}, $5;
        prmt.b32 $0, a, c, 0x5410; prmt.b32 $1, a, c, 0x7632;
        prmt.b32 $2, b, d, 0x5410; prmt.b32 $3, b, d, 0x7632; }""",
        "=&r,=&r,=&r,=&r,l,l", [words], (gl.int16, gl.int16, gl.int16, gl.int16),
        is_pure=True, pack=2,
    )  # fmt: skip
    dtype: gl.constexpr = gl.bfloat16 if BF16 else gl.float16
    return (
        x0.to(dtype, bitcast=True), x1.to(dtype, bitcast=True),
        x2.to(dtype, bitcast=True), x3.to(dtype, bitcast=True),
    )  # fmt: skip


def readable(x: Tensor) -> Tensor:
    """x [rows, features] as the kernels read it: rows of consecutive values, in whole 64-bit words.

    A copy where it is not.
    """
    words = 8 // x.element_size()
    aligned = x.stride(1) == 1 and x.stride(0) % words == 0 and x.storage_offset() % words == 0
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def supports(x: Tensor, group_size: int) -> bool:
    """Whether these kernels serve: Hopper or later, 16 bits, whole 16-byte words a lane."""
    return (
        gl is not None
        and overlaps_launches(x.device)
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.shape[-1] % 32 == 0
        and (group_size in (32, 64) or group_size % UNIT == 0)
    )
