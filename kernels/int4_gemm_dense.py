"""An INT4 linear layer for many tokens: the weight is decoded once, the product is the library's.

    weight as in kernels/int4 -> W [out_features, in_features] in the dtype of x, then y = x W^T

From some thousand tokens on, the time of reading and writing the weight disappears behind the
product's.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear

from seekforge.kernels.int4 import Int4
from seekforge.kernels.triton_support import jit, tl


@jit
def decode_kernel(  # type: ignore[no-untyped-def]
    qweight, scales, zeros, w, out_features, packed, group_size,
    ZEROS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ONE_GROUP: tl.constexpr,
):  # fmt: skip
    """ONE_GROUP: a program's bytes of a row are one group."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    byte = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    row = n.to(tl.int64)[:, None]
    mask = (n < out_features)[:, None] & (byte < packed)[None, :]
    q = tl.load(qweight + row * packed + byte[None, :], mask=mask, other=0).to(tl.int32)
    group = row * (2 * packed // group_size)
    if ONE_GROUP:
        group += tl.program_id(1)
        inside = (n < out_features)[:, None]
    else:
        group += (2 * byte // group_size)[None, :]
        inside = mask
    scale = tl.load(scales + group, mask=inside, other=0.0).to(tl.float32)
    zero = 8
    if ZEROS:
        zero = tl.load(zeros + group, mask=inside, other=0).to(tl.int32)
    low = ((q & 15) - zero).to(tl.float32) * scale
    high = ((q >> 4) - zero).to(tl.float32) * scale
    both = tl.reshape(tl.join(low, high), [BLOCK_N, 2 * BLOCK_K])
    k = tl.program_id(1) * (2 * BLOCK_K) + tl.arange(0, 2 * BLOCK_K)
    mask = (n < out_features)[:, None] & (k < 2 * packed)[None, :]
    tl.store(w + row * (2 * packed) + k[None, :], both.to(w.dtype.element_ty), mask=mask)


def decode_weight(weight: Int4, like: Tensor) -> Tensor:
    """The weight of two dimensions, contiguous, in the dtype of `like`."""
    out_features, packed = weight.qweight.shape
    w = like.new_empty(out_features, 2 * packed)
    group_bytes = weight.group_size // 2
    one = 16 <= group_bytes <= 512 and group_bytes & (group_bytes - 1) == 0
    block_k = group_bytes if one else 128
    block_n = 4096 // block_k
    decode_kernel[(-(-out_features // block_n), -(-packed // block_k))](
        weight.qweight, weight.scales,
        weight.qweight if weight.zeros is None else weight.zeros, w, out_features, packed,
        weight.group_size, ZEROS=weight.zeros is not None, BLOCK_N=block_n, BLOCK_K=block_k,
        ONE_GROUP=one,
    )  # fmt: skip
    return w


def dense(x: Tensor, weight: Int4, bias: Tensor | None) -> Tensor:
    """y [..., out_features], through a copy of the weight in the dtype of x."""
    return linear(x, decode_weight(weight, x), bias)
