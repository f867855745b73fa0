"""One row times a matrix: y = x W^T for a single token, as a loop that Inductor writes itself
(CPU).

    x  [..., in_features], one row in all
    W  [out_features, in_features]
    y  [..., out_features]

MKL's one-row product reads the weights at about a quarter of the memory bandwidth on the processors
measured (docs/cpu.md); the loop that Inductor generates from a multiply and a sum reads them two to
three times as fast, and decoding one sequence is nothing but reading weights. Used only in graphs
whose token count is 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seekforge.kernels.ops import register


def gemv_reference(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, weight)


def _fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


gemv = register("gemv(Tensor x, Tensor weight) -> Tensor", reference=gemv_reference, fake=_fake)
