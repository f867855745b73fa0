"""Merges the parts of an attention whose context was split among programs (flash-decoding).

    parts  [rows, splits, dim] fp32   attention over one part of the context
    logs   [rows, splits] fp32        log2 of that part's sum of exponentials; -inf: an empty part
    y      [rows, dim]                y = sum_i 2^(logs_i - L) parts_i,  2^L = sum_i 2^logs_i

One program merges one row, or some columns of it where it has more parts than registers hold. On
Hopper and later the launch overlaps with the end of the kernel that wrote the parts (programmatic
dependent launch), which saves about a microsecond.
Source: Dao et al., "Flash-Decoding for long-context inference", 2023.
"""

from __future__ import annotations

from torch import Tensor

from seekforge.kernels.triton_support import jit, next_power_of_2, tl
from seekforge.kernels.tuning import overlaps_launches

VALUES = 16384  # of the parts in one program: 128 for each thread


@jit
def split_merge_kernel(  # type: ignore[no-untyped-def]
    parts, logs, y, rows_of, splits, y_token, y_head, HEADS: tl.constexpr, DIM: tl.constexpr,
    COLUMNS: tl.constexpr, SPLITS: tl.constexpr, BY_ROW: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = row // HEADS
    if not BY_ROW:  # entry `token` is a sequence, merged where it has one row
        entry = token
        token = tl.load(rows_of + entry)
        if tl.load(rows_of + entry + 1) != token + 1:
            return
    split = tl.arange(0, SPLITS)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    log = tl.load(logs + row * splits + split, mask=split < splits, other=float("-inf"))
    part = tl.load(  # not masked by `log`: the two loads should be under way together
        parts + (row * splits + split)[:, None] * DIM + d[None, :],
        mask=(split < splits)[:, None] & (d < DIM)[None, :], other=0.0,
    )  # fmt: skip
    weight = tl.exp2(log - tl.maximum(tl.max(log, axis=0), -1e30))
    part = tl.where((weight > 0)[:, None], part, 0.0)  # an empty part was not written
    merged = tl.sum(part * weight[:, None], axis=0) / tl.maximum(tl.sum(weight, axis=0), 1e-30)
    y_at = y + token * y_token + row % HEADS * y_head
    tl.store(y_at + d, merged.to(y.dtype.element_ty), mask=d < DIM)


def split_merge_triton(
    parts: Tensor, logs: Tensor, y: Tensor, query_start: Tensor, by_row: bool
) -> None:
    """parts [entries, heads, splits, dim], logs alike, y [tokens, heads, dim].

    An entry is a row of y, or where not `by_row` a sequence, merged where it has exactly one row.
    """
    entries, heads, splits, dim = parts.shape
    overlap = overlaps_launches(y.device)
    pieces = next_power_of_2(splits)
    columns = min(next_power_of_2(dim), max(16, VALUES // pieces))
    split_merge_kernel[(entries * heads, -(-dim // columns))](
        parts, logs, y, query_start, splits, y.stride(0), y.stride(1), HEADS=heads, DIM=dim,
        COLUMNS=columns, SPLITS=pieces, BY_ROW=by_row, OVERLAP=overlap, num_warps=4,
        **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip
