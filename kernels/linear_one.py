"""One row times a matrix, y = x W^T + bias, bound by reading W once (GPU).

    x [in_features], W [out_features, in_features], bias [out_features] or none, y [out_features]
    x may be of a lower dtype than the others: a router's weight is fp32 in every engine.

cuBLAS's kernels start when the one before has ended, and the memory stands still meanwhile: some
three microseconds, a fifth of a small layer's time. This kernel asks for its first weights before
it waits for the launch before it, which is still running then. A program makes BLOCK_N values of y;
its weights are under way DEPTH tiles ahead of the sums.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch import Tensor

from seekforge.kernels.triton_support import jit, tl
from seekforge.kernels.tuning import overlaps_launches, smallest


@dataclass(frozen=True, slots=True)
class One:
    """block_n: values of y of a program; block_k: input features of a tile, `depth` tiles are read
    at a time; warps: Triton's num_warps."""

    block_n: int
    block_k: int
    depth: int
    warps: int


@functools.lru_cache(maxsize=4096)  # it is asked in every layer of every step
def one_config(in_features: int, out_features: int) -> One:
    """Of the smallest layer in h200.json that is not smaller than this one, else a default."""
    row = smallest("linear_one", in_features=in_features, out_features=out_features)
    if row is None:
        return One(4, 512, 2, 4) if out_features >= 1024 else One(1, 512, 2, 2)
    return One(row["block_n"], row["block_k"], row["depth"], row["warps"])


@jit
def _tiles(at, k, in_features, start, BLOCK_K: tl.constexpr, DEPTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """DEPTH tiles from `start` on; zeros behind the last feature."""
    tiles = ()
    for i in tl.static_range(DEPTH):
        offset = start + i * BLOCK_K
        mask = offset + k < in_features
        tiles = tiles + (tl.load(at + offset, mask=mask, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    return tiles


@jit
def one_row_kernel(  # type: ignore[no-untyped-def]
    x, weight, bias, y, in_features, out_features, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DEPTH: tl.constexpr, CHUNK: tl.constexpr, BIAS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < out_features
    # Rows behind the last are read as the last, and not stored.
    row = tl.minimum(n, out_features - 1).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    w_at = weight + row[:, None] * in_features + k[None, :]
    ahead = _tiles(w_at, k[None, :], in_features, 0, BLOCK_K, DEPTH)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # weights are older than the launch before; x may not be
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros((BLOCK_N, BLOCK_K // CHUNK), tl.float32)
    for start in range(0, in_features, DEPTH * BLOCK_K):
        now = ahead
        ahead = _tiles(w_at, k[None, :], in_features, start + DEPTH * BLOCK_K, BLOCK_K, DEPTH)
        values = _tiles(x + k, k, in_features, start, BLOCK_K, DEPTH)
        for i in tl.static_range(DEPTH):
            products = now[i].to(tl.float32) * values[i].to(tl.float32)[None, :]
            acc += tl.sum(tl.reshape(products, (BLOCK_N, BLOCK_K // CHUNK, CHUNK)), axis=2)
    total = tl.sum(acc, axis=1)
    if BIAS:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + n, total.to(y.dtype.element_ty), mask=inside)


def one_row(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, config: One | None = None
) -> None:
    """Fills y. All contiguous; weight and bias older than the launch before this one."""
    out_features, in_features = weight.shape
    config = config or one_config(in_features, out_features)
    overlap = overlaps_launches(x.device)
    one_row_kernel[(-(-out_features // config.block_n),)](
        x, weight, weight if bias is None else bias, y, in_features, out_features,
        BLOCK_N=config.block_n, BLOCK_K=config.block_k, DEPTH=config.depth,
        CHUNK=16 // weight.element_size(), BIAS=bias is not None, OVERLAP=overlap,
        num_warps=config.warps, num_stages=1, **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip
