"""How much memory a padded step takes for its largest temporary tensors, known before it is built.

In: a padded program, the limits, the backend. Out: bytes, from the shapes of its experts and its
latent attentions, the two that grow with more than the tokens of a step. One layer counts: layers
run one after the other. Checked against TensorRT-RTX's own figures (docs/moe-onnx.md): within
10 % for one layer; whole models took up to 1.5 times as much.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from seekforge.kernels.errors import InputError
from seekforge.kernels.gathered_mla_attention import gathered_mla_attention
from seekforge.kernels.int4_moe_experts import int4_moe_experts
from seekforge.kernels.moe_experts import moe_experts
from seekforge.passes.program import Program
from seekforge.runtime.manifest import Limits

MAX_WORKSPACE = 8 << 30
FLOOR = 8 << 20  # TensorRT's own scratch for its matrix products


@dataclass(frozen=True, slots=True)
class Workspace:
    """bytes of the largest step, and which layer takes them, in words."""

    bytes: int
    what: str


def padded_workspace(program: Program, limits: Limits, target: str) -> Workspace:
    """The largest need of all layers in a prefill of max_chunk tokens of one sequence, and in a
    generation step of max_batch sequences, behind max_len cached tokens."""
    steps = [(1, min(limits.max_chunk, limits.max_len)), (limits.max_batch, 1)]
    found = [Workspace(FLOOR, "no mixture of experts and no latent attention")]
    for node in program.nodes(moe_experts)[:1]:
        experts = max((_experts(node, batch * seq, target) for batch, seq in steps), key=_bytes)
        found.append(experts)
    for node in program.nodes(int4_moe_experts)[:1]:
        steps4 = (_int4_experts(node, batch * seq, target) for batch, seq in steps)
        found.append(max(steps4, key=_bytes))
    for node in program.nodes(gathered_mla_attention)[:1]:
        context = limits.max_len
        found += [_attention(node, *step, context + step[1], target) for step in steps]
    return max(found, key=_bytes)


def check_workspace(
    program: Program, limits: Limits, target: str, limit: int = MAX_WORKSPACE
) -> Workspace:
    """`padded_workspace`; raises InputError beyond `limit` bytes, with limits that would fit."""
    need = padded_workspace(program, limits, target)
    if need.bytes <= limit:
        return need
    ways = []
    for name in ("max_chunk", "max_batch", "max_len"):
        value = getattr(limits, name)
        while value > 1:
            value //= 2
            smaller = replace(limits, **{name: value})
            if padded_workspace(program, smaller, target).bytes <= limit:
                ways.append(f"lower --{name.replace('_', '-')} to {value}")
                break
    raise InputError(
        f"{target}: a step of this model needs about {need.bytes / 2**30:.1f} GiB for temporary "
        f"tensors of one layer ({need.what}); at most {limit / 2**30:.1f} GiB is allowed: "
        + (" or ".join(ways) or "lower --max-chunk, --max-batch and --max-len")
    )


def _experts(node: fx.Node, tokens: int, target: str) -> Workspace:
    dtype, (experts, hidden, inter) = _dtype(node), _shape(node, 4)
    top_k, size = _shape(node, 2)[-1], dtype.itemsize
    if target == "onnxruntime":
        # One expert's weights as gathered and in fp32, its rows (all tokens at worst), the sum.
        weights = 3 * inter * hidden * (4 if dtype == torch.float32 else 4 + size)
        need = weights + 4 * tokens * (5 * inter + 4 * hidden)
        return Workspace(need, f"{tokens} tokens x one expert of {inter}")
    # [experts, 2 inter, tokens], then the product, fp32 in fp16's scaled form; or the outputs.
    inner = 2 * inter * size + inter * (4 if dtype == torch.float16 else size)
    every = experts * tokens * max(inner, (inter + hidden) * size)
    chosen = 4 * tokens * top_k * 2 * inter
    what = f"{experts} experts x {tokens} tokens x intermediate {inter} and hidden {hidden}"
    return Workspace(FLOOR + max(every, chosen), what)


def _int4_experts(node: fx.Node, tokens: int, target: str) -> Workspace:
    dtype, (experts, hidden, packed) = _dtype(node), _shape(node, 6)
    top_k, size, inter = _shape(node, 2)[-1], dtype.itemsize, 2 * packed
    if target == "onnxruntime":  # the rows of all chosen experts, in fp32
        need = 4 * tokens * (top_k * (5 * inter + 3 * hidden) + 2 * hidden)
        return Workspace(need, f"{tokens} tokens x {top_k} experts of {inter}")
    if tokens * top_k <= experts:
        return Workspace(FLOOR, f"{tokens} tokens x {top_k} chosen experts, read as INT4")
    # As for other experts, and `down` decoded; the term of the zero points is like gate_up.
    inner = 2 * inter * size * (1 if node.args[5] is None else 2)
    inner += inter * (4 if dtype == torch.float16 else size)
    every = experts * tokens * max(inner, (inter + hidden) * size)
    what = f"{experts} experts x {tokens} tokens x intermediate {inter} and hidden {hidden}"
    return Workspace(FLOOR + every + experts * hidden * inter * size, what)


def _attention(node: fx.Node, batch: int, seq: int, context: int, target: str) -> Workspace:
    size, heads = _dtype(node).itemsize, _shape(node, 0)[-2]
    width = _shape(node, 4)[-1]  # rank + rope
    what = f"{batch * seq} queries x {heads} heads x {context} tokens of latent context"
    scores = batch * seq * heads * context
    latents = 2 * batch * context * width * size
    if target == "onnxruntime":
        per_head = _shape(node, 7)[0]  # heads * (nope + v)
        keys = batch * context * (2 * per_head + heads * (width - _shape(node, 2)[-1])) * size
        return Workspace(12 * scores + latents + (keys if seq > 1 else 0), what)
    return Workspace(FLOOR + 2 * scores * size + latents, what)


def _bytes(workspace: Workspace) -> int:
    return workspace.bytes


def _dtype(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _shape(node: fx.Node, argument: int) -> list[Any]:
    """Sizes of an argument's value; the static ones are numbers."""
    source = node.args[argument]
    assert isinstance(source, fx.Node)
    return [
        size if isinstance(size, torch.SymInt) else int(size) for size in source.meta["val"].shape
    ]
