"""Launches int4_gemv_hopper.cu: an INT4 linear layer for up to eight tokens on Hopper.

x [rows, in_features], weight as in kernels/int4 -> y [rows, out_features]
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from seekforge.kernels.hopper import arguments, check, library, stream
from seekforge.kernels.int4_layout import UNIT

NAME = "int4_gemv_hopper"
ROWS = 16  # out_features of a stage


@dataclass(frozen=True, slots=True)
class Streamed:
    """blocks: thread blocks, at most; warps of one, which share the input features; stages of 16
    out_features in shared memory."""

    blocks: int
    warps: int
    stages: int


def streamed(
    x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None,
    y: Tensor, config: Streamed,
) -> bool:  # fmt: skip
    """Fills y [..., out_features], or returns False where this kernel does not serve. x is
    `readable`, the others contiguous (see int4_layout).

    Starts before the launch before it has ended; weights and bias must be older than that.
    """
    rows, in_features = x.shape
    out_features, groups = scales.shape
    group_size = in_features // groups
    if (
        rows > 8
        or in_features % UNIT != 0
        or group_size % UNIT != 0
        or out_features % ROWS != 0
        or x.data_ptr() % 16 != 0
        or x.stride(0) % 8 != 0
        or any(w is not None and w.data_ptr() % 16 != 0 for w in (qweight, scales, zeros))
    ):
        return False
    built = library(NAME, x.device)
    if built is None:
        return False

    def address(given: Tensor | None) -> int:
        return 0 if given is None else given.data_ptr()

    given = arguments(
        x.data_ptr(), qweight.data_ptr(), scales.data_ptr(), address(zeros), address(bias),
        y.data_ptr(), rows, x.stride(0), out_features, in_features // 2, groups,
        group_size // UNIT, config.stages,
    )  # fmt: skip
    status = built.int4_few(
        given, min(config.blocks, out_features // ROWS), config.warps,
        int(x.dtype == torch.float16), ctypes.c_void_p(stream()),
    )  # fmt: skip
    check(status, NAME)
    return True
