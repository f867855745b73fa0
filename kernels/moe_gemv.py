"""Experts on few tokens as matrix-vector products: every chosen (token, expert) pair on its own.

    x        [tokens, hidden]
    weights  [tokens, top_k] fp32, indices [tokens, top_k]
    gate_up  [experts, 2 * intermediate, hidden], down [experts, hidden, intermediate]
    inner    [tokens * top_k, intermediate] fp32   weight * silu(gate x) * up x
    y        [tokens, hidden]                      sum over a token's pairs of down inner

Made for one token, where each chosen weight is read once and nothing is shared. A program of the
first kernel makes a few columns of one pair's inner; one of the second makes a few values of y from
all top_k experts, one after the other in one sum, so there is no third launch and no atomic.
On Hopper each launch starts before the one before it has ended. The second kernel asks for its
first weights before it waits for `inner`: the routing is older than the first kernel's own wait.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seekforge.kernels.moe_config import GemvConfig
from seekforge.kernels.triton_support import jit, next_power_of_2, tl
from seekforge.kernels.tuning import overlaps_launches


@jit
def chunk_sums(products, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """[ROWS, COLUMNS] -> [ROWS, COLUMNS / CHUNK]: sums within what one thread loaded at once."""
    return tl.sum(tl.reshape(products, (ROWS, COLUMNS // CHUNK, CHUNK)), axis=2)


@jit
def silu(x):  # type: ignore[no-untyped-def]
    return x / (1.0 + tl.exp(-x))


@jit
def gate_up_gemv_kernel(  # type: ignore[no-untyped-def]
    x, weights, indices, gate_up, inner, top_k,
    HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1).to(tl.int64)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(indices + pair).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < INTERMEDIATE
    gate_row = gate_up + expert * (2 * INTERMEDIATE * HIDDEN) + n[:, None] * HIDDEN
    up_row = gate_row + INTERMEDIATE * HIDDEN
    x_row = x + pair // top_k * HIDDEN
    gate = tl.zeros((BLOCK_N, BLOCK_K // CHUNK), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_K // CHUNK), tl.float32)
    for start in tl.static_range(0, HIDDEN, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        mask = inside[:, None] & (k < HIDDEN)[None, :]
        g = tl.load(gate_row + k[None, :], mask=mask, other=0.0)
        u = tl.load(up_row + k[None, :], mask=mask, other=0.0)
        a = tl.load(x_row + k, mask=k < HIDDEN, other=0.0).to(tl.float32)[None, :]
        gate += chunk_sums(g.to(tl.float32) * a, BLOCK_N, BLOCK_K, CHUNK)
        up += chunk_sums(u.to(tl.float32) * a, BLOCK_N, BLOCK_K, CHUNK)
    activated = silu(tl.sum(gate, axis=1)) * tl.sum(up, axis=1)
    tl.store(inner + pair * INTERMEDIATE + n, activated * tl.load(weights + pair), mask=inside)


@jit
def down_gemv_kernel(  # type: ignore[no-untyped-def]
    inner, indices, down, y,
    HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < HIDDEN
    STEPS: tl.constexpr = (INTERMEDIATE + BLOCK_K - 1) // BLOCK_K
    k = tl.arange(0, BLOCK_K)
    row = down + n[:, None] * INTERMEDIATE + k[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_K // CHUNK), tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    base = row + tl.load(indices + token * TOP_K).to(tl.int64) * (HIDDEN * INTERMEDIATE)
    first = inside[:, None] & (k < INTERMEDIATE)[None, :]
    upcoming = tl.load(base, mask=first, other=0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    for step in tl.static_range(0, TOP_K * STEPS):
        w = upcoming
        if step + 1 < TOP_K * STEPS:
            if (step + 1) % STEPS == 0:
                expert = tl.load(indices + token * TOP_K + (step + 1) // STEPS).to(tl.int64)
                base = row + expert * (HIDDEN * INTERMEDIATE)
            start = (step + 1) % STEPS * BLOCK_K
            mask = inside[:, None] & (start + k < INTERMEDIATE)[None, :]
            upcoming = tl.load(base + start, mask=mask, other=0.0)
        start = step % STEPS * BLOCK_K
        a_at = inner + (token * TOP_K + step // STEPS) * INTERMEDIATE + start + k
        a = tl.load(a_at, mask=start + k < INTERMEDIATE, other=0.0)
        acc += chunk_sums(w.to(tl.float32) * a[None, :], BLOCK_N, BLOCK_K, CHUNK)
    tl.store(y + token * HIDDEN + n, tl.sum(acc, axis=1).to(y.dtype.element_ty), mask=inside)


def moe_gemv_triton(
    x: Tensor, weights: Tensor, indices: Tensor, gate_up: Tensor, down: Tensor, config: GemvConfig
) -> Tensor:
    """All contiguous; x [tokens, hidden], weights in fp32."""
    tokens, hidden = x.shape
    top_k, intermediate = indices.shape[-1], down.shape[-1]
    inner = x.new_empty(tokens * top_k, intermediate, dtype=torch.float32)
    y = torch.empty_like(x)
    overlap, chunk = overlaps_launches(x.device), 16 // x.element_size()
    shared = {
        "HIDDEN": hidden, "INTERMEDIATE": intermediate, "CHUNK": chunk,
        "OVERLAP": overlap, **({"launch_pdl": True} if overlap else {}),
    }  # fmt: skip
    gate_up_gemv_kernel[(-(-intermediate // config.n), tokens * top_k)](
        x, weights, indices, gate_up, inner, top_k, BLOCK_N=config.n,
        BLOCK_K=min(config.k, next_power_of_2(max(hidden, chunk))), num_warps=config.warps,
        **shared,
    )  # fmt: skip
    down_gemv_kernel[(-(-hidden // config.down_n), tokens)](
        inner, indices, down, y, TOP_K=top_k, BLOCK_N=config.down_n,
        BLOCK_K=min(config.down_k, next_power_of_2(max(intermediate, chunk))),
        num_warps=config.down_warps, **shared,
    )  # fmt: skip
    return y
