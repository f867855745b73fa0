"""Pairs of (token, expert) sorted by expert and cut into tiles, and the sum of their results.

    indices  [tokens, top_k]          pair p is token p // top_k with expert indices[p]
    pairs    [tokens * top_k] int32   all pairs, by expert
    tiles    [bound, 4] int32         expert, first place in `pairs`, number of pairs (0: no tile)

The bound follows from shapes, so a grid over tiles needs nothing from the device; tiles in use come
first. One program serves one expert: it counts all experts' pairs, then writes its own. The order
within an expert is that of the pairs: equal inputs give equal results.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seekforge.kernels.triton_support import jit, next_power_of_2, tl
from seekforge.kernels.tuning import overlaps_launches


@jit
def moe_tiles_kernel(  # type: ignore[no-untyped-def]
    indices, pairs, tiles, count, bound, EXPERTS: tl.constexpr, PADDED: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    bins = tl.arange(0, PADDED)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    counts = tl.zeros((PADDED,), tl.int32)
    for start in range(0, count, BLOCK):
        chosen = tl.load(indices + start + at, mask=start + at < count, other=PADDED - 1)
        counts += tl.histogram(chosen.to(tl.int32), PADDED)  # the last bin is nobody's
    counts = tl.where(bins < EXPERTS, counts, 0)
    needed = (counts + TILE - 1) // TILE
    before = bins < expert
    first = tl.sum(tl.where(before, counts, 0), axis=0)
    own = tl.sum(tl.where(bins == expert, counts, 0), axis=0)
    tile = tl.sum(tl.where(before, needed, 0), axis=0)
    row = tl.arange(0, 64)
    for start in range(0, (own + TILE - 1) // TILE, 64):
        entry = tiles + (tile + start + row) * 4
        left = own - (start + row) * TILE
        tl.store(entry, row * 0 + expert, mask=left > 0)
        tl.store(entry + 1, first + (start + row) * TILE, mask=left > 0)
        tl.store(entry + 2, tl.minimum(left, TILE), mask=left > 0)
    if expert == 0:
        for start in range(tl.sum(needed, axis=0), bound, 64):
            tl.store(tiles + (start + row) * 4 + 2, row * 0, mask=start + row < bound)
    place = first
    for start in range(0, count, BLOCK):
        inside = start + at < count
        chosen = tl.load(indices + start + at, mask=inside, other=-1)
        mine = (chosen == expert) & inside
        rank = tl.cumsum(mine.to(tl.int32), axis=0)
        tl.store(pairs + place + rank - 1, start + at, mask=mine)
        place += tl.sum(mine.to(tl.int32), axis=0)


def moe_tiles_triton(indices: Tensor, experts: int, tile: int) -> tuple[Tensor, Tensor]:
    """(pairs, tiles); indices contiguous."""
    count = indices.numel()
    bound = min(count, experts) + count // tile
    pairs = indices.new_empty(count, dtype=torch.int32)
    tiles = indices.new_empty(bound, 4, dtype=torch.int32)
    overlap = overlaps_launches(indices.device)
    moe_tiles_kernel[(experts,)](
        indices, pairs, tiles, count, bound, EXPERTS=experts, PADDED=next_power_of_2(experts + 1),
        TILE=tile, BLOCK=min(1024, max(64, next_power_of_2(count))), OVERLAP=overlap, num_warps=4,
        **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip
    return pairs, tiles


@jit
def moe_combine_kernel(  # type: ignore[no-untyped-def]
    parts, y, HIDDEN: tl.constexpr, TOP_K: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.arange(0, PADDED)[:, None]
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    mask = (slot < TOP_K) & (column < HIDDEN)[None, :]
    at = (token * TOP_K + slot) * HIDDEN + column[None, :]
    total = tl.sum(tl.load(parts + at, mask=mask, other=0.0), axis=0)
    tl.store(y + token * HIDDEN + column, total.to(y.dtype.element_ty), mask=column < HIDDEN)


def moe_combine_triton(parts: Tensor, y: Tensor) -> None:
    """y [tokens, hidden] = sums of parts [tokens, top_k, hidden] fp32 over top_k."""
    tokens, top_k, hidden = parts.shape
    block = min(512, next_power_of_2(hidden))
    overlap = overlaps_launches(y.device)
    moe_combine_kernel[(tokens, -(-hidden // block))](
        parts, y, HIDDEN=hidden, TOP_K=top_k, PADDED=next_power_of_2(top_k), BLOCK=block,
        OVERLAP=overlap, num_warps=4, **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip
