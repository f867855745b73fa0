"""Draws the next token of each row on the GPU, without sorting and without waiting for the device.

    logits       [rows, vocab]  float32, bfloat16 or float16
    temperature  [rows] fp32    0: the likeliest token, the lowest id among equals
    top_k        [rows] int32   <= 0: off          top_p, min_p  [rows] fp32   1 and 0: off
    seeds        [rows] int64   of the request     positions  [rows] int64  of the drawn token in it
    banned       [vocab] bool, optional            ids that are never drawn
    token        [rows] int64   -1 where the logits are no distribution (NaN, +inf, all -inf)

The rules are those of runtime/sampling.py: temperature, top_k, top_p, min_p, in this order. Tokens
stand in order of their logits, equal ones in order of their ids; top_k keeps the first k, top_p of
those the shortest beginning whose share is at least p, at least one; min_p those at least min_p
times as likely as the first.

Likelihoods are integers, w = trunc(2^40 exp((x - max) / temperature)): their sums do not depend on
the order of adding, so neither does a token on the batch around its row. Tokens 2^40 times less
likely than the first are never drawn. A draw takes a token of those that may still be in the set,
by the inverse of their cumulative likelihood in the order of ids. If the tokens before it have the
share p already, it and all behind it are out, and the next draw is among those before it: the
token's distribution is that of the set, renormalised, and the set is never written down. Most rows
need one draw, a pass over the row (sampling_draw.py); sampling_top_k.py finds the limit of top_k.
Random numbers: Philox4x32-10 with key `seeds` and counter (draw, position, 0, 0).
Source: FlashInfer, "Sorting-Free GPU Kernels for LLM Sampling", 2025 (rejection from a pivot);
Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seekforge.kernels.sampling_draw import draw_kernel, finish_kernel, mass_kernel
from seekforge.kernels.sampling_greedy import greedy_part_kernel
from seekforge.kernels.sampling_top_k import BINS, digit_kernel, digits
from seekforge.kernels.triton_support import next_power_of_2
from seekforge.kernels.tuning import first, overlaps_launches

ROUNDS = 3  # one row in ten needs a second draw at top_p 0.9, one in hundreds a fourth
ONE = 2.0**40
LOG2_E = 1.4426950408889634


def philox(seed: int, position: int, draw: int) -> int:
    """64 random bits: the first two words of Philox4x32-10."""
    word = 0xFFFFFFFF
    c = [draw & word, position & word, 0, 0]
    k = [seed & word, seed >> 32 & word]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & word, a >> 32 ^ c[3] ^ k[1], a & word]
        k = [k[0] + 0x9E3779B9 & word, k[1] + 0xBB67AE85 & word]
    return c[0] << 32 | c[1]


def kept_tokens(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[Tensor, Tensor]:
    """Of one row [vocab]: integer likelihoods, and which tokens may be drawn, by sorting."""
    wide = logits.float()
    scaled = torch.where(wide == wide.max(), 0.0, (wide - wide.max()) * (LOG2_E / temperature))
    weights = (scaled.exp2() * ONE).long()
    order = torch.argsort(wide, descending=True, stable=True)
    if 0 < top_k < len(wide):
        order = order[:top_k]
    before = weights[order].cumsum(0) - weights[order]
    if top_p < 1:
        share = top_p * float(weights[order].sum())
        order = order[(before.double() < share) | (before == 0)]
    kept = torch.zeros(len(wide), dtype=torch.bool)
    kept[order] = True
    return weights, kept & (weights >= min_p * ONE)


def sample_reference(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
    seeds: Tensor, positions: Tensor, banned: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if banned is not None:
        logits = logits.masked_fill(banned, -torch.inf)
    columns = (temperature, top_k, top_p, min_p, seeds, positions)
    rows = zip(logits.cpu(), *(x.tolist() for x in columns), strict=True)
    return torch.tensor([_draw(*row) for row in rows], device=logits.device)


def _draw(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, seed: int,
    position: int,
) -> int:  # fmt: skip
    if not bool(logits.max().isfinite()):  # NaN too: it is the maximum
        return -1
    if temperature == 0:
        return int((logits == logits.max()).nonzero()[0])
    weights, kept = kept_tokens(logits, temperature, top_k, top_p, min_p)
    _, able = kept_tokens(logits, temperature, top_k, 1.0, min_p)
    token = torch.arange(len(logits))
    draw = 0
    while True:
        likelihood = (weights * able).cumsum(0)
        target = philox(seed, position, draw) * int(likelihood[-1]) >> 64
        drawn = int((likelihood <= target).sum())
        if bool(kept[drawn]):
            return drawn
        ahead = (logits > logits[drawn]) | ((logits == logits[drawn]) & (token < drawn))
        able = able & ahead
        draw += 1


def sample_triton(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor, min_p: Tensor,
    seeds: Tensor, positions: Tensor, banned: Tensor | None = None,
    config: tuple[int, int] | None = None, rounds: int = ROUNDS,
) -> Tensor:  # fmt: skip
    """Of several launches, as many whatever the logits are. What decides a token depends neither on
    the number of rows nor on the configuration.

    top_k None: off for all rows, which saves its launches. config: tokens and Triton's num_warps of
    a program, instead of the row of h200.json (without one 4096 and 8). rounds: draws that have a
    launch each.
    """
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    rows, vocab = logits.shape
    device = logits.device
    out = torch.empty(rows, dtype=torch.int64, device=device)
    if rows == 0:
        return out
    row = first("sample", rows=rows) or {"lanes": 4096, "warps": 8}
    lanes, warps = config or (row["lanes"], row["warps"])
    parts, depth = -(-vocab // lanes), digits(logits.dtype)

    def fresh(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    int32, int64, fp32 = torch.int32, torch.int64, torch.float32
    best = fresh(fp32, rows, parts), fresh(int32, rows, parts)
    found = fresh(int32, rows, depth, BINS), fresh(int32, rows, depth, 2)
    masses, every = fresh(int64, 1 + rounds, rows, parts), fresh(int64, rows, parts)
    ties = fresh(int32, rows, parts)
    pivots = fresh(fp32, 1 + rounds, rows), fresh(int32, 1 + rounds, rows)
    tops, totals = fresh(fp32, rows), fresh(int64, rows)
    overlap = overlaps_launches(device)
    grid, given = (parts, rows), (logits, logits if banned is None else banned.view(torch.uint8))
    size = vocab, logits.stride(0)
    common: dict[str, Any] = {
        "LANES": lanes,
        "BANNED": banned is not None,
        "OVERLAP": overlap,
        "num_warps": warps,
    }
    common |= {"launch_pdl": True} if overlap else {}  # not named where the device lacks it
    of_parts = common | {"PARTS": next_power_of_2(parts)}
    zeros = 0 if top_k is None else depth * BINS
    greedy_part_kernel[grid](*given, *best, found[0], *size, PART=lanes, ZEROS=zeros, **common)
    for i in range(depth if top_k is not None else 0):
        digit_kernel[grid](
            *given, temperature, top_k, *found, *size, INDEX=i, DIGITS=depth, **common
        )
    mass_kernel[grid](
        *given, temperature, temperature if top_k is None else top_k, min_p, *best, *found,
        masses, every, ties, *pivots, tops, out, *size, parts,
        TOP_K=top_k is not None, DIGITS=depth, **of_parts,
    )  # fmt: skip
    for i in range(rounds):
        draw_kernel[grid](
            *given, temperature, top_p, min_p, seeds, positions, masses, every, ties, *pivots,
            tops, totals, out, *size, parts, DRAW=i, **of_parts,
        )  # fmt: skip
    finish_kernel[(rows,)](
        *given, temperature, top_p, seeds, positions, masses, *pivots, tops, totals, out,
        *size, parts, DRAW=rounds, **of_parts,
    )  # fmt: skip
    return out
