"""Greedy choice of the next token of each row, a row shared among programs.

    logits  [rows, vocab]  float32, bfloat16 or float16
    banned  [vocab] bool, optional: ids that are never chosen
    token   [rows] int64   the id of the largest logit, the lowest among equals; -1 where the
                           largest is NaN (one is enough), +inf or -inf

Two launches: the best of each part of a row, then the best of the parts; the second starts early.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seekforge.kernels.triton_support import jit, next_power_of_2, tl
from seekforge.kernels.tuning import first, multiprocessors, overlaps_launches


def greedy_reference(logits: Tensor, banned: Tensor | None = None) -> Tensor:
    if banned is not None:
        logits = logits.masked_fill(banned, -torch.inf)
    best, token = logits.max(dim=1)  # max is NaN if any value is
    return torch.where(best.isfinite(), token, -1)


@jit
def load_tokens(row, start, vocab, banned, LANES: tl.constexpr, BANNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """(ids, logits in fp32) of LANES tokens from start on; -inf where there are none."""
    token = start + tl.arange(0, LANES)
    x = tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    if BANNED:
        x = tl.where(tl.load(banned + token, mask=token < vocab, other=1) != 0, float("-inf"), x)
    return token, x


@jit
def greedy_part_kernel(  # type: ignore[no-untyped-def]
    logits, banned, values, tokens, zeroed, vocab, row_stride, PART: tl.constexpr,
    LANES: tl.constexpr, ZEROS: tl.constexpr, BANNED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (part, row): tokens part * PART to (part + 1) * PART. The first of a row also clears
    ZEROS counters for kernels that follow."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    r = tl.program_id(1).to(tl.int64)
    row = logits + r * row_stride
    if ZEROS > 0 and tl.program_id(0) == 0:
        tl.store(zeroed + r * ZEROS + tl.arange(0, ZEROS), tl.zeros([ZEROS], tl.int32))
    begin = tl.program_id(0) * PART
    best = tl.full([LANES], float("-inf"), tl.float32)
    where = tl.zeros([LANES], tl.int32)
    broken = tl.zeros([LANES], tl.int32)
    for start in range(begin, begin + PART, LANES):
        token, x = load_tokens(row, start, vocab, banned, LANES, BANNED)
        where = tl.where(x > best, token, where)
        best = tl.maximum(best, x)
        broken = tl.where(x != x, 1, broken)
    top = tl.max(best, axis=0)
    chosen = tl.min(tl.where(best == top, where, vocab), axis=0)
    top = tl.where(tl.max(broken, axis=0) != 0, float("nan"), top)
    at = r * tl.num_programs(0) + tl.program_id(0)
    tl.store(values + at, top)
    tl.store(tokens + at, chosen)


@jit
def best_of_parts(values, tokens, parts, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(largest logit, its token) of a row's parts; (NaN, -1) where they are no distribution."""
    part = tl.arange(0, PARTS)
    value = tl.load(values + part, mask=part < parts, other=float("-inf"))
    token = tl.load(tokens + part, mask=part < parts, other=0)
    broken = tl.max((value != value).to(tl.int32), axis=0) != 0
    top = tl.max(tl.where(value != value, float("-inf"), value), axis=0)
    chosen = tl.min(tl.where(value == top, token, 2147483647), axis=0)
    usable = (top > float("-inf")) & (top < float("inf")) & (broken == 0)
    return tl.where(usable, top, float("nan")), tl.where(usable, chosen, -1)


@jit
def greedy_merge_kernel(  # type: ignore[no-untyped-def]
    values, tokens, out, parts, PARTS: tl.constexpr, OVERLAP: tl.constexpr
):
    r = tl.program_id(0).to(tl.int64)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    _top, chosen = best_of_parts(values + r * parts, tokens + r * parts, parts, PARTS)
    tl.store(out + r, chosen.to(tl.int64))


def greedy_parts(rows: int, vocab: int, lanes: int, waves: float, processors: int) -> int:
    """Loads of `lanes` tokens for each program, so that `waves` programs share a processor."""
    loads = -(-vocab // lanes)
    return max(1, loads // max(1, int(waves * processors / rows)))


def greedy_triton(
    logits: Tensor, banned: Tensor | None = None, config: tuple[int, float, int] | None = None
) -> Tensor:
    """config: (lanes, waves, warps) instead of the row of h200.json; without one (4096, 2, 8)."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    row = first("greedy", rows=rows) or {"lanes": 4096, "waves": 2.0, "warps": 8}
    lanes, waves, warps = config or (row["lanes"], row["waves"], row["warps"])
    part = lanes * greedy_parts(rows, vocab, lanes, waves, multiprocessors(logits.device))
    parts = -(-vocab // part)
    values = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    overlap = overlaps_launches(logits.device)
    early = {"launch_pdl": True} if overlap else {}
    greedy_part_kernel[(parts, rows)](
        logits, logits if banned is None else banned.view(torch.uint8), values, tokens, tokens,
        vocab, logits.stride(0), PART=part, LANES=lanes, ZEROS=0, BANNED=banned is not None,
        OVERLAP=overlap, num_warps=warps, **early,
    )  # fmt: skip
    greedy_merge_kernel[(rows,)](
        values, tokens, out, parts, PARTS=next_power_of_2(parts), OVERLAP=overlap, num_warps=1,
        **early,
    )  # fmt: skip
    return out
