"""Latent attention's products with each head's own matrix, for few tokens (GPU).

    x  [tokens, heads, k],  w  [heads, k, n] in any layout,  y  [tokens, heads, n]
    y_th = x_th w_h

Twice in a layer: x is q_nope and w is W_UK (columns contiguous), or x is what the heads attended to
and w is W_UV transposed (rows contiguous). For few tokens the time is that of reading w once, so
heads x blocks of columns share it, and each asks for its tile before it waits for the launch
before. x may also come in the parts that the programs of a split context left: with one token,
merging them in the programs that read them saves a launch (the formula is in split_merge.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from seekforge.kernels.split_merge import split_merge_triton
from seekforge.kernels.triton_support import jit, next_power_of_2, tl
from seekforge.kernels.tuning import overlaps_launches

FEW = 32  # tokens up to which these kernels serve: a program holds all of them
TILE = 8192  # values of w in a program: 16 KB in bf16
MERGED_TILE = 2 * TILE  # fewer programs read the parts
MERGED_BYTES = 8 << 20  # parts that all programs together read; beyond, a launch of its own is less


@jit
def load_head(w, n, w_k, w_n, K: tl.constexpr, N: tl.constexpr, K_PAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Columns n [BLOCK_N] of one head's matrix, [K_PAD, BLOCK_N]; zeros outside of it."""
    k = tl.arange(0, K_PAD)
    inside = (k < K)[:, None] & (n < N)[None, :]
    return tl.load(w + k[:, None] * w_k + n[None, :] * w_n, mask=inside, other=0.0)


@jit
def store_product(  # type: ignore[no-untyped-def]
    x, w, y, n, tokens, x_token, y_token, K: tl.constexpr, N: tl.constexpr, K_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """All tokens of one head, x and y pointers to its first, times the tile of `load_head`."""
    k = tl.arange(0, K_PAD)
    if BLOCK_T == 1:
        value = tl.load(x + k, mask=k < K, other=0.0)
        total = tl.sum(w.to(tl.float32) * value.to(tl.float32)[:, None], axis=0)
        tl.store(y + n, total.to(y.dtype.element_ty), mask=n < N)
    else:
        token = tl.arange(0, BLOCK_T)[:, None]
        inside = token < tokens
        value = tl.load(x + token * x_token + k[None, :], mask=inside & (k < K)[None, :], other=0.0)
        total = tl.dot(value, w)
        y_at = y + token * y_token + n[None, :]
        tl.store(y_at, total.to(y.dtype.element_ty), mask=inside & (n < N)[None, :])


@jit
def head_product_kernel(  # type: ignore[no-untyped-def]
    x, w, y, tokens, x_token, x_head, w_head, w_k, w_n, y_token, y_head,
    K: tl.constexpr, N: tl.constexpr, K_PAD: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = load_head(w + head * w_head, n, w_k, w_n, K, N, K_PAD)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # weights are older than the launch before; x may not be
        tl.extra.cuda.gdc_launch_dependents()
    store_product(
        x + head * x_head, tile, y + head * y_head, n, tokens, x_token, y_token,
        K, N, K_PAD, BLOCK_T,
    )  # fmt: skip


@jit
def merged_product_kernel(  # type: ignore[no-untyped-def]
    parts, logs, w, y, splits, w_head, w_k, w_n, y_token, y_head,
    K: tl.constexpr, N: tl.constexpr, K_PAD: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, STEP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program merges all of one row, STEP parts at a time, and makes BLOCK_N values of y."""
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(2).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = load_head(w + head * w_head, n, w_k, w_n, K, N, K_PAD)
    row = (token * tl.num_programs(1) + head) * splits
    split = tl.arange(0, SPLITS)
    step = tl.arange(0, STEP)
    k = tl.arange(0, K_PAD)
    part_at = parts + (row + step)[:, None] * K + k[None, :]
    inside = (k < K)[None, :]
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    log = tl.load(logs + row + split, mask=split < splits, other=float("-inf"))
    # Not masked by `log`: the two loads should be under way together.
    ahead = tl.load(part_at, mask=(step < splits)[:, None] & inside, other=0.0)
    top = tl.maximum(tl.max(log, axis=0), -1e30)
    weight = tl.exp2(log - top)
    live = tl.max(tl.where(weight > 0, split + 1, 0), axis=0)  # the parts behind were not written
    mixed = tl.zeros((K_PAD,), tl.float32)
    for start in range(0, live, STEP):
        part = ahead
        following = start + STEP + step
        ahead = tl.load(
            part_at + (start + STEP) * K, mask=(following < live)[:, None] & inside, other=0.0
        )
        at = start + step
        again = tl.load(logs + row + at, mask=at < splits, other=float("-inf"))
        by = tl.exp2(again - top)
        part = tl.where((by > 0)[:, None], part, 0.0)  # an empty part was not written
        mixed += tl.sum(part * by[:, None], axis=0)
    mixed = mixed / tl.maximum(tl.sum(weight, axis=0), 1e-30)
    # Rounded as what an unsplit attention or split_merge writes.
    value = mixed.to(y.dtype.element_ty).to(tl.float32)
    total = tl.sum(tile.to(tl.float32) * value[:, None], axis=0)
    y_at = y + token * y_token + head * y_head
    tl.store(y_at + n, total.to(y.dtype.element_ty), mask=n < N)


def columns(k: int, n: int, tile: int = TILE) -> int:
    """Columns of a program's tile [k, columns], a power of two (16 or more: matrix units)."""
    return max(16, min(next_power_of_2(n), tile // padded(k)))


def padded(k: int) -> int:
    return max(16, next_power_of_2(k))


def block_tokens(tokens: int) -> int:
    """Rows of a program: one by sums, several by matrix units."""
    return 1 if tokens == 1 else max(16, next_power_of_2(tokens))


def few(x: Tensor) -> bool:
    """Whether these kernels serve x [tokens, ...]. In fp32 matrix units would round."""
    return len(x) <= (FEW if x.element_size() == 2 else 1) and x.stride(-1) == 1


def head_product_triton(x: Tensor, w: Tensor, y: Tensor) -> None:
    """Fills y, contiguous in the last dimension, for `few` tokens. May start before the launch
    before it has ended: w must be older than that one."""
    tokens, heads, k = x.shape
    n = w.shape[2]
    block_n = columns(k, n)
    overlap = overlaps_launches(x.device)
    head_product_kernel[(-(-n // block_n), heads)](
        x, w, y, tokens, x.stride(0), x.stride(1), *w.stride(), y.stride(0), y.stride(1),
        K=k, N=n, K_PAD=padded(k), BLOCK_N=block_n, BLOCK_T=block_tokens(tokens), OVERLAP=overlap,
        num_warps=4, num_stages=1, **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip


def head_product(x: Tensor, w: Tensor, y: Tensor | None = None) -> Tensor:
    """The same for any number of tokens: y, or a new one."""
    (tokens, heads, _), n = x.shape, w.shape[2]
    if few(x):
        y = x.new_empty(tokens, heads, n) if y is None else y
        head_product_triton(x, w, y)
        return y
    by_head = None if y is None else y.transpose(0, 1)
    return torch.bmm(x.transpose(0, 1), w, out=by_head).transpose(0, 1)  # type: ignore[arg-type]


def merges_inside(tokens: int, heads: int, splits: int, k: int, n: int) -> bool:
    """Whether the product's programs merge the parts: each of a head's reads all of them."""
    programs = -(-n // columns(k, n, MERGED_TILE))
    return 4 * tokens * heads * splits * k * programs <= MERGED_BYTES


def merged_product_triton(parts: Tensor, logs: Tensor, w: Tensor, y: Tensor) -> None:
    """Fills y from parts [tokens, heads, splits, k] and logs, alike; the rest as above."""
    tokens, heads, splits, k = parts.shape
    n = w.shape[2]
    block_n = columns(k, n, MERGED_TILE)
    overlap = overlaps_launches(y.device)
    merged_product_kernel[(-(-n // block_n), heads, tokens)](
        parts, logs, w, y, splits, *w.stride(), y.stride(0), y.stride(1),
        K=k, N=n, K_PAD=padded(k), BLOCK_N=block_n, SPLITS=next_power_of_2(splits),
        STEP=min(16, next_power_of_2(splits)), OVERLAP=overlap, num_warps=8, num_stages=1,
        **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip


def product_of_parts(
    parts: Tensor, logs: Tensor, mixed: Tensor, w: Tensor, y: Tensor, query_start: Tensor
) -> None:
    """Fills y from an attention's parts; from mixed [tokens, heads, k] where there are none."""
    tokens, heads, splits, k = parts.shape
    if splits and merges_inside(tokens, heads, splits, k, w.shape[2]):
        merged_product_triton(parts, logs, w, y)
        return
    if splits:
        split_merge_triton(parts, logs, mixed, query_start, by_row=True)
    head_product(mixed, w, y)
