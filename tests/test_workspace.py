"""The predicted workspace: what TensorRT reported for these sizes, and refusals that help."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx, nn

from seekforge.compile.workspace import check_workspace, padded_workspace
from seekforge.kernels.errors import InputError
from seekforge.kernels.gathered_mla_attention import gathered_mla_attention
from seekforge.kernels.int4_moe_experts import int4_moe_experts
from seekforge.kernels.moe_experts import moe_experts
from seekforge.kernels.moe_route import moe_route
from seekforge.passes.kv_cache import GraphInput, trace_values
from seekforge.passes.program import Program, Weight
from seekforge.runtime.manifest import Limits

LIMITS = Limits(max_len=2048, max_batch=8, max_chunk=512)
GENERATION = Limits(max_len=2048, max_batch=8, max_chunk=1)
SIXTEEN = Limits(max_len=2048, max_batch=16, max_chunk=1)


def made(
    function: Any, inputs: list[GraphInput], weights: dict[str, tuple[int, ...]], dtype: torch.dtype
) -> Program:
    root, graph = nn.Module(), fx.Graph()
    for name, shape in weights.items():
        root.register_buffer(name, torch.empty(shape, dtype=dtype, device="meta"))
    nodes = [graph.placeholder(entry.name) for entry in inputs]
    graph.output((function(graph, *nodes, *map(graph.get_attr, weights)),))
    sources = {name: Weight((name,)) for name in weights}
    program = Program(fx.GraphModule(root, graph), sources, {}, "padded")
    trace_values(program, inputs)
    return program


def experts(
    count: int, top_k: int, inter: int, hidden: int, dtype: torch.dtype = torch.float16
) -> Program:
    def function(graph: fx.Graph, x: Any, gate: Any, *stacks: Any) -> fx.Node:
        logits = graph.call_function(torch.ops.aten.linear.default, (x, gate))
        route = (logits, None, top_k, "softmax", 1, 1, "max", False, 1.0)
        pair = graph.call_function(moe_route, route)
        both = [graph.call_function(operator.getitem, (pair, i)) for i in range(2)]
        return graph.call_function(moe_experts, (x, *both, *stacks))

    shapes = {
        "gate": (count, hidden), "gate_up": (count, 2 * inter, hidden),
        "down": (count, hidden, inter),
    }  # fmt: skip
    return made(function, [GraphInput("x", dtype, ("tokens", hidden))], shapes, dtype)


def int4_experts(
    count: int, top_k: int, inter: int, hidden: int, dtype: torch.dtype, zeros: bool = False
) -> Program:
    sizes = {"gate_up": ((count, 2 * inter, hidden), 64), "down": ((count, hidden, inter), 32)}
    inputs = [
        GraphInput("x", dtype, ("tokens", hidden)),
        GraphInput("w", torch.float32, ("tokens", top_k)),
        GraphInput("indices", torch.int64, ("tokens", top_k)),
    ]  # fmt: skip
    for name, ((*lead, k), size) in sizes.items():
        inputs.append(GraphInput(f"{name}_q", torch.uint8, (*lead, k // 2)))
        inputs.append(GraphInput(f"{name}_scales", dtype, (*lead, k // size)))
        if zeros:
            inputs.append(GraphInput(f"{name}_zeros", torch.uint8, (*lead, k // size)))

    def function(graph: fx.Graph, *nodes: Any) -> fx.Node:
        if not zeros:
            nodes = (*nodes[:5], None, *nodes[5:], None)
        return graph.call_function(int4_moe_experts, (*nodes, 64))

    return made(function, inputs, {}, dtype)


def latent(heads: int, dtype: torch.dtype = torch.float16) -> Program:
    nope, rope, v, rank = 128, 64, 128, 512
    shapes: dict[str, tuple[int | str, ...]] = {
        "q_nope": ("batch", "seq", heads, nope), "q_rope": ("batch", "seq", heads, rope),
        "latent": ("batch", "seq", rank), "k_rope": ("batch", "seq", rope),
        "pool": ("blocks", "block_size", rank + rope),
    }  # fmt: skip
    inputs = [GraphInput(name, dtype, dims) for name, dims in shapes.items()]
    inputs.append(GraphInput("block_tables", torch.int64, ("batch", "max_blocks")))
    inputs.append(GraphInput("past_lens", torch.int64, ("batch",)))
    return made(
        lambda graph, *nodes: graph.call_function(gathered_mla_attention, (*nodes, 0.1)),
        inputs, {"kv_b": (heads * (nope + v), rank)}, dtype,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("program", "limits", "measured"),
    [  # "Total Activation Memory" of TensorRT-RTX 1.7, MB
        (experts(64, 6, 352, 512), LIMITS, 101.7),
        (experts(64, 6, 352, 512, torch.bfloat16), LIMITS, 78.6),
        (experts(64, 6, 352, 512, torch.float32), LIMITS, 148.9),
        (experts(64, 6, 1408, 2048), LIMITS, 383.7),
        (experts(64, 6, 1408, 2048), GENERATION, 13.2),
        (int4_experts(64, 6, 352, 512, torch.float16), LIMITS, 123.5),
        (int4_experts(64, 6, 352, 512, torch.float16, zeros=True), LIMITS, 170.1),
        (int4_experts(64, 6, 352, 512, torch.float32), LIMITS, 192.6),
        (int4_experts(64, 6, 352, 512, torch.bfloat16), LIMITS, 100.5),
        (int4_experts(64, 6, 352, 512, torch.float16), SIXTEEN, 33.3),
        (int4_experts(64, 6, 1408, 2048, torch.float16), LIMITS, 784.6),
        (latent(16), LIMITS, 97.6),
        (latent(16), GENERATION, 44.6),
        (latent(128), LIMITS, 684.9),
        (latent(16, torch.float32), LIMITS, 187.1),
    ],
)
def test_prediction_is_within_a_tenth_of_what_tensorrt_takes(
    program: Program, limits: Limits, measured: float
) -> None:
    found = padded_workspace(program, limits, "tensorrt-rtx")
    assert abs(found.bytes / 1e6 / measured - 1) < 0.1, found


def test_too_much_is_refused_with_limits_that_fit() -> None:
    program = experts(256, 8, 2048, 7168)  # DeepSeek-V3
    limits = Limits(max_len=8192, max_batch=8, max_chunk=4096)
    with pytest.raises(
        InputError, match=r"18.0 GiB.*256 experts x 4096 tokens.*at most 8.0 GiB"
    ) as e:
        check_workspace(program, limits, "tensorrt-rtx")
    assert "lower --max-chunk to 1024" in str(e.value)
    smaller = Limits(max_len=8192, max_batch=8, max_chunk=1024)
    assert check_workspace(program, smaller, "tensorrt-rtx").bytes < 8 << 30
    assert check_workspace(program, limits, "tensorrt-rtx", limit=19 << 30).bytes > 17 << 30
    # ONNX Runtime computes one expert at a time.
    assert check_workspace(program, limits, "onnxruntime").bytes < 2 << 30


def test_long_contexts_are_refused_too() -> None:
    limits = Limits(max_len=131072, max_batch=1, max_chunk=512)
    with pytest.raises(InputError, match="512 queries x 128 heads x 131584 tokens"):
        check_workspace(latent(128), limits, "tensorrt-rtx")


def test_without_experts_and_latents_there_is_nothing_to_refuse() -> None:
    program = made(
        lambda graph, x: graph.call_function(torch.ops.aten.add.Tensor, (x, x)),
        [GraphInput("x", torch.float16, ("tokens", 8))], {}, torch.float16,
    )  # fmt: skip
    assert check_workspace(program, LIMITS, "tensorrt-rtx", limit=10 << 20).bytes <= 10 << 20
