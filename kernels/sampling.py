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
by the inverse of their cumulative likelihood. If the tokens before it have the share p already, it
and all behind it are out, and the next draw is among those before it: the token's distribution is
that of the set, renormalised, and the set is never written down. Most rows need one draw; a draw
is a pass over the row, without a barrier.
Random numbers: Philox4x32-10 with key `seeds` and counter (draw, position, 0, 0).
Source: FlashInfer, "Sorting-Free GPU Kernels for LLM Sampling", 2025 (rejection from a pivot);
Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seekforge.kernels.triton_support import jit, next_power_of_2, tl
from seekforge.kernels.tuning import first, overlaps_launches

LANES = 4096  # tokens are cumulated lane by lane: i, i + LANES, i + 2 LANES, ...
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
    order = torch.argsort(token % LANES, stable=True)  # lane by lane
    draw = 0
    while True:
        likelihood = (weights * able)[order].cumsum(0)
        target = philox(seed, position, draw) * int(likelihood[-1]) >> 64
        drawn = int(order[int((likelihood <= target).sum())])
        if bool(kept[drawn]):
            return drawn
        ahead = (logits > logits[drawn]) | ((logits == logits[drawn]) & (token < drawn))
        able = able & ahead
        draw += 1


@jit
def load_tokens(row, start, vocab, banned, LANES: tl.constexpr, BANNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """(ids, logits in fp32) of LANES tokens from start on; -inf where there are none."""
    token = start + tl.arange(0, LANES)
    x = tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    if BANNED:
        x = tl.where(tl.load(banned + token, mask=token < vocab, other=1) != 0, float("-inf"), x)
    return token, x


@jit
def likelihood(x, top, by):  # type: ignore[no-untyped-def]
    """trunc(2^40 exp2((x - top) by)) as int64; exact for x = top whatever `by` is."""
    scaled = tl.where(x == top, 0.0, (x - top) * by)
    return (tl.exp2(scaled) * 1099511627776.0).to(tl.int64)


@jit
def mass_before(  # type: ignore[no-untyped-def]
    row, vocab, banned, top, by, pivot, pivot_token, least,
    LANES: tl.constexpr, BANNED: tl.constexpr,
):  # fmt: skip
    """Sums by lane of the tokens before a pivot: all of them, and those of at least `least`."""
    every = tl.zeros([LANES], tl.int64)
    enough = tl.zeros([LANES], tl.int64)
    for start in range(0, vocab, LANES):
        token, x = load_tokens(row, start, vocab, banned, LANES, BANNED)
        weight = likelihood(x, top, by)
        weight = tl.where((x > pivot) | ((x == pivot) & (token < pivot_token)), weight, 0)
        every += weight
        enough += tl.where(weight >= least, weight, 0)
    return every, enough


@jit
def ordered_bits(x):  # type: ignore[no-untyped-def]
    """fp32 as integers in the same order, 0 being the lowest; -0 is 0."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, ~bits, bits | 0x80000000)


@jit
def find_digit(  # type: ignore[no-untyped-def]
    row, vocab, banned, found, left, LOW: tl.constexpr, BITS: tl.constexpr,
    LANES: tl.constexpr, BANNED: tl.constexpr,
):  # fmt: skip
    """One digit of the left-th largest of the tokens whose bits begin as `found`: (found with it,
    how many of the tokens with these bits are among the first, how many there are)."""
    BINS: tl.constexpr = 1 << BITS
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, vocab, LANES):
        token, x = load_tokens(row, start, vocab, banned, LANES, BANNED)
        key = ordered_bits(x)
        mine = token < vocab
        if LOW + BITS < 32:
            mine = mine & ((key >> (LOW + BITS)) == (found >> (LOW + BITS)))
        digit = ((key >> LOW) & (BINS - 1)).to(tl.int32)
        counts += tl.histogram(digit, BINS, mask=mine)
    at_least = tl.cumsum(counts, axis=0, reverse=True)  # tokens of this digit or a higher one
    bin = tl.arange(0, BINS)
    digit = tl.max(tl.where(at_least >= left, bin, 0), axis=0)
    ties = tl.sum(tl.where(bin == digit, counts, 0), axis=0)
    left -= tl.sum(tl.where(bin > digit, counts, 0), axis=0)
    return found | (digit.to(tl.uint32) << LOW), left, ties


@jit
def find_kth(  # type: ignore[no-untyped-def]
    row, vocab, banned, k, LANES: tl.constexpr, BANNED: tl.constexpr, SHORT: tl.constexpr
):
    """(value, id) just behind the first k tokens: a radix select, 11 bits of the logits a pass.

    SHORT: 16-bit logits, whose other 10 bits are 0 in fp32.
    """
    found, left, ties = find_digit(
        row, vocab, banned, tl.zeros([], tl.uint32), k, 21, 11, LANES, BANNED
    )
    found, left, ties = find_digit(row, vocab, banned, found, left, 10, 11, LANES, BANNED)
    if not SHORT:
        found, left, ties = find_digit(row, vocab, banned, found, left, 0, 10, LANES, BANNED)
    negative = (found >> 31) == 0
    bits = tl.where(negative, ~found, found & 0x7FFFFFFF)
    if SHORT:
        bits = bits & 0xFFFFFC00  # ~found has ones there
    value = bits.to(tl.float32, bitcast=True)
    behind = vocab
    if left < ties:  # of the equal ones the first `left`
        seen = tl.zeros([], tl.int32)
        for start in range(0, vocab, LANES):
            token, x = load_tokens(row, start, vocab, banned, LANES, BANNED)
            tie = (x == value).to(tl.int32)
            upto = seen + tl.cumsum(tie, axis=0)
            last = tl.min(tl.where((tie != 0) & (upto == left), token, vocab), axis=0)
            behind = tl.minimum(behind, last + 1)
            seen += tl.sum(tie, axis=0)
    return value, behind


@jit
def sample_kernel(  # type: ignore[no-untyped-def]
    logits, temperature, top_k, top_p, min_p, seeds, positions, banned, out, vocab, row_stride,
    LANES: tl.constexpr, STEPS: tl.constexpr, SHORT: tl.constexpr, BANNED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    r = tl.program_id(0).to(tl.int64)
    row = logits + r * row_stride
    best = tl.full([LANES], float("-inf"), tl.float32)
    where = tl.zeros([LANES], tl.int32)
    broken = tl.zeros([LANES], tl.int32)
    for start in range(0, vocab, LANES):
        token, x = load_tokens(row, start, vocab, banned, LANES, BANNED)
        where = tl.where(x > best, token, where)
        best = tl.maximum(best, x)
        broken = tl.where(x != x, 1, broken)
    top = tl.max(best, axis=0)
    first = tl.min(tl.where(best == top, where, vocab), axis=0)
    heat = tl.load(temperature + r)
    usable = (tl.max(broken, axis=0) == 0) & (top > float("-inf")) & (top < float("inf"))
    chosen = tl.where(usable, first, -1)
    if usable & (heat > 0.0):
        by = 1.4426950408889634 / heat
        k = tl.load(top_k + r)
        p = tl.load(top_p + r).to(tl.float64)
        least = tl.load(min_p + r) * 1099511627776.0
        least = least.to(tl.int64) + (least.to(tl.int64).to(tl.float32) < least).to(tl.int64)
        pivot = tl.full([], float("-inf"), tl.float32)
        pivot_token = tl.zeros([], tl.int32) + vocab
        if (k > 0) & (k < vocab):
            pivot, pivot_token = find_kth(row, vocab, banned, k, LANES, BANNED, SHORT)
        every, sums = mass_before(
            row, vocab, banned, top, by, pivot, pivot_token, least, LANES, BANNED
        )  # fmt: skip
        share = p * tl.sum(every, axis=0).to(tl.float64)
        seed = tl.load(seeds + r)
        position = tl.load(positions + r)
        draw = tl.zeros([], tl.int64)
        searching = draw == 0
        while searching:
            a, b, _c, _d = tl.randint4x(seed, (position << 32) + draw)
            random = (a.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | b.to(
                tl.uint32, bitcast=True
            ).to(tl.uint64)
            target = tl.umulhi(random, tl.sum(sums, axis=0).to(tl.uint64)).to(tl.int64)
            upto = tl.cumsum(sums, axis=0)
            lane = tl.sum((upto <= target).to(tl.int32), axis=0)
            target -= tl.sum(tl.where(tl.arange(0, LANES) < lane, sums, 0), axis=0)
            token = lane + tl.arange(0, STEPS) * LANES
            x = tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
            if BANNED:
                bad = tl.load(banned + token, mask=token < vocab, other=1) != 0
                x = tl.where(bad, float("-inf"), x)
            weight = likelihood(x, top, by)
            able = (x > pivot) | ((x == pivot) & (token < pivot_token))
            weight = tl.where(able & (weight >= least), weight, 0)
            step = tl.sum((tl.cumsum(weight, axis=0) <= target).to(tl.int32), axis=0)
            chosen = lane + step * LANES
            value = tl.max(tl.where(tl.arange(0, STEPS) == step, x, float("-inf")), axis=0)
            searching = p < 1.0
            if searching:
                sums, _same = mass_before(
                    row, vocab, banned, top, by, value, chosen, 0, LANES, BANNED
                )  # fmt: skip
                mass = tl.sum(sums, axis=0)
                searching = (mass > 0) & (mass.to(tl.float64) >= share)
                pivot = value
                pivot_token = chosen
            draw += 1
    tl.store(out + r, chosen.to(tl.int64))


def sample_triton(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
    seeds: Tensor, positions: Tensor, banned: Tensor | None = None, warps: int | None = None,
) -> Tensor:  # fmt: skip
    """One program a row. Nothing that decides a token depends on the number of rows."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    overlap = overlaps_launches(logits.device)
    row = first("sample", vocab=vocab) or {"warps": 16}
    sample_kernel[(rows,)](
        logits, temperature, top_k, top_p, min_p, seeds, positions,
        logits if banned is None else banned.view(torch.uint8), out, vocab, logits.stride(0),
        LANES=LANES, STEPS=next_power_of_2(-(-vocab // LANES)),
        SHORT=logits.dtype != torch.float32, BANNED=banned is not None,
        OVERLAP=overlap, num_warps=warps or row["warps"],
        **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip
    return out
