"""How much memory a step of a ragged graph takes for its intermediate values, without running it.

In: a program, its inputs, the step's sizes. Out: bytes. The graph is run on tensors without data: a
value lives from the call that makes it to the last that reads it, a view with what it looks at.
What an operator takes for itself beside its results is in `OWN`, where it is much. Checked on an
H200 against what a dry run takes (docs/gpu.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode

from seekforge.kernels.int4_gemm_plan import plan
from seekforge.kernels.int4_linear import int4_linear
from seekforge.kernels.int4_moe_experts import int4_moe_experts
from seekforge.kernels.moe_experts import moe_experts
from seekforge.kernels.shared_experts import int4_moe_shared_experts, moe_shared_experts
from seekforge.passes.kv_cache import GraphInput
from seekforge.passes.program import Program
from seekforge.runtime.manifest import Limits


def step_bytes(program: Program, inputs: Sequence[GraphInput], limits: Limits) -> dict[str, int]:
    """Bytes of the two largest steps: {"chunk": a prefill of max_chunk tokens whose last max_batch
    rows have logits, "decode": one token of each of max_batch sequences}."""
    chunk, batch = min(limits.max_chunk, limits.max_len), limits.max_batch
    return {
        "chunk": peak_bytes(program, inputs, _sizes(chunk, 1, min(batch, chunk))),
        "decode": peak_bytes(program, inputs, _sizes(batch, batch, batch)),
    }


def peak_bytes(program: Program, inputs: Sequence[GraphInput], sizes: Mapping[str, int]) -> int:
    """The most that lives at any call. sizes: of the dynamic dimensions, by name."""
    last: dict[fx.Node, int] = {}
    nodes = list(program.graph.nodes)
    for at, node in enumerate(nodes):
        for source in node.all_input_nodes:
            last[source] = at
    values: dict[fx.Node, Any] = {}
    owners: dict[int, int] = {}  # a storage's bytes
    ends: dict[int, int] = {}  # the last call that reads it
    live = peak = 0
    with FakeTensorMode(allow_non_fake_inputs=True), enable_python_dispatcher():
        given = {}
        for entry in inputs:
            shape = [d if isinstance(d, int) else sizes[d] for d in entry.dims]
            given[entry.name] = torch.empty(shape, dtype=entry.dtype)
        outside = {_storage(tensor) for tensor in given.values()}
        for at, node in enumerate(nodes):
            if node.op == "placeholder":
                values[node] = given[str(node.target)]
            elif node.op == "get_attr":
                values[node] = torch.empty_like(program.tensor(str(node.target)), device="cpu")
                outside.add(_storage(values[node]))
            elif node.op == "call_function":
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
                for tensor in _tensors(values[node]):
                    key = _storage(tensor)
                    if key not in outside and key not in owners:
                        owners[key] = tensor.untyped_storage().nbytes()
                        live += owners[key]
                    ends[key] = max(ends.get(key, at), last.get(node, at))
                own = OWN.get(node.target)
                peak = max(peak, live + (own(*args) if own else 0))
            for key in [key for key, end in ends.items() if end <= at]:
                live -= owners.get(key, 0)
                del ends[key]
    return peak


def _experts(x: Tensor, weights: Tensor, indices: Tensor, gate_up: Tensor, *rest: Any) -> int:
    """The chosen experts' inner values, and their results before they are summed."""
    inner = gate_up.shape[1] // 2
    return indices.numel() * (inner + x.shape[-1]) * x.dtype.itemsize


def _shared_experts(x: Tensor, weights: Tensor, indices: Tensor, *rest: Any) -> int:
    """The larger of what the two parts take, which run one after the other: the shared experts'
    gate_up and its activation, or these and the chosen experts' own."""
    shared = rest[2] if len(rest) == 4 else rest[7]
    inner = shared.shape[0] // 2 * (x.numel() // x.shape[-1]) * x.dtype.itemsize
    return int(max(3 * inner, inner + _experts(x, weights, indices, rest[0]) + x.nbytes))


def _int4_linear(x: Tensor, qweight: Tensor, *rest: Any) -> int:
    """The weight decoded whole, where so many rows are multiplied by it that way."""
    out_features, in_features = qweight.shape[0], x.shape[-1]
    if plan(x.numel() // in_features, out_features, in_features) is not None:
        return 0
    return out_features * in_features * x.dtype.itemsize


OWN: dict[Any, Callable[..., int]] = {
    int4_linear: _int4_linear,
    moe_experts: _experts,
    int4_moe_experts: _experts,
    moe_shared_experts: _shared_experts,
    int4_moe_shared_experts: _shared_experts,
}


def _sizes(tokens: int, sequences: int, rows: int) -> dict[str, int]:
    return {
        "tokens": tokens, "sequences": sequences, "sequences_plus_1": sequences + 1, "rows": rows,
        "max_blocks": 8, "blocks": 8, "block_size": 16,
    }  # fmt: skip


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
