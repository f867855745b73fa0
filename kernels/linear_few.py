"""A few rows times a matrix, y = x W^T + bias, bound by reading W once (GPU).

    x [rows, in_features], up to 32 rows; W [out_features, in_features]; bias [out_features] or none
    y [rows, out_features]

Weights stream through shared memory to the matrix units, several tiles ahead. A small layer has
fewer tiles than there are multiprocessors: `splits` programs share its input features, and
merge_parts adds up what they made. Rows of h200.json without a tile are cuBLAS's; all were found
with 32 rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from seekforge.kernels.int4_gemm_merge import merge_parts
from seekforge.kernels.triton_support import jit, next_power_of_2, tl
from seekforge.kernels.tuning import overlaps_launches, smallest

MOST = 32  # rows


@dataclass(frozen=True, slots=True)
class FewRows:
    """block_n: out_features of a program; block_k: input features of a tile; stages: tiles under
    way; splits: programs that share the input features."""

    block_n: int
    block_k: int
    stages: int
    warps: int
    splits: int


@functools.lru_cache(maxsize=4096)
def few_config(rows: int, in_features: int, out_features: int) -> FewRows | None:
    """Of the smallest layer in h200.json that is not smaller than this one; None: cuBLAS."""
    found = smallest("linear_few", rows=rows, in_features=in_features, out_features=out_features)
    if rows > MOST or found is None or not found["block_n"]:
        return None
    return FewRows(*(found[name] for name in ("block_n", "block_k", "stages", "warps", "splits")))


@jit
def few_rows_kernel(  # type: ignore[no-untyped-def]
    x, weight, bias, y, parts, rows, in_features, out_features, each, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, BIAS: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """each: input features of a split."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    begin = tl.program_id(1) * each
    end = tl.minimum(begin + each, in_features)
    # Rows behind the last are read as the last, and not stored.
    x_at = x + tl.minimum(m, rows - 1)[:, None] * in_features + k[None, :]
    row = tl.minimum(n, out_features - 1).to(tl.int64)
    w_at = weight + row[None, :] * in_features + k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for start in range(begin, end, BLOCK_K):
        inside = start + k < end
        values = tl.load(x_at + start, mask=inside[None, :], other=0.0)
        weights = tl.load(w_at + start, mask=inside[:, None], other=0.0)
        acc = tl.dot(values, weights, acc, input_precision=PRECISION)
    mask = (m < rows)[:, None] & (n < out_features)[None, :]
    at = m[:, None] * out_features + n[None, :]
    if SPLIT:
        tl.store(parts + tl.program_id(1).to(tl.int64) * rows * out_features + at, acc, mask=mask)
    else:
        if BIAS:
            acc += tl.load(bias + n, mask=n < out_features, other=0.0).to(tl.float32)[None, :]
        tl.store(y + at, acc.to(y.dtype.element_ty), mask=mask)


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, config: FewRows) -> None:
    """Fills y. All contiguous and of one dtype."""
    rows, in_features = x.shape
    out_features = weight.shape[0]
    each = -(-in_features // (config.splits * config.block_k)) * config.block_k
    splits = -(-in_features // each)
    parts = y
    if splits > 1:
        parts = y.new_empty(splits, rows, out_features, dtype=torch.float32)
    overlap = overlaps_launches(x.device)
    few_rows_kernel[(-(-out_features // config.block_n), splits)](
        x, weight, weight if bias is None else bias, y, parts, rows, in_features, out_features,
        each, BLOCK_M=max(16, next_power_of_2(rows)), BLOCK_N=config.block_n,
        BLOCK_K=config.block_k, SPLIT=splits > 1, BIAS=bias is not None,
        PRECISION="ieee" if x.element_size() == 4 else "tf32", OVERLAP=overlap,
        num_warps=config.warps, num_stages=config.stages,
        **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip
    if splits > 1:
        merge_parts(parts, bias, y)
