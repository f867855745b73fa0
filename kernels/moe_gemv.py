"""Experts on few tokens as matrix-vector products: every chosen (token, expert) pair on its own.

    x        [tokens, hidden]
    weights  [tokens, top_k] fp32, indices [tokens, top_k]
    gate_up  [experts, 2 * intermediate, hidden], down [experts, hidden, intermediate]
    inner    [tokens * top_k, intermediate] fp32   weight * silu(gate x) * up x
    y        [tokens, hidden]                      sum over a token's pairs of down inner

Shared experts, read by every token: one MLP of `slices` times their width (kernels/shared_experts),

    shared gate_up  [2 * slices * intermediate, hidden], down [hidden, slices * intermediate]
    inner           [tokens * (top_k + slices), intermediate]   the slices behind the chosen experts

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
    x, weights, indices, gate_up, shared, inner, top_k,
    HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr, OVERLAP: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """shared: gate_up of the shared experts; not read where SLICES is 0."""
    pair = tl.program_id(1).to(tl.int64)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = pair // (top_k + SLICES)
    chosen = pair - token * SLICES  # of the routing's pairs
    part = pair - token * (top_k + SLICES) - top_k  # of the shared experts, if not negative
    if SLICES:
        chosen = tl.minimum(chosen, token * top_k + top_k - 1)
    expert = tl.load(indices + chosen).to(tl.int64)
    matrix = gate_up + expert * (2 * INTERMEDIATE * HIDDEN)
    to_up = INTERMEDIATE * HIDDEN
    if SLICES:
        matrix = tl.where(part < 0, matrix, shared + part * (INTERMEDIATE * HIDDEN))
        to_up = tl.where(part < 0, to_up, SLICES * INTERMEDIATE * HIDDEN)
        weight = tl.where(part < 0, tl.load(weights + chosen), 1.0)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < INTERMEDIATE
    gate_row = matrix + n[:, None] * HIDDEN
    up_row = gate_row + to_up
    x_row = x + token * HIDDEN
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
    if SLICES == 0:
        weight = tl.load(weights + pair)
    tl.store(inner + pair * INTERMEDIATE + n, activated * weight, mask=inside)


@jit
def down_gemv_kernel(  # type: ignore[no-untyped-def]
    inner, indices, down, shared, y,
    HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """shared: down of the shared experts, which come first: their place needs no index."""
    token = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < HIDDEN
    STEPS: tl.constexpr = (INTERMEDIATE + BLOCK_K - 1) // BLOCK_K
    WIDTH: tl.constexpr = SLICES * INTERMEDIATE
    FIRST: tl.constexpr = (WIDTH + BLOCK_K - 1) // BLOCK_K  # steps of the shared experts
    ALL: tl.constexpr = FIRST + TOP_K * STEPS
    k = tl.arange(0, BLOCK_K)
    row = down + n[:, None] * INTERMEDIATE + k[None, :]
    shared_row = shared + n[:, None] * WIDTH + k[None, :]
    rows = inner + token * ((TOP_K + SLICES) * INTERMEDIATE) + k
    acc = tl.zeros((BLOCK_N, BLOCK_K // CHUNK), tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    if SLICES:
        first = inside[:, None] & (k < WIDTH)[None, :]
        upcoming = tl.load(shared_row, mask=first, other=0.0)
    else:
        base = row + tl.load(indices + token * TOP_K).to(tl.int64) * (HIDDEN * INTERMEDIATE)
        first = inside[:, None] & (k < INTERMEDIATE)[None, :]
        upcoming = tl.load(base, mask=first, other=0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    for step in tl.static_range(0, ALL):
        w = upcoming
        if step + 1 < FIRST:
            start = (step + 1) * BLOCK_K
            mask = inside[:, None] & (start + k < WIDTH)[None, :]
            upcoming = tl.load(shared_row + start, mask=mask, other=0.0)
        elif step + 1 < ALL:
            if (step + 1 - FIRST) % STEPS == 0:
                chosen = indices + token * TOP_K + (step + 1 - FIRST) // STEPS
                base = row + tl.load(chosen).to(tl.int64) * (HIDDEN * INTERMEDIATE)
            start = (step + 1 - FIRST) % STEPS * BLOCK_K
            mask = inside[:, None] & (start + k < INTERMEDIATE)[None, :]
            upcoming = tl.load(base + start, mask=mask, other=0.0)
        if step < FIRST:
            a_at = rows + TOP_K * INTERMEDIATE + step * BLOCK_K
            a = tl.load(a_at, mask=step * BLOCK_K + k < WIDTH, other=0.0)
        else:
            start = (step - FIRST) % STEPS * BLOCK_K
            a_at = rows + (step - FIRST) // STEPS * INTERMEDIATE + start
            a = tl.load(a_at, mask=start + k < INTERMEDIATE, other=0.0)
        acc += chunk_sums(w.to(tl.float32) * a[None, :], BLOCK_N, BLOCK_K, CHUNK)
    tl.store(y + token * HIDDEN + n, tl.sum(acc, axis=1).to(y.dtype.element_ty), mask=inside)


def moe_gemv_triton(
    x: Tensor, weights: Tensor, indices: Tensor, gate_up: Tensor, down: Tensor, config: GemvConfig,
    shared: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """All contiguous; x [tokens, hidden], weights in fp32. shared: gate_up and down of the shared
    experts, in the dtype of the others, a multiple of their width wide."""
    tokens, hidden = x.shape
    top_k, intermediate = indices.shape[-1], down.shape[-1]
    shared_gate_up, shared_down = shared or (gate_up, down)
    slices = shared_down.shape[-1] // intermediate if shared else 0
    inner = x.new_empty(tokens * (top_k + slices), intermediate, dtype=torch.float32)
    y = torch.empty_like(x)
    overlap, chunk = overlaps_launches(x.device), 16 // x.element_size()
    both = {
        "HIDDEN": hidden, "INTERMEDIATE": intermediate, "CHUNK": chunk, "SLICES": slices,
        "OVERLAP": overlap, **({"launch_pdl": True} if overlap else {}),
    }  # fmt: skip
    gate_up_gemv_kernel[(-(-intermediate // config.n), inner.shape[0])](
        x, weights, indices, gate_up, shared_gate_up, inner, top_k, BLOCK_N=config.n,
        BLOCK_K=min(config.k, next_power_of_2(max(hidden, chunk))), num_warps=config.warps,
        **both,
    )  # fmt: skip
    down_gemv_kernel[(-(-hidden // config.down_n), tokens)](
        inner, indices, down, shared_down, y, TOP_K=top_k, BLOCK_N=config.down_n,
        BLOCK_K=min(config.down_k, next_power_of_2(max(intermediate, chunk))),
        num_warps=config.down_warps, **both,
    )  # fmt: skip
    return y
