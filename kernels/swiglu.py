"""SwiGLU over a fused projection: y = silu(gate) * up, with [gate; up] side by side.

    gate_up  [..., 2 * intermediate]  first half gate, second half up
    y        [..., intermediate]

silu is rounded to the dtype of gate_up before the product, as transformers' MLP does.
Source: Shazeer, "GLU Variants Improve Transformer", 2020.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seekforge.kernels.ops import register
from seekforge.kernels.triton_support import jit, next_power_of_2, tl
from seekforge.kernels.tuning import first, overlaps_launches


def swiglu_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@jit
def swiglu_kernel(  # type: ignore[no-untyped-def]
    gate_up, y, row_step, INTERMEDIATE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    blocks: tl.constexpr = (INTERMEDIATE + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < INTERMEDIATE
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gate = tl.load(gate_up + row * row_step + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * row_step + INTERMEDIATE + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    product = activated.to(tl.float32) * up.to(tl.float32)
    tl.store(y + row * INTERMEDIATE + column, product.to(gate.dtype), mask=inside)


@dataclass(frozen=True, slots=True)
class Tile:
    """block: columns of one row that a program computes; warps: Triton's num_warps."""

    block: int
    warps: int


def swiglu_tile(rows: int, intermediate: int) -> Tile:
    """From h200.json, by the number of values; without a row 1024 columns by 4 warps."""
    row = first("swiglu", values=rows * intermediate) or {"block": 1024, "warps": 4}
    return Tile(min(row["block"], max(32, next_power_of_2(intermediate))), row["warps"])


def swiglu_triton(gate_up: Tensor, tile: Tile | None = None) -> Tensor:
    """Starts before the launch before it has ended, and waits for it before it reads."""
    intermediate = gate_up.shape[-1] // 2
    y = gate_up.new_empty(*gate_up.shape[:-1], intermediate)
    if y.numel() == 0:
        return y
    if gate_up.dim() != 2 or gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    rows = gate_up.numel() // (2 * intermediate)
    row_step = gate_up.stride(0) if gate_up.dim() == 2 else 2 * intermediate
    tile = tile or swiglu_tile(rows, intermediate)
    overlap = overlaps_launches(gate_up.device)
    swiglu_kernel[(rows * -(-intermediate // tile.block),)](
        gate_up, y, row_step, INTERMEDIATE=intermediate, BLOCK=tile.block, OVERLAP=overlap,
        num_warps=tile.warps, **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip
    return y


def _fake(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


swiglu = register(
    "swiglu(Tensor gate_up) -> Tensor", reference=swiglu_reference, fake=_fake, cuda=swiglu_triton
)
