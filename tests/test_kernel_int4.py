"""The INT4 format: packing, rounding within half a step, odd sizes, zeros and tiny values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from seekforge.kernels.errors import InputError
from seekforge.kernels.int4 import (
    Int4,
    dequantise,
    fake_quantise,
    group_size_of,
    pack,
    quantise,
    unpack,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (0.5 * torch.randn(shape, generator=torch.Generator().manual_seed(3))).to(dtype)


def test_pack_is_low_nibble_first() -> None:
    q = torch.tensor([[1, 2, 15, 8]], dtype=torch.uint8)
    assert pack(q).tolist() == [[0x21, 0x8F]]
    every = torch.arange(256, dtype=torch.uint8).view(2, 128)
    assert torch.equal(pack(unpack(every)), every)


@pytest.mark.parametrize(
    ("in_features", "wanted", "size"),
    [
        (256, 128, 128), (320, 128, 64), (10944, 128, 64), (72, 128, 72), (72, 64, 36),
        (16, 128, 16), (192, 128, 64), (40, 32, 20), (56, 32, 28), (193, 128, None),
        (386, 128, None), (2, 64, 2),
    ],
)  # fmt: skip
def test_group_size_of_rows_that_do_not_divide(
    in_features: int, wanted: int, size: int | None
) -> None:
    """B29: always a divisor, never a cut."""
    assert group_size_of(in_features, wanted) == size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("in_features", "wanted"), [(256, 128), (320, 128), (72, 64), (16, 128)])
def test_error_is_within_half_a_step(
    dtype: torch.dtype, symmetric: bool, in_features: int, wanted: int
) -> None:
    size = group_size_of(in_features, wanted)
    assert size is not None
    weight = draw(3, 8, in_features, dtype=dtype)
    packed = quantise(weight, size, symmetric)
    assert packed.qweight.shape == (3, 8, in_features // 2) and packed.group_size == size
    assert packed.scales.dtype is dtype and (packed.zeros is None) == symmetric
    error = (dequantise(packed, torch.float32) - weight.float()).abs().unflatten(-1, (-1, size))
    slack = 1 + 16 * torch.finfo(dtype).eps  # the stored scale may be a little small
    step = packed.scales.float()[..., None]
    assert (error <= (0.5 if symmetric else 0.51) * step * slack + 8 * torch.finfo(dtype).eps).all()
    assert dequantise(packed).dtype is dtype
    decoded = fake_quantise(weight, size, symmetric, dtype=dtype)
    assert torch.equal(dequantise(packed, torch.float32), decoded)


@pytest.mark.parametrize("symmetric", [True, False])
def test_representable_weights_return_exactly(symmetric: bool) -> None:
    q = torch.arange(16).repeat(4, 2).view(4, 32)
    weight = (q - (8 if symmetric else 3)) * 0.25
    if symmetric:  # 8.5 steps down fit, so give the scale away by a clip
        packed = Int4(pack(q.to(torch.uint8)), torch.full((4, 1), 0.25))
    else:
        packed = quantise(weight, 32, symmetric)
    assert torch.equal(dequantise(packed), weight)


def test_scales_reach_both_ends() -> None:
    """+7.5 and -8.5 steps are the ends; the largest weight on either side decides."""
    for largest, scale in ((7.5, 1.0), (-8.5, 1.0)):
        weight = torch.zeros(1, 32)
        weight[0, 5] = largest
        packed = quantise(weight, 32)
        assert packed.scales.item() == scale
        assert abs(dequantise(packed)[0, 5].item() - largest) == 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_zero_and_vanishing_groups(dtype: torch.dtype, symmetric: bool) -> None:
    """B31: zero groups decode to exact zeros; nothing is NaN or infinite."""
    weight = draw(32, 256, dtype=dtype)
    weight[4, :128] = 0
    weight[7, :128] = 1e-8  # 0 in fp16
    weight[:, 5] = 0
    packed = quantise(weight, 128, symmetric)
    decoded = dequantise(packed)
    assert packed.scales.isfinite().all() and (packed.scales > 0).all()
    assert decoded.isfinite().all()
    assert (decoded[4, :128] == 0).all()
    assert (decoded[7, :128].float() - weight[7, :128].float()).abs().max() <= 1e-8
    assert (decoded[:, 5] == 0).all() or not symmetric


@pytest.mark.parametrize("sign", [1, -1])
def test_asymmetric_groups_of_one_sign(sign: int) -> None:
    """0 stays representable, so that z fits in 0..15."""
    weight = sign * (5 + torch.rand(4, 64))
    packed = quantise(weight, 32, symmetric=False)
    assert ((dequantise(packed) - weight).abs() <= 0.5 * packed.scales.amax()).all()


def test_clip_bounds_the_weights() -> None:
    weight = draw(4, 64)
    weight[0, 3], weight[1, 40] = 9.0, -9.0
    clip = torch.full((4, 2), 1.5)
    clipped = quantise(weight, 32, clip=clip)
    same = quantise(weight.clamp(-1.5, 1.5), 32)
    assert torch.equal(clipped.qweight, same.qweight) and torch.equal(clipped.scales, same.scales)
    assert clipped.scales.max() <= 0.2 < quantise(weight, 32).scales.max()


@pytest.mark.parametrize("size", [3, 48, 0])
def test_group_size_that_does_not_divide_is_refused(size: int) -> None:
    with pytest.raises(InputError, match=rf"group size {size} does not divide the 64"):
        quantise(draw(2, 64), size)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(bad: float) -> None:
    weight = draw(2, 64)
    weight[1, 7] = bad
    with pytest.raises(InputError, match="1 of the 128 values"):
        quantise(weight, 32)
