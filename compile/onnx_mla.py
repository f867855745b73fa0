"""Multi-head latent attention over a gathered cache in ONNX, in one or two forms.

Absorbed: W_UK goes into the query and W_UV behind the sum, so that all heads read the latents
[batch, context, rank + rope] themselves, as if there were one key of that width. Heads become rows
of one product: (seq * heads) queries against one set of keys. Written out as MatMul, Softmax,
MatMul: as an Attention node with one key head ONNX Runtime takes 1.7-2 times as long, and TensorRT
repeats the keys for each head (915 MB instead of 45 MB of workspace, V2-Lite, batch 8).
Decompressed: keys and values of the whole context are made for each head, one Attention node.

For ONNX Runtime the number of new tokens decides (If). For TensorRT the absorbed form serves both
profiles: it refuses an Attention inside an If, and decompressing a context for one token costs 16
times the work. docs/moe-onnx.md has the figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from seekforge.compile.onnx_attention import attention_mask, flatten_heads, tables_after
from seekforge.compile.onnx_builder import OnnxBuilder, Value

LOWEST = float(torch.finfo(torch.float32).min)


@dataclass(frozen=True, slots=True)
class Latent:
    """The values and sizes of one attention: names of ONNX values, and static sizes.

    context: [batch, past + seq, rank + rope], with zeros where nothing is cached.
    mask: [batch, 1, seq, past + seq].
    """

    q_nope: str
    q_rope: str
    context: str
    mask: str
    kv_b: str
    scale: float
    heads: int
    nope: int
    rope: int
    rank: int
    v_dim: int
    dtype: torch.dtype

    @property
    def crossover(self) -> int:
        """New tokens up to which the absorbed form multiplies less than the decompressed one.

        For each token of the context and head: seq * (2 rank + rope) against
        rank * (nope + v) + seq * (nope + rope + v). 170 for V2 and V3; measured: about 140.
        """
        more = 2 * self.rank - self.nope - self.v_dim  # absorbed, for each query
        return self.rank * (self.nope + self.v_dim) // more if more > 0 else 2**31


def translate_gathered_mla_attention(
    b: OnnxBuilder, node: fx.Node, q_nope: str, q_rope: str, latent: str, k_rope: str,
    latent_pool: str, block_tables: str, past_lens: str, kv_b: str, scale: float,
) -> Value:  # fmt: skip
    heads, nope = _static(node.args[0], 2)
    (rope,), (rank,) = _static(node.args[1], 1), _static(node.args[2], 1)
    v_dim = _static(node.args[7], 2)[0] // heads - nope
    dtype = node.args[0].meta["val"].dtype  # type: ignore[union-attr]
    cached = b.op("Gather", latent_pool, tables_after(b, block_tables, q_nope), axis=0)
    cached = b.reshape(cached, [0, -1, rank + rope])
    # What lies behind a context may be NaN of an earlier sequence: 0 * NaN is NaN.
    known = _known(b, block_tables, latent_pool, past_lens)
    cached = b.op("Where", known, cached, b.constant(0.0, dtype))
    context = b.op("Concat", cached, b.op("Concat", latent, k_rope, axis=-1), axis=1)
    mask = attention_mask(b, q_nope, block_tables, latent_pool, past_lens)
    a = Latent(
        q_nope, q_rope, context, mask, kv_b, scale, heads, nope, rope, rank, v_dim, dtype
    )  # fmt: skip
    if b.target != "onnxruntime":
        return absorbed(b, a)
    few = b.op("LessOrEqual", b.op("Squeeze", b.size(q_nope, 1)), b.constant(a.crossover))
    dims = ("batch", "seq", heads, v_dim)
    return str(
        b.op(
            "If",
            few,
            then_branch=b.subgraph("absorbed", lambda: [(absorbed(b, a), dtype, dims)]),
            else_branch=b.subgraph("decompressed", lambda: [(decompressed(b, a), dtype, dims)]),
        )
    )


def absorbed(b: OnnxBuilder, a: Latent) -> str:
    """-> [batch, seq, heads, v_dim]"""
    batch, seq = b.size(a.q_nope, 0), b.size(a.q_nope, 1)
    w_uk, w_uv = b.op(
        "Split", b.reshape(a.kv_b, [a.heads, a.nope + a.v_dim, a.rank]),
        b.constant([a.nope, a.v_dim]), outputs=2, axis=1,
    )  # fmt: skip
    q = b.op("MatMul", _heads_first(b, a.q_nope, a.heads, a.nope), w_uk)  # [heads, tokens, rank]
    q = b.reshape(b.op("Transpose", q, perm=[1, 0, 2]), [batch, seq, a.heads, a.rank])
    q = b.reshape(b.op("Concat", q, a.q_rope, axis=-1), [0, -1, a.rank + a.rope])
    q = b.op("Mul", q, b.constant(a.scale, a.dtype))
    scores = b.op("MatMul", q, b.op("Transpose", a.context, perm=[0, 2, 1]))
    scores = b.cast(b.reshape(scores, [0, seq, a.heads, -1]), torch.float32)
    mask = b.op("Transpose", a.mask, perm=[0, 2, 1, 3])  # [batch, seq, 1, past + seq]
    scores = b.op("Where", mask, scores, b.constant(LOWEST, torch.float32))
    weights = b.cast(b.op("Softmax", scores, axis=-1), a.dtype)
    weights = b.reshape(weights, [0, -1, b.size(a.context, 1)])  # [batch, seq * heads, context]
    latents = b.op(
        "Slice", a.context, b.constant([0]), b.constant([a.rank]), b.constant([2])
    )  # [batch, context, rank]
    y = _heads_first(b, b.op("MatMul", weights, latents), a.heads, a.rank)
    y = b.op("MatMul", y, b.op("Transpose", w_uv, perm=[0, 2, 1]))  # [heads, tokens, v_dim]
    return b.reshape(b.op("Transpose", y, perm=[1, 0, 2]), [batch, seq, a.heads, a.v_dim])


def decompressed(b: OnnxBuilder, a: Latent) -> str:
    """-> [batch, seq, heads, v_dim]"""
    latent, k_rope = b.op("Split", a.context, b.constant([a.rank, a.rope]), outputs=2, axis=-1)
    kv = b.op("MatMul", latent, b.op("Transpose", a.kv_b, perm=[1, 0]))
    kv = b.reshape(kv, [0, 0, a.heads, a.nope + a.v_dim])
    k_nope, v = b.op("Split", kv, b.constant([a.nope, a.v_dim]), outputs=2, axis=-1)
    shape = b.shape([b.size(a.context, 0, 2), a.heads, a.rope])
    k_rope = b.op("Expand", b.op("Unsqueeze", k_rope, b.constant([2])), shape)
    width = a.heads * (a.nope + a.rope)
    y = b.op(
        "Attention",
        flatten_heads(b, b.op("Concat", a.q_nope, a.q_rope, axis=-1), width),
        flatten_heads(b, b.op("Concat", k_nope, k_rope, axis=-1), width),
        flatten_heads(b, v, a.heads * a.v_dim),
        a.mask,
        scale=a.scale,
        q_num_heads=a.heads,
        kv_num_heads=a.heads,
    )
    return b.reshape(y, [0, 0, a.heads, a.v_dim])


def _heads_first(b: OnnxBuilder, x: str, heads: int, width: int) -> str:
    """[..., heads, width], or heads as rows -> [heads, tokens, width]"""
    return str(b.op("Transpose", b.reshape(x, [-1, heads, width]), perm=[1, 0, 2]))


def _known(b: OnnxBuilder, block_tables: str, pool: str, past_lens: str) -> str:
    """[batch, past, 1]: which of the gathered tokens are cached. The same for all layers."""
    if "cached" not in b.known:
        past = b.op("Squeeze", b.op("Mul", b.size(block_tables, 1), b.size(pool, 1)))
        token = b.reshape(b.op("Range", b.constant(0), past, b.constant(1)), [1, -1, 1])
        b.known["cached"] = b.op("Less", token, b.reshape(past_lens, [-1, 1, 1]))
    return str(b.known["cached"])


def _static(node: object, dims: int) -> Sequence[int]:
    """The last `dims` sizes of a graph node's value."""
    assert isinstance(node, fx.Node)
    return [int(size) for size in node.meta["val"].shape[-dims:]]
