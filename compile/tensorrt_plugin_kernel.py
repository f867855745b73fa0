"""The paged attention kernels with the argument order of TensorRT's ahead-of-time plugins.

Such a plugin's kernel is called with pointers to the inputs, then 32-bit integers, then pointers to
the outputs. So these put the arguments of kernels/kv_write.py and kernels/paged_decode.py in that
order; tensors are contiguous, so strides follow from sizes, which are constants here. The layouts
are those of kernels/paged_attention.py.
"""

from __future__ import annotations

from seekforge.kernels.kv_write import kv_write_kernel
from seekforge.kernels.paged_decode import paged_decode_kernel
from seekforge.kernels.triton_support import jit, tl


@jit
def plugin_kv_write(  # type: ignore[no-untyped-def]
    k, v, k_pool, v_pool, slot_mapping, k_written, v_written,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, QK_DIM: tl.constexpr, V_DIM: tl.constexpr,
    QK: tl.constexpr, V: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """One program a token. k_written, v_written: the pools themselves, as aliased outputs."""
    kv_write_kernel(
        k, v, k_written, v_written, k_written, v_written, slot_mapping,
        KV_HEADS * QK_DIM, QK_DIM, KV_HEADS * V_DIM, V_DIM, 1,
        BLOCK_SIZE * KV_HEADS * QK_DIM, KV_HEADS * QK_DIM, QK_DIM,
        BLOCK_SIZE * KV_HEADS * V_DIM, KV_HEADS * V_DIM, V_DIM,
        KV_HEADS, BLOCK_SIZE, HEADS, QK_DIM, V_DIM, QK, V, "plain", False,
    )  # fmt: skip


@jit
def plugin_paged_attention(  # type: ignore[no-untyped-def]
    q, k_pool, v_pool, block_tables, context_lens, query_start, sequences, max_blocks, y,
    SCALE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, ROWS: tl.constexpr,
    QK_DIM: tl.constexpr, QK: tl.constexpr, V_DIM: tl.constexpr, V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program for each KV head and token; SCALE is the softmax's times log2(e)."""
    paged_decode_kernel(
        q, k_pool, v_pool, k_pool, v_pool, y, y, y,
        block_tables, context_lens, query_start, SCALE, sequences,
        HEADS * QK_DIM, QK_DIM,
        BLOCK_SIZE * KV_HEADS * QK_DIM, KV_HEADS * QK_DIM, QK_DIM,
        BLOCK_SIZE * KV_HEADS * V_DIM, KV_HEADS * V_DIM, V_DIM,
        max_blocks, HEADS * V_DIM, V_DIM,
        BLOCK_SIZE, HEADS // KV_HEADS, ROWS, QK_DIM, QK, V_DIM, V, BLOCK_N,
        False, True, "plain", False, False, PRECISION,
    )  # fmt: skip
