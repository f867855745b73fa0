"""How near two results must be: one normalised error, one tolerance for each dtype.

    error = 1 - 2 <x, y> / (|x|^2 + |y|^2)  =  |x - y|^2 / (|x|^2 + |y|^2)

computed in float64 over all elements: 0 for equal tensors, half the squared relative error for near
ones. NaNs and infinities must stand in the same places and are left out of the sums.
Moving data must be exact: compare with `torch.equal`. Source: `calc_diff` of DeepSeek's DeepGEMM.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# A relative error of 2e-6, 1.4e-3 and 9e-3: some 20 units in the last place in fp32 (other sums),
# 1.5 in fp16 and 1 in bf16 (one more or one fewer rounding).
TOLERANCE: dict[torch.dtype, float] = {
    torch.float32: 2e-12,
    torch.float16: 1e-6,
    torch.bfloat16: 4e-5,
}


def normalised_error(x: Tensor, y: Tensor) -> float:
    """The error above; infinite where shapes, or the places of NaNs and infinities, differ."""
    if x.shape != y.shape:
        return math.inf
    x, y = x.detach().cpu().double(), y.detach().cpu().double()
    finite = x.isfinite()
    if not torch.equal(finite, y.isfinite()):
        return math.inf
    if not torch.equal(x[~finite].nan_to_num(), y[~finite].nan_to_num()):
        return math.inf
    x, y = x[finite], y[finite]
    scale = float(x.square().sum() + y.square().sum())
    return float((x - y).square().sum()) / scale if scale else 0.0


def assert_close(x: Tensor, y: Tensor, what: str) -> None:
    """Raises AssertionError, naming `what`, unless x is as near to y as the dtype of y demands."""
    assert x.shape == y.shape, f"{what}: shape {tuple(x.shape)}, expected {tuple(y.shape)}"
    assert x.dtype == y.dtype, f"{what}: {x.dtype}, expected {y.dtype}"
    error, limit = normalised_error(x, y), TOLERANCE[y.dtype]
    assert error <= limit, (
        f"{what}: normalised error {error:.2e}, tolerance {limit:.0e} ({y.dtype}), "
        f"largest difference {float((x.double() - y.double()).abs().max()):.2e}"
    )
