"""Mixtures of experts in ONNX: the routing, and the experts in a form for each backend.

ONNX Runtime: a Loop over the experts that some token chose, each on its own tokens: nothing is read
or computed twice, and it is the fastest for every number of tokens (docs/moe-onnx.md).
TensorRT takes no data-dependent loop well; an If on the number of chosen experts, tokens * top_k:
    few, at most `experts`: multiply and sum with gathered weights. TensorRT fuses the gather into
        the sum: only the chosen experts are read, and nothing is kept but [tokens, top_k, ...].
    many: all experts on all tokens, experts / top_k times the useful work, with weight 0 for those
        not chosen.
Both read the weights as the checkpoint stores them: so the engine keeps one copy.

All sums over experts are fp32. In fp16, where trained activations pass 65504, an expert is computed
in fp32, or each token is scaled to its largest activation before the product and back after.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from seekforge.compile.onnx_builder import OnnxBuilder, Value
from seekforge.kernels.moe_route import EPSILON

FP32 = torch.float32
TINY = 1e-30  # instead of 0 as the scale of a token


def translate_moe_route(
    b: OnnxBuilder, node: fx.Node, logits: str, bias: str | None, top_k: int, scoring: str,
    groups: int, top_groups: int, group_score: str, normalise: bool, scale: float,
) -> Value:  # fmt: skip
    """weights fp32 and indices int64, [..., top_k]"""
    value: Any = node.args[0].meta["val"]  # type: ignore[union-attr]
    wide = logits if value.dtype == FP32 else b.cast(logits, FP32)
    scores = b.op("Softmax", wide, axis=-1) if scoring == "softmax" else b.op("Sigmoid", wide)
    choice = scores if bias is None else b.op("Add", scores, bias)
    if groups > 1:
        lead = [0] * (value.dim() - 1)
        grouped = b.reshape(choice, [*lead, groups, -1])
        best = 1 if group_score == "max" else min(2, int(value.shape[-1]) // groups)
        group = b.op("ReduceSum", _top(b, grouped, best)[0], b.constant([-1]), keepdims=0)
        kept = b.op("Unsqueeze", _top(b, group, top_groups)[1], b.constant([-1]))
        same = b.cast(b.op("Equal", kept, b.constant(list(range(groups)))), FP32)
        # [..., groups, 1]: 1 for the groups kept
        inside = b.op("ReduceMax", same, b.constant([-2]), keepdims=0)
        inside = b.op("Unsqueeze", inside, b.constant([-1]))
        inside = b.op("Greater", inside, b.constant(0.5, FP32))
        masked = b.op("Where", inside, grouped, b.constant(float("-inf"), FP32))
        choice = b.reshape(masked, [*lead, -1])
    indices = _top(b, choice, top_k)[1]
    weights = b.op("GatherElements", scores, indices, axis=-1)
    if normalise:
        total = b.op("ReduceSum", weights, b.constant([-1]), keepdims=1)
        weights = b.op("Div", weights, b.op("Add", total, b.constant(EPSILON, FP32)))
    if scale != 1.0:
        weights = b.op("Mul", weights, b.constant(scale, FP32))
    return [weights, indices]


def _top(b: OnnxBuilder, x: str, count: int) -> list[str]:
    """The largest along the last dimension, and where they are."""
    found: list[str] = b.op("TopK", x, b.constant([count]), outputs=2, axis=-1)
    return found


def translate_moe_experts(
    b: OnnxBuilder, node: fx.Node, x: str, weights: str, indices: str, gate_up: str, down: str
) -> Value:
    value: Any = node.args[0].meta["val"]  # type: ignore[union-attr]
    experts, hidden = map(int, node.args[4].meta["val"].shape[:2])  # type: ignore[union-attr]
    top_k = int(node.args[2].meta["val"].shape[-1])  # type: ignore[union-attr]
    whole = x
    if value.dim() != 2:
        x = b.reshape(x, [-1, hidden])
        weights, indices = b.reshape(weights, [-1, top_k]), b.reshape(indices, [-1, top_k])
    args = (b, x, weights, indices, gate_up, down, value.dtype)
    dims = ("tokens", hidden)
    if b.target == "onnxruntime":
        y = experts_hit(*args, experts)
    else:
        few = b.op("LessOrEqual", b.op("Size", indices), b.constant(experts))
        y = b.op(
            "If",
            few,
            then_branch=b.subgraph(
                "chosen_experts", lambda: [(chosen_experts(*args), value.dtype, dims)]
            ),
            else_branch=b.subgraph(
                "all_experts", lambda: [(all_experts(*args, experts), value.dtype, dims)]
            ),
        )
    return y if value.dim() == 2 else b.reshape(y, [b.size(whole, 0, value.dim() - 1), hidden])


def experts_hit(
    b: OnnxBuilder, x: str, weights: str, indices: str, gate_up: str, down: str,
    dtype: torch.dtype, experts: int,
) -> str:  # fmt: skip
    """A Loop over the experts that some token chose; fp32 inside."""
    # Their numbers, without Unique: on a GPU it would run on the CPU, with a copy for each layer.
    # Where an expert is chosen twice, the same 1 is written twice.
    flat = b.reshape(indices, [-1])
    ones = b.op("Expand", b.constant(1), b.size(flat, 0))
    marked = b.op("ScatterElements", b.constant([0] * experts), flat, ones, axis=0)  # [experts]
    hit = b.reshape(b.op("NonZero", marked), [-1])
    count = b.op("Squeeze", b.size(hit, 0))
    x = cast(b, x, dtype, FP32)
    start = b.op("Expand", b.constant(0.0, FP32), b.size(x, 0, 2))
    step, alive, total = (b.unique(name) for name in ("step", "alive", "total"))
    dims = ("tokens", "hidden")

    def body() -> list[Any]:
        expert = b.op("Gather", hit, step, axis=0)
        at = b.op("NonZero", b.op("Equal", indices, expert))  # [2, n]: token, slot
        rows = b.op("Gather", at, b.constant(0), axis=0)
        pairs = b.op("Transpose", at, perm=[1, 0])
        weight = b.op("Unsqueeze", b.op("GatherND", weights, pairs), b.constant([1]))
        parts = [
            cast(b, b.op("Gather", stack, expert, axis=0), dtype, FP32) for stack in (gate_up, down)
        ]
        inner = swiglu(b, b.op("Gemm", b.op("Gather", x, rows, axis=0), parts[0], transB=1), 1)
        y = b.op("Mul", b.op("Gemm", inner, parts[1], transB=1), weight)
        at_rows = b.op("Unsqueeze", rows, b.constant([1]))
        added = b.op("ScatterND", total, at_rows, y, reduction="add")
        return [(b.op("Identity", alive), torch.bool, ()), (added, FP32, dims)]

    loop = b.subgraph(
        "expert", body,
        [(step, torch.int64, ()), (alive, torch.bool, ()), (total, FP32, dims)],
    )  # fmt: skip
    return cast(b, b.op("Loop", count, "", start, body=loop), FP32, dtype)


def chosen_experts(
    b: OnnxBuilder, x: str, weights: str, indices: str, gate_up: str, down: str, dtype: torch.dtype
) -> str:
    """Sums of products with gathered weights, fp32: TensorRT reads the chosen experts in place."""
    rows = b.op("Unsqueeze", cast(b, x, dtype, FP32), b.constant([1, 2]))  # [tokens, 1, 1, hidden]
    wide = cast(b, b.op("Gather", gate_up, indices, axis=0), dtype, FP32)
    h = b.op("ReduceSum", b.op("Mul", wide, rows), b.constant([3]), keepdims=0)
    inner = b.op("Mul", swiglu(b, h, 2), b.op("Unsqueeze", weights, b.constant([2])))
    inner = b.op("Unsqueeze", inner, b.constant([2]))  # [tokens, top_k, 1, intermediate]
    wide = cast(b, b.op("Gather", down, indices, axis=0), dtype, FP32)
    y = b.op("ReduceSum", b.op("Mul", wide, inner), b.constant([1, 3]), keepdims=0)
    return cast(b, y, FP32, dtype)


def all_experts(
    b: OnnxBuilder, x: str, weights: str, indices: str, gate_up: str, down: str,
    dtype: torch.dtype, experts: int,
) -> str:  # fmt: skip
    """All experts on all tokens; weights on the left, as the checkpoint stores them."""
    zeros = b.op("Expand", b.constant([[0.0]], FP32), b.shape([b.size(x, 0), experts]))
    spread = b.op("ScatterElements", zeros, indices, weights, axis=1)  # [tokens, experts]
    spread = b.op("Unsqueeze", b.op("Transpose", spread, perm=[1, 0]), b.constant([1]))
    columns = b.op("Unsqueeze", b.op("Transpose", x, perm=[1, 0]), b.constant([0]))
    h = b.op("MatMul", gate_up, columns)  # [experts, 2 * intermediate, tokens]
    inner = b.op("Mul", swiglu(b, h, 1, dtype), spread)
    scale = None
    if dtype == torch.float16:
        scale = b.op("ReduceMax", b.op("Abs", inner), b.constant([0, 1]), keepdims=1)
        scale = b.op("Max", scale, b.constant(TINY, FP32))  # [1, 1, tokens]
        inner = b.op("Div", inner, scale)
    y = cast(b, b.op("MatMul", down, cast(b, inner, FP32, dtype)), dtype, FP32)
    y = b.op("ReduceSum", y, b.constant([0]), keepdims=0)  # [hidden, tokens]
    if scale is not None:
        y = b.op("Mul", y, b.reshape(scale, [1, -1]))
    return str(b.op("Transpose", cast(b, y, FP32, dtype), perm=[1, 0]))


def swiglu(b: OnnxBuilder, gate_up: str, axis: int, dtype: torch.dtype = FP32) -> str:
    """In fp32. Split before the cast: TensorRT then keeps gate_up in its dtype (101 MB instead of
    163 MB of workspace for 64 experts of 352 and 512 tokens)."""
    halves = b.op("Split", gate_up, outputs=2, axis=axis, num_outputs=2)
    gate, up = (cast(b, half, dtype, FP32) for half in halves)
    return str(b.op("Mul", b.op("Mul", gate, b.op("Sigmoid", gate)), up))


def cast(b: OnnxBuilder, x: str, given: torch.dtype, wanted: torch.dtype) -> str:
    return x if given == wanted else b.cast(x, wanted)
