"""Launches paged_prefill_hopper.cu: causal prefill attention on Hopper GPUs.

Shapes as in paged_prefill.py. Serves head dim 128, bf16 and fp16, and blocks of
8, 16, 32, 64 or a multiple of 128 tokens; anything else is Triton's.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from seekforge.kernels.hopper import arguments, check, library, stream
from seekforge.kernels.paged_mla_hopper import HALF, LOG2_E, aligned, box_tokens
from seekforge.kernels.tuning import multiprocessors

ROWS, TOKENS = 128, 128


def paged_prefill_hopper(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, block_tables: Tensor, context_lens: Tensor,
    query_start: Tensor, scale: float, y: Tensor, least: int,
) -> bool:  # fmt: skip
    """Fills y's rows of the sequences with at least `least` new tokens, or returns False where this
    kernel does not serve."""
    tokens, heads, dim = q.shape
    block_size, kv_heads = k_pool.shape[1:3]
    box = box_tokens(block_size, TOKENS)
    if (
        dim != 128
        or v_pool.shape[3] != dim
        or box is None
        or q.dtype not in HALF
        or any(x.dtype != q.dtype for x in (k_pool, v_pool, y))
        or not all(aligned(x) for x in (q, k_pool, v_pool, y))
    ):
        return False
    built = library("paged_prefill_hopper", q.device)
    if built is None:
        return False
    sequences, group = block_tables.shape[0], heads // kv_heads
    tiles = tokens * group // ROWS + sequences
    given = arguments(
        q.data_ptr(), y.data_ptr(), block_tables.data_ptr(), context_lens.data_ptr(),
        query_start.data_ptr(),
        q.stride(0), q.stride(1), y.stride(0), y.stride(1), block_tables.stride(0),
        kv_heads, group, sequences, tiles, block_size, box, least,
    )  # fmt: skip
    strides = [arguments(*(2 * s for s in pool.stride()[:3])) for pool in (k_pool, v_pool)]
    status = built.paged_prefill(
        given, ctypes.c_void_p(k_pool.data_ptr()), ctypes.c_void_p(v_pool.data_ptr()),
        ctypes.c_int64(k_pool.shape[0]), *strides, ctypes.c_float(scale * LOG2_E),
        int(q.dtype == torch.float16), multiprocessors(q.device), ctypes.c_void_p(stream()),
    )  # fmt: skip
    check(status, "paged_prefill_hopper")
    return True
