"""The k-th largest logit of each row, exactly, by a radix select: 8 bits of the logits a launch.

A launch counts, for each value of the next digit, the tokens that have all digits found so far.
Programs share a row and add to its counters; integer sums do not depend on their order.

    counts  [rows, digits, 256] int32, zero before the first launch
    found   [rows, digits, 2]   int32: digit i has the bits found before it, and how many tokens
                                that begin with them are among the first k
"""

from __future__ import annotations

import torch

from seekforge.kernels.sampling_greedy import load_tokens
from seekforge.kernels.triton_support import jit, tl

BINS = 256


def digits(dtype: torch.dtype) -> int:
    """bfloat16 has zeros in the other 16 bits of fp32. A power of 2."""
    return 2 if dtype == torch.bfloat16 else 4


@jit
def ordered_bits(x):  # type: ignore[no-untyped-def]
    """fp32 as integers in the same order, 0 being the lowest; -0 is 0."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, ~bits, bits | 0x80000000)


@jit
def next_digit(counts, found, r, k, INDEX: tl.constexpr, DIGITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(bits of the k-th largest found by the first INDEX digits, how many tokens with them are
    among the first k)."""
    bits = tl.zeros([], tl.uint32)
    left = k
    if INDEX > 0:
        if INDEX > 1:
            at = (r * DIGITS + INDEX - 1) * 2
            bits = tl.load(found + at).to(tl.uint32, bitcast=True)
            left = tl.load(found + at + 1)
        bin = tl.arange(0, 256)
        count = tl.load(counts + (r * DIGITS + INDEX - 1) * 256 + bin)
        at_least = tl.sum(count, axis=0) - tl.cumsum(count, axis=0) + count  # of bin or a higher
        digit = tl.max(tl.where(at_least >= left, bin, 0), axis=0)
        left -= tl.sum(tl.where(bin > digit, count, 0), axis=0)
        bits = bits | (digit.to(tl.uint32) << (32 - 8 * INDEX))
    return bits, left


@jit
def kth_logit(counts, found, r, k, DIGITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(k-th largest logit, how many tokens that have it are among the first k)."""
    bits, left = next_digit(counts, found, r, k, DIGITS, DIGITS)
    positive = (bits >> 31) != 0
    low = (1 << (32 - 8 * DIGITS)) - 1  # bits not looked at: zeros in the logit
    bits = tl.where(positive, bits & 0x7FFFFFFF, ~(bits | low))
    return bits.to(tl.float32, bitcast=True), left


@jit
def digit_kernel(  # type: ignore[no-untyped-def]
    logits, banned, temperature, top_k, counts, found, vocab, row_stride,
    INDEX: tl.constexpr, DIGITS: tl.constexpr, LANES: tl.constexpr, BANNED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (part, row): counts the digit INDEX of LANES tokens."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    r = tl.program_id(1).to(tl.int64)
    k = tl.load(top_k + r)
    if (k > 0) & (k < vocab) & (tl.load(temperature + r) > 0.0):
        row = logits + r * row_stride
        token, x = load_tokens(row, tl.program_id(0) * LANES, vocab, banned, LANES, BANNED)
        bits, left = next_digit(counts, found, r, k, INDEX, DIGITS)
        if tl.program_id(0) == 0:
            at = (r * DIGITS + INDEX) * 2
            tl.store(found + at, bits.to(tl.int32, bitcast=True))
            tl.store(found + at + 1, left)
        key = ordered_bits(x)
        mine = token < vocab
        if INDEX > 0:
            mine = mine & ((key >> (32 - 8 * INDEX)) == (bits >> (32 - 8 * INDEX)))
        if tl.max(mine.to(tl.int32), axis=0) != 0:
            digit = ((key >> (24 - 8 * INDEX)) & 255).to(tl.int32)
            count = tl.histogram(digit, 256, mask=mine)
            target = counts + (r * DIGITS + INDEX) * 256 + tl.arange(0, 256)
            tl.atomic_add(target, count, mask=count > 0, sem="relaxed")
