"""SwiGLU over a fused projection: y = silu(gate) * up, with [gate; up] side by side.

    gate_up  [..., 2 * intermediate]  first half gate, second half up
    y        [..., intermediate]

silu is rounded to the dtype of gate_up before the product, as transformers' MLP does.
Source: Shazeer, "GLU Variants Improve Transformer", 2020.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seekforge.kernels.ops import register
from seekforge.kernels.triton_support import jit, tl


def swiglu_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@jit
def swiglu_kernel(gate_up, y, intermediate, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < intermediate
    gate = tl.load(gate_up + row * 2 * intermediate + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * intermediate + intermediate + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    product = activated.to(tl.float32) * up.to(tl.float32)
    tl.store(y + row * intermediate + column, product.to(gate.dtype), mask=inside)


def swiglu_triton(gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    intermediate = gate_up.shape[-1] // 2
    y = gate_up.new_empty(*gate_up.shape[:-1], intermediate)
    rows = gate_up.numel() // (2 * intermediate)
    block = 1024
    swiglu_kernel[(rows, -(-intermediate // block))](gate_up, y, intermediate, BLOCK=block)
    return y


def _fake(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


swiglu = register(
    "swiglu(Tensor gate_up) -> Tensor", reference=swiglu_reference, fake=_fake, cuda=swiglu_triton
)
