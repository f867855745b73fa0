"""Experts on tiles of tokens: grouped products for bf16, fp16 and fp32 weights.

    x        [tokens, hidden]
    gate_up  [experts, 2 * intermediate, hidden], down [experts, hidden, intermediate]
    inner    [pairs, intermediate]     silu(gate x) * up x, pairs by expert (moe_tiles.py)
    parts    [pairs, hidden] fp32      weight * down inner, pairs in the tokens' order

A program multiplies a block of an expert's rows by one tile of tokens. The weights are the left
factor: 64 rows fill the matrix units where an expert has one token as well as where it has 64.
Bulk copies (tensor descriptors) of the weights were tried: within 1 % with 8 tokens and with 4,096.
inner has x's dtype; in fp16, whose 65504 products pass, it is fp32, and `down` is multiplied by two
tf32 parts of it, 22 bits together (fp16 weights are exact in tf32).
"""

from __future__ import annotations

import torch
from torch import Tensor

from seekforge.kernels.moe_config import GemmConfig, fitted
from seekforge.kernels.moe_gemv import silu
from seekforge.kernels.moe_tiles import moe_combine_triton, moe_tiles_triton
from seekforge.kernels.triton_support import jit, tl
from seekforge.kernels.tuning import overlaps_launches


@jit
def load_rows(base, row, k, rows, columns, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """The elements of a matrix [rows, columns] at row[:, None], k[None, :]; 0 outside."""
    at = base + row[:, None].to(tl.int64) * columns + k[None, :]
    if EVEN_N and EVEN_K:
        return tl.load(at)
    return tl.load(at, mask=(row < rows)[:, None] & (k < columns)[None, :], other=0.0)


@jit
def exact_dot(w, a, acc, INPUT: tl.constexpr):  # type: ignore[no-untyped-def]
    """w a + acc; a in fp32 beside fp16 weights in two parts."""
    if INPUT == "split":
        wide = w.to(tl.float32)
        high = (a.to(tl.int32, bitcast=True) & -0x2000).to(tl.float32, bitcast=True)
        acc = tl.dot(wide, high, acc, input_precision="tf32")
        acc = tl.dot(wide, a - high, acc, input_precision="tf32")
    else:
        acc = tl.dot(w, a, acc, input_precision="ieee")
    return acc


@jit
def gate_up_kernel(  # type: ignore[no-untyped-def]
    x, pairs, tiles, gate_up, inner, top_k, HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    entry = tiles + tl.program_id(1) * 4
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(entry).to(tl.int64)
    first = tl.load(entry + 1)
    count = tl.load(entry + 2)
    if count == 0:
        return
    m = tl.arange(0, BLOCK_M)
    # Rows beyond the tile's read its first token: their products are not stored.
    pair = tl.load(pairs + first + tl.where(m < count, m, 0))
    row = (pair // top_k).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    base = gate_up + expert * (2 * INTERMEDIATE * HIDDEN)
    EVEN_N: tl.constexpr = INTERMEDIATE % BLOCK_N == 0
    EVEN_K: tl.constexpr = HIDDEN % BLOCK_K == 0
    gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, HIDDEN, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        g = load_rows(base, n, k, INTERMEDIATE, HIDDEN, EVEN_N, EVEN_K)
        u = load_rows(base + INTERMEDIATE * HIDDEN, n, k, INTERMEDIATE, HIDDEN, EVEN_N, EVEN_K)
        if EVEN_K:
            a = tl.load(x + row[:, None] * HIDDEN + k[None, :])
        else:
            a = tl.load(x + row[:, None] * HIDDEN + k[None, :], mask=(k < HIDDEN)[None, :], other=0)
        a = tl.trans(a)
        gate = tl.dot(g, a, gate, input_precision="ieee")
        up = tl.dot(u, a, up, input_precision="ieee")
    made = (silu(gate) * up).to(inner.dtype.element_ty)
    at = inner + (first + m)[None, :].to(tl.int64) * INTERMEDIATE + n[:, None]
    tl.store(at, made, mask=(n < INTERMEDIATE)[:, None] & (m < count)[None, :])


@jit
def down_kernel(  # type: ignore[no-untyped-def]
    inner, weights, pairs, tiles, down, parts, HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, INPUT: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    entry = tiles + tl.program_id(1) * 4
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert = tl.load(entry).to(tl.int64)
    first = tl.load(entry + 1)
    count = tl.load(entry + 2)
    if count == 0:
        return
    m = tl.arange(0, BLOCK_M)
    row = first + tl.where(m < count, m, 0)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    base = down + expert * (HIDDEN * INTERMEDIATE)
    EVEN_N: tl.constexpr = HIDDEN % BLOCK_N == 0
    EVEN_K: tl.constexpr = INTERMEDIATE % BLOCK_K == 0
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, INTERMEDIATE, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        w = load_rows(base, n, k, HIDDEN, INTERMEDIATE, EVEN_N, EVEN_K)
        a = load_rows(inner, row, k, first + count, INTERMEDIATE, True, EVEN_K)
        acc = exact_dot(w, tl.trans(a), acc, INPUT)
    pair = tl.load(pairs + row)
    acc *= tl.load(weights + pair)[None, :]
    at = parts + pair[None, :].to(tl.int64) * HIDDEN + n[:, None]
    tl.store(at, acc, mask=(n < HIDDEN)[:, None] & (m < count)[None, :])


def moe_gemm_triton(
    x: Tensor, weights: Tensor, indices: Tensor, gate_up: Tensor, down: Tensor, config: GemmConfig
) -> Tensor:
    """All contiguous; x [tokens, hidden], weights in fp32."""
    config = fitted(config, x.dtype)
    tokens, hidden = x.shape
    top_k, intermediate = indices.shape[-1], down.shape[-1]
    pairs, tiles = moe_tiles_triton(indices, gate_up.shape[0], config.m)
    inner = x.new_empty(tokens * top_k, intermediate, dtype=inner_dtype(x.dtype))
    parts = x.new_empty(tokens, top_k, hidden, dtype=torch.float32)
    y = torch.empty_like(x)
    overlap = overlaps_launches(x.device)
    shared = {
        "HIDDEN": hidden, "INTERMEDIATE": intermediate, "BLOCK_M": config.m, "OVERLAP": overlap,
        **({"launch_pdl": True} if overlap else {}),
    }  # fmt: skip
    gate_up_kernel[(-(-intermediate // config.n), tiles.shape[0])](
        x, pairs, tiles, gate_up, inner, top_k, BLOCK_N=config.n,
        BLOCK_K=config.k,
        num_warps=config.warps, num_stages=config.stages, **shared,
    )  # fmt: skip
    down_kernel[(-(-hidden // config.down_n), tiles.shape[0])](
        inner, weights, pairs, tiles, down, parts,
        BLOCK_N=config.down_n, BLOCK_K=config.down_k,
        INPUT="split" if x.dtype is torch.float16 else "plain", num_warps=config.down_warps,
        num_stages=config.down_stages, **shared,
    )  # fmt: skip
    moe_combine_triton(parts, y)
    return y


def inner_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype is torch.float16 else dtype
