"""Attention over gathered keys and values in ONNX: one Attention node; one mask for all layers."""

from __future__ import annotations

import torch
from torch import fx

from seekforge.compile.onnx_builder import OnnxBuilder, Value
from seekforge.kernels.moe_experts import moe_experts


def translate_gathered_attention(
    b: OnnxBuilder, node: fx.Node, q: str, k: str, v: str, k_pool: str, v_pool: str,
    block_tables: str, past_lens: str, scale: float,
) -> Value:  # fmt: skip
    heads, head_dim = map(int, node.args[0].meta["val"].shape[-2:])  # type: ignore[union-attr]
    kv_heads = int(node.args[1].meta["val"].shape[-2])  # type: ignore[union-attr]
    v_dim = int(node.args[2].meta["val"].shape[-1])  # type: ignore[union-attr]
    keys: list[str] = []
    values: list[str] = []
    for new, pool, width, parts in (
        (k, k_pool, kv_heads * head_dim, keys),
        (v, v_pool, kv_heads * v_dim, values),
    ):
        # [batch, blocks, block, heads, dim]
        cached = b.op("Gather", pool, tables_after(b, block_tables, q), axis=0)
        parts += [b.reshape(cached, [0, -1, width]), flatten_heads(b, new, width)]
    y = b.op(
        "Attention",
        flatten_heads(b, q, heads * head_dim),
        b.op("Concat", *keys, axis=1),
        b.op("Concat", *values, axis=1),
        attention_mask(b, q, block_tables, k_pool, past_lens),
        scale=scale,
        q_num_heads=heads,
        kv_num_heads=kv_heads,
    )
    return b.reshape(y, [0, 0, heads, v_dim])


def tables_after(b: OnnxBuilder, block_tables: str, q: str) -> str:
    """block_tables, as a value that depends on q (by adding |q[0]| < 0, which is 0).

    For TensorRT where the model has mixtures of experts: it moves what depends on inputs alone
    before the first If, and would gather all layers' caches there and keep them, a second cache
    (19 MB a layer for V2-Lite, 8 sequences of 2048 tokens).
    """
    if b.target == "onnxruntime" or not b.program.nodes(moe_experts):
        return block_tables
    first = b.op("Slice", b.reshape(q, [-1]), b.constant([0]), b.constant([1]), b.constant([0]))
    dtype = next(n for n, name in b.values.items() if name == q).meta["val"].dtype
    none = b.op("Less", b.op("Abs", first), b.constant(0.0, dtype))
    return str(b.op("Add", block_tables, b.cast(none, torch.int64)))


def attention_mask(b: OnnxBuilder, q: str, block_tables: str, pool: str, past_lens: str) -> str:
    """[batch, 1, seq, past + seq]: cached keys below past_lens, and new keys up to the query's own.

    The same for all layers: sizes are read from the first layer's tensors and equal nodes merge.
    """
    if "mask" in b.known:
        return str(b.known["mask"])
    zero, one = b.constant(0), b.constant(1)
    blocks = b.op("Shape", block_tables, start=1, end=2)
    block_size = b.op("Shape", pool, start=1, end=2)
    seq = b.op("Squeeze", b.op("Shape", q, start=1, end=2))
    past = b.op("Squeeze", b.op("Mul", blocks, block_size))
    key = b.op("Range", zero, b.op("Add", past, seq), one)  # [past + seq]
    query = b.reshape(b.op("Range", zero, seq, one), [-1, 1])  # [seq, 1]
    lens = b.reshape(past_lens, [-1, 1, 1, 1])
    new = b.op("Sub", key, past)
    causal = b.op("And", b.op("GreaterOrEqual", new, zero), b.op("LessOrEqual", new, query))
    b.known["mask"] = str(b.op("Or", b.op("Less", key, lens), causal))
    return str(b.known["mask"])


def flatten_heads(b: OnnxBuilder, x: str, width: int) -> str:
    """[batch, seq, heads, head_dim] -> [batch, seq, heads * head_dim]."""
    return b.reshape(x, [0, 0, width])
