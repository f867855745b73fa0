"""Launches paged_mla_hopper.cu: absorbed MLA attention for many heads on Hopper GPUs.

Shapes as in paged_mla_decode.py. Serves a rank of 512 with 64 rotated dims, heads in multiples of
64, bf16 and fp16, and blocks of 8, 16, 32 or a multiple of 64 tokens; anything else is Triton's.
"""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from seekforge.kernels.hopper import arguments, check, library, stream
from seekforge.kernels.split_merge import split_merge_triton
from seekforge.kernels.tuning import multiprocessors

LOG2_E = 1.4426950408889634
ROWS, TOKENS, RANK, ROPE = 64, 64, 512, 64
HALF = (torch.bfloat16, torch.float16)


def aligned(x: Tensor) -> bool:
    """Whether every row of x starts at a multiple of 16 bytes."""
    step = 16 // x.element_size()
    return x.data_ptr() % 16 == 0 and all(s % step == 0 for s in x.stride()[:-1])


def box_tokens(block_size: int, most: int) -> int | None:
    """Tokens of one bulk copy, of blocks read `most` tokens at a time; None where none fits."""
    box = min(block_size, most)
    return box if box % 8 == 0 and most % box == 0 and block_size % box == 0 else None


def split_count(tiles: int, blocks: int, processors: int) -> int:
    """Parts of each context: the fewest block times, where a part costs 3 to start, a merge 3."""

    def cost(splits: int) -> float:
        waves = math.ceil(tiles * splits / processors)
        return waves * (math.ceil(blocks / splits) + 3) + 3 * (splits > 1)

    return min(range(1, max(1, min(blocks, 64)) + 1), key=cost)


def hopper_parts(
    q_latent: Tensor, q_rope: Tensor, latent_pool: Tensor, block_tables: Tensor,
    context_lens: Tensor, query_start: Tensor, scale: float, y: Tensor,
    splits: int | None = None,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """The parts of y that split_merge.py merges, and their logs; where the context is not split
    they have 0 parts, and y is filled. None where this kernel does not serve."""
    tokens, heads, rank = q_latent.shape
    block_size, width = latent_pool.shape[1:]
    box = box_tokens(block_size, TOKENS)
    if (
        (rank, width) != (RANK, RANK + ROPE)
        or heads % ROWS
        or box is None
        or q_latent.dtype not in HALF
        or any(x.dtype != q_latent.dtype for x in (q_rope, latent_pool, y))
        or not all(aligned(x) for x in (q_latent, q_rope, latent_pool, y))
    ):
        return None
    built = library("paged_mla_hopper", q_latent.device)
    if built is None:
        return None
    if splits is None:
        blocks = -(-block_tables.shape[1] * block_size // TOKENS)
        splits = split_count(tokens * heads // ROWS, blocks, multiprocessors(q_latent.device))
    pieces = splits if splits > 1 else 0
    parts = q_latent.new_empty(tokens, heads, pieces, rank, dtype=torch.float32)
    logs = q_latent.new_empty(tokens, heads, pieces, dtype=torch.float32)
    given = arguments(
        q_latent.data_ptr(), q_rope.data_ptr(), y.data_ptr(), parts.data_ptr(), logs.data_ptr(),
        block_tables.data_ptr(), context_lens.data_ptr(), query_start.data_ptr(),
        q_latent.stride(0), q_latent.stride(1), q_rope.stride(0), q_rope.stride(1),
        y.stride(0), y.stride(1), block_tables.stride(0),
        heads, tokens, block_tables.shape[0], splits, block_size, box,
    )  # fmt: skip
    status = built.paged_mla(
        given, ctypes.c_void_p(latent_pool.data_ptr()), ctypes.c_int64(latent_pool.shape[0]),
        ctypes.c_int64(2 * latent_pool.stride(0)), ctypes.c_int64(2 * latent_pool.stride(1)),
        ctypes.c_float(scale * LOG2_E), int(q_latent.dtype == torch.float16),
        ctypes.c_void_p(stream()),
    )  # fmt: skip
    check(status, "paged_mla_hopper")
    return parts, logs


def paged_mla_hopper(
    q_latent: Tensor, q_rope: Tensor, latent_pool: Tensor, block_tables: Tensor,
    context_lens: Tensor, query_start: Tensor, scale: float, y: Tensor,
    splits: int | None = None,
) -> bool:  # fmt: skip
    """Fills y's rows, or returns False where this kernel does not serve."""
    made = hopper_parts(
        q_latent, q_rope, latent_pool, block_tables, context_lens, query_start, scale, y, splits
    )
    if made is None:
        return False
    parts, logs = made
    if parts.shape[2]:
        split_merge_triton(parts, logs, y, query_start, by_row=True)
    return True
