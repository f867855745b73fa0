"""The INT4 format: two weights a byte, one scale for each group of a row. Documented here only.

    w[..., n, k] = (q[..., n, k] - z) * s      q in 0..15, group j = k // group_size

    qweight  [..., out_features, in_features / 2]       uint8: k = 2i in the low nibble of byte i,
                                                        k = 2i + 1 in the high nibble
    scales   [..., out_features, in_features / group_size]  the model's dtype, positive
    zeros    like scales, uint8 0..15; None: symmetric, z = 8

Leading dimensions (the experts) are free. The nibble order is that of ONNX's INT4 tensors and of
ONNX Runtime's MatMulNBits, so one weights file serves every backend; a symmetric byte XOR 0x88 is
ONNX's pair of signed INT4. Stored zeros are whole bytes: 1/64 of the weights at group size 128.

**Group size.** All groups of a tensor are of one size that divides in_features: nothing is padded
or cut. Where the wanted size does not divide, `group_size_of` says which is used instead; the
group size of every tensor is in the manifest.

**Scales.** q is computed with the scale as it is stored, rounded to its dtype. A group of zeros, or
of values so small that their scale would vanish, has scale 1 and decodes to exact zeros.
A symmetric scale is the smallest that keeps every error within half a step: the largest weight may
lie half a step outside of -8..7 (7.5 steps up, 8.5 down).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seekforge.kernels.errors import InputError
from seekforge.kernels.int4_groups import group_size_of as group_size_of

SYMMETRIC_ZERO = 8


@dataclass(frozen=True, slots=True)
class Int4:
    """A quantised weight; shapes and meaning above. zeros is None for symmetric quantisation."""

    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None = None

    def __post_init__(self) -> None:
        packed, groups = self.qweight.shape[-1], self.scales.shape[-1]
        assert self.qweight.dtype is torch.uint8, f"qweight is {self.qweight.dtype}"
        assert self.qweight.shape[:-1] == self.scales.shape[:-1], "rows of qweight and of scales"
        assert groups and not 2 * packed % groups, f"{groups=} of {2 * packed} weights"
        assert self.zeros is None or self.zeros.shape == self.scales.shape, "zeros unlike scales"

    @property
    def group_size(self) -> int:
        """Weights that share a scale."""
        return 2 * self.qweight.shape[-1] // self.scales.shape[-1]


def quantise(
    weight: Tensor,
    group_size: int,
    symmetric: bool = True,
    clip: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Int4:
    """Rounds a weight [..., out_features, in_features] to the nearest representable one.

    clip: [..., out_features, groups], the largest magnitude a weight of the group keeps. dtype:
    of the scales; None: that of `weight`. Raises InputError where group_size does not divide
    in_features or a weight is not finite.
    """
    _check(weight, group_size)
    values = clipped_groups(weight, group_size, clip)
    scales, zeros = scales_of(values, symmetric, dtype or weight.dtype)
    q = _round(values, scales, zeros)
    return Int4(pack(q.to(torch.uint8).flatten(-2)), scales, zeros)


def dequantise(weight: Int4, dtype: torch.dtype | None = None) -> Tensor:
    """The weight that `weight` stands for, [..., out_features, in_features], rounded once to
    `dtype` (the scales' where None)."""
    q = grouped(unpack(weight.qweight), weight.scales.shape[-1]).float()
    q -= SYMMETRIC_ZERO if weight.zeros is None else weight.zeros[..., None].float()
    q *= weight.scales[..., None].float()
    return q.flatten(-2).to(dtype or weight.scales.dtype)


def fake_quantise(
    weight: Tensor,
    group_size: int,
    symmetric: bool = True,
    clip: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """dequantise(quantise(weight)) in fp32, without packing; scales are rounded to `dtype`."""
    values = clipped_groups(weight, group_size, clip)
    scales, zeros = scales_of(values, symmetric, dtype)
    q = _round(values, scales, zeros)
    q -= SYMMETRIC_ZERO if zeros is None else zeros[..., None].float()
    q *= scales[..., None].float()
    return q.flatten(-2)


def pack(q: Tensor) -> Tensor:
    """uint8 [..., in_features] of 0..15 -> [..., in_features / 2], low nibble first."""
    return q[..., 0::2] | (q[..., 1::2] << 4)


def unpack(qweight: Tensor) -> Tensor:
    """uint8 [..., in_features / 2] -> [..., in_features] of 0..15."""
    return torch.stack((qweight & 15, qweight >> 4), -1).flatten(-2)


def grouped(x: Tensor, groups: int) -> Tensor:
    """[..., groups * size] -> [..., groups, size]."""
    return x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)


def clipped_groups(weight: Tensor, group_size: int, clip: Tensor | None = None) -> Tensor:
    """fp32 view or copy [..., out_features, groups, group_size], clipped where told."""
    values = grouped(weight.float(), weight.shape[-1] // group_size)
    if clip is None:
        return values
    bound = clip[..., None].float()
    return torch.minimum(torch.maximum(values, -bound), bound)


def scales_of(values: Tensor, symmetric: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Scales in `dtype` and zeros of weights [..., groups, group_size]."""
    low, high = torch.aminmax(values, dim=-1)
    if symmetric:
        return _stored(torch.maximum(high / 7.5, low / -8.5), dtype), None
    low, high = low.clamp(max=0), high.clamp(min=0)
    scales = _stored((high - low) / 15, dtype)
    return scales, (-low / scales.float()).round_().clamp_(0, 15).to(torch.uint8)


def _stored(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """As stored: below the smallest normal number of the dtype a scale has too few digits left."""
    stored = scales.to(dtype)
    return torch.where(stored < torch.finfo(dtype).tiny, 1.0, stored)


def _round(values: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """q as fp32 numbers 0..15, in new memory."""
    q = values / scales[..., None].float()
    q.round_()
    q += SYMMETRIC_ZERO if zeros is None else zeros[..., None].float()
    return q.clamp_(0, 15)


def _check(weight: Tensor, group_size: int) -> None:
    if group_size < 2 or weight.shape[-1] % group_size or weight.shape[-1] % 2:
        raise InputError(
            f"INT4: group size {group_size} does not divide the {weight.shape[-1]} input features "
            f"of a weight {tuple(weight.shape)}; ask `group_size_of` which one does."
        )
    if not bool(weight.isfinite().all()):
        bad = int((~weight.isfinite()).sum())
        raise InputError(
            f"INT4: {bad} of the {weight.numel()} values of a weight {tuple(weight.shape)} are NaN "
            "or infinite; a group with one of them has no scale. Check the checkpoint."
        )
