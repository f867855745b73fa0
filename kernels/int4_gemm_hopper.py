"""Launches int4_gemm_hopper.cu: an INT4 linear layer for some dozens of tokens and more on Hopper.

x [rows, in_features], weight as in kernels/int4 -> y [rows, out_features]
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from seekforge.kernels.hopper import arguments, check, library, stream
from seekforge.kernels.int4_layout import UNIT

NAME = "int4_gemm_hopper"


@dataclass(frozen=True, slots=True)
class Many:
    """block_n: out_features of a thread block, 64 or 128; block_m: its tokens, 16 to 256; stages:
    units in shared memory; splits: thread blocks (1 to 8) that share the input features."""

    block_n: int
    block_m: int
    stages: int
    splits: int = 1


def many_tokens(
    x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None,
    y: Tensor, config: Many,
) -> bool:  # fmt: skip
    """Fills y [..., out_features], or returns False where this kernel does not serve. x: rows of
    consecutive values; the others contiguous.

    Starts before the launch before it has ended; weights and bias must be older than that.
    """
    built = library(NAME, x.device)
    if built is None or qweight.data_ptr() % 16 != 0:
        return False
    rows, in_features = x.shape
    out_features, groups = scales.shape
    group_size = in_features // groups
    units = -(-in_features // UNIT)
    each = -(-units // (4 * config.splits)) * 4
    splits = -(-units // each)
    if x.data_ptr() % 16 != 0 or x.stride(0) % 8 != 0:
        x = x.clone(memory_format=torch.contiguous_format)

    def address(given: Tensor | None) -> int:
        return 0 if given is None else given.data_ptr()

    given = arguments(
        address(scales), address(zeros), address(bias), address(y), rows,
        x.stride(0), out_features, in_features // 2, groups, units, each,
        max(1, UNIT // group_size), max(1, group_size // UNIT), splits, config.stages,
    )  # fmt: skip
    status = built.int4_many(
        given, ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(qweight.data_ptr()),
        config.block_m, config.block_n // 64, int(x.dtype == torch.float16),
        ctypes.c_void_p(stream()),
    )  # fmt: skip
    check(status, NAME)
    return True
