"""Draws a token of each row by rejection, a row shared among programs of LANES tokens each.

Launches, each of which needs the one before it: `mass_kernel` adds up the likelihoods of each part;
`draw_kernel`, some times, draws a token by the parts' sums and adds up what stands before it, which
the next one judges; `finish_kernel` judges the last draw and, for the rare row that is not done,
goes on alone.

    masses  [1 + rounds, rows, parts] int64   of the tokens that may be drawn in a round
    every   [rows, parts] int64   the same, also those below min_p;  ties [rows, parts] int32:
            tokens as likely as the k-th, which these sums leave out
    pivots  [1 + rounds, rows] fp32 and pivot_tokens, int32: the last draw; in front the k-th
            logit and how many tokens of it top_k keeps
    tops    [rows] fp32   the largest logit, NaN where nothing is drawn;  totals [rows] int64
"""

from __future__ import annotations

from seekforge.kernels.sampling_greedy import best_of_parts, load_tokens
from seekforge.kernels.sampling_top_k import kth_logit
from seekforge.kernels.triton_support import jit, tl


@jit
def likelihood(x, top, by):  # type: ignore[no-untyped-def]
    """trunc(2^40 exp2((x - top) by)) as int64; exact for x = top whatever `by` is."""
    scaled = tl.where(x == top, 0.0, (x - top) * by)
    return (tl.exp2(scaled) * 1099511627776.0).to(tl.int64)


@jit
def least_likelihood(min_p):  # type: ignore[no-untyped-def]
    """The smallest integer that is at least min_p times a likelihood of 2^40."""
    least = min_p * 1099511627776.0
    down = least.to(tl.int64)
    return down + (down.to(tl.float32) < least).to(tl.int64)


@jit
def mass_kernel(  # type: ignore[no-untyped-def]
    logits, banned, temperature, top_k, min_p, values, tokens, counts, found,
    masses, every, ties, pivots, pivot_tokens, tops, out, vocab, row_stride, parts,
    TOP_K: tl.constexpr, DIGITS: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr,
    BANNED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (part, row)."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0)
    r = tl.program_id(1).to(tl.int64)
    row = logits + r * row_stride
    _token, x = load_tokens(row, part * LANES, vocab, banned, LANES, BANNED)
    top, first = best_of_parts(values + r * parts, tokens + r * parts, parts, PARTS)
    heat = tl.load(temperature + r)
    top = tl.where(heat > 0.0, top, float("nan"))
    if part == 0:
        tl.store(out + r, first.to(tl.int64))
        tl.store(tops + r, top)
    if top == top:
        pivot = tl.full([], float("-inf"), tl.float32)
        kept = vocab
        if TOP_K:
            k = tl.load(top_k + r)
            if (k > 0) & (k < vocab):
                pivot, kept = kth_logit(counts, found, r, k, DIGITS)
        weight = tl.where(x > pivot, likelihood(x, top, 1.4426950408889634 / heat), 0)
        least = least_likelihood(tl.load(min_p + r))
        at = r * parts + part
        tl.store(every + at, tl.sum(weight, axis=0))
        tl.store(masses + at, tl.sum(tl.where(weight >= least, weight, 0), axis=0))
        tl.store(ties + at, tl.sum((x == pivot).to(tl.int32), axis=0))
        if part == 0:
            tl.store(pivots + r, pivot)
            tl.store(pivot_tokens + r, kept)


@jit
def draw_token(  # type: ignore[no-untyped-def]
    row, vocab, banned, top, by, pivot, pivot_token, kept, least, sums, seed, position, draw,
    FIRST: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr, BANNED: tl.constexpr,
):  # fmt: skip
    """(token, its logit), by the inverse of the cumulative likelihood in the order of ids.

    sums [PARTS]: of the tokens before the pivot, or, FIRST, of those above it and of so many that
    equal it as `kept` [PARTS] says, and of all these at least `least`.
    """
    a, b, _c, _d = tl.randint4x(seed, (position << 32) + draw)
    random = (a.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | b.to(tl.uint32, bitcast=True).to(
        tl.uint64
    )
    target = tl.umulhi(random, tl.sum(sums, axis=0).to(tl.uint64)).to(tl.int64)
    each = tl.arange(0, PARTS)
    part = tl.sum((tl.cumsum(sums, axis=0) <= target).to(tl.int32), axis=0)
    target -= tl.sum(tl.where(each < part, sums, 0), axis=0)
    token, x = load_tokens(row, part * LANES, vocab, banned, LANES, BANNED)
    weight = likelihood(x, top, by)
    if FIRST:
        tie = (x == pivot).to(tl.int32)
        most = tl.sum(tl.where(each == part, kept, 0), axis=0)
        able = (x > pivot) | ((x == pivot) & (tl.cumsum(tie, axis=0) <= most))
        able = able & (weight >= least)
    else:
        able = (x > pivot) | ((x == pivot) & (token < pivot_token))
    weight = tl.where(able, weight, 0)
    step = tl.sum((tl.cumsum(weight, axis=0) <= target).to(tl.int32), axis=0)
    value = tl.max(tl.where(tl.arange(0, LANES) == step, x, float("-inf")), axis=0)
    return part * LANES + step, value


@jit
def mass_before(token, x, top, by, pivot, pivot_token):  # type: ignore[no-untyped-def]
    """Of some tokens, those before the pivot."""
    before = (x > pivot) | ((x == pivot) & (token < pivot_token))
    return tl.sum(tl.where(before, likelihood(x, top, by), 0), axis=0)


@jit
def draw_kernel(  # type: ignore[no-untyped-def]
    logits, banned, temperature, top_p, min_p, seeds, positions,
    masses, every, ties, pivots, pivot_tokens, tops, totals, out, vocab, row_stride, parts,
    DRAW: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr, BANNED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (part, row). All of a row's draw the same token; each adds up its own part."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0)
    r = tl.program_id(1).to(tl.int64)
    rows = tl.num_programs(1).to(tl.int64)
    row = logits + r * row_stride
    top = tl.load(tops + r)
    if top == top:
        by = 1.4426950408889634 / tl.load(temperature + r)
        p = tl.load(top_p + r)
        pivot = tl.load(pivots + DRAW * rows + r)
        pivot_token = tl.load(pivot_tokens + DRAW * rows + r)
        each = tl.arange(0, PARTS)
        at = r * parts + each
        sums = tl.load(masses + DRAW * rows * parts + at, mask=each < parts, other=0)
        least = tl.zeros([], tl.int64)
        kept = each
        if DRAW == 0:
            least = least_likelihood(tl.load(min_p + r))
            tie = tl.load(ties + at, mask=each < parts, other=0)
            kept = pivot_token - (tl.cumsum(tie, axis=0) - tie)
            kept = tl.minimum(tl.maximum(kept, 0), tie)
            weight = likelihood(pivot, top, by)
            all = tl.load(every + at, mask=each < parts, other=0) + kept * weight
            sums += tl.where(weight >= least, kept * weight, 0)
            searching = (part == 0) | (p < 1.0)
            if part == 0:
                tl.store(totals + r, tl.sum(all, axis=0))
        else:
            mass = tl.sum(sums, axis=0)
            share = p.to(tl.float64) * tl.load(totals + r).to(tl.float64)
            searching = (mass > 0) & (mass.to(tl.float64) >= share)
        before = tl.zeros([], tl.int64)
        if searching:
            own, x = load_tokens(row, part * LANES, vocab, banned, LANES, BANNED)
            token, value = draw_token(
                row, vocab, banned, top, by, pivot, pivot_token, kept, least, sums,
                tl.load(seeds + r), tl.load(positions + r), DRAW, DRAW == 0, PARTS, LANES, BANNED,
            )  # fmt: skip
            if part == 0:
                tl.store(out + r, token.to(tl.int64))
                tl.store(pivots + (DRAW + 1) * rows + r, value)
                tl.store(pivot_tokens + (DRAW + 1) * rows + r, token)
            if p < 1.0:
                before = mass_before(own, x, top, by, value, token)
        tl.store(masses + (DRAW + 1) * rows * parts + r * parts + part, before)


@jit
def finish_kernel(  # type: ignore[no-untyped-def]
    logits, banned, temperature, top_p, seeds, positions,
    masses, pivots, pivot_tokens, tops, totals, out, vocab, row_stride, parts,
    DRAW: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr, BANNED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (row)."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    r = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0).to(tl.int64)
    row = logits + r * row_stride
    top = tl.load(tops + r)
    if top == top:
        each = tl.arange(0, PARTS)
        at = (DRAW * rows + r) * parts + each
        sums = tl.load(masses + at, mask=each < parts, other=0)
        share = tl.load(top_p + r).to(tl.float64) * tl.load(totals + r).to(tl.float64)
        mass = tl.sum(sums, axis=0)
        by = 1.4426950408889634 / tl.load(temperature + r)
        value = tl.load(pivots + DRAW * rows + r)
        token = tl.load(pivot_tokens + DRAW * rows + r)
        draw = tl.zeros([], tl.int64) + DRAW
        while (mass > 0) & (mass.to(tl.float64) >= share):
            token, value = draw_token(
                row, vocab, banned, top, by, value, token, each, mass, sums,
                tl.load(seeds + r), tl.load(positions + r), draw, False, PARTS, LANES, BANNED,
            )  # fmt: skip
            sums = tl.zeros([PARTS], tl.int64)
            for part in range(parts):
                own, x = load_tokens(row, part * LANES, vocab, banned, LANES, BANNED)
                sums = tl.where(each == part, mass_before(own, x, top, by, value, token), sums)
            mass = tl.sum(sums, axis=0)
            draw += 1
            tl.store(out + r, token.to(tl.int64))
