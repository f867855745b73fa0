"""Latent attention in ONNX Runtime: equal to the operator, in both forms, at both levels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor

from seekforge.compile.onnx_mla import Latent
from seekforge.kernels.gathered_mla_attention import (
    gathered_mla_attention,
    gathered_mla_attention_reference,
)
from seekforge.kernels.moe_experts import moe_experts
from seekforge.kernels.tolerance import assert_close, normalised_error

Make = Callable[..., Path]
LEVELS = ["ORT_DISABLE_ALL", "ORT_ENABLE_ALL"]
HEADS, NOPE, ROPE, V, RANK = 3, 8, 4, 12, 14  # 35 new tokens: from there on decompressed
SCALE, BLOCK = (NOPE + ROPE) ** -0.5, 4
CASES = [  # batch, seq, cached tokens of each
    (1, 1, [0]), (1, 1, [9]), (3, 1, [4, 0, 11]), (1, 7, [0]), (1, 7, [5]), (2, 3, [3, 8]),
    (1, 35, [6]), (1, 36, [0]), (1, 40, [6]), (2, 37, [1, 9]),
]  # fmt: skip


def mla_inputs(dtype: torch.dtype) -> dict[str, tuple[torch.dtype, tuple[int | str, ...]]]:
    return {
        "q_nope": (dtype, ("batch", "seq", HEADS, NOPE)),
        "q_rope": (dtype, ("batch", "seq", HEADS, ROPE)),
        "latent": (dtype, ("batch", "seq", RANK)),
        "k_rope": (dtype, ("batch", "seq", ROPE)),
        "pool": (dtype, ("blocks", "block_size", RANK + ROPE)),
        "block_tables": (torch.int64, ("batch", "max_blocks")),
        "past_lens": (torch.int64, ("batch",)),
    }


def mla_onnx(make: Make, dtype: torch.dtype, target: str, kv_b: Tensor) -> Path:
    return make(
        lambda graph, *nodes: [graph.call_function(gathered_mla_attention, (*nodes, SCALE))],
        mla_inputs(dtype), {"kv_b": kv_b}, ["new_y"], target,
    )  # fmt: skip


def kv_b_weight(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (0.5 * torch.randn(HEADS * (NOPE + V), RANK, generator=generator)).to(dtype)


def inputs_of(batch: int, seq: int, past: list[int], dtype: torch.dtype) -> dict[str, Tensor]:
    """Pool slots that hold none of the cached tokens are NaN."""
    generator = torch.Generator().manual_seed(100 * batch + seq)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    blocks = -(-max(*past, 1) // BLOCK)
    tables = 1 + torch.randperm(batch * blocks, generator=generator).view(batch, blocks)
    pool = torch.full((1 + batch * blocks, BLOCK, RANK + ROPE), float("nan"), dtype=dtype)
    for row, count in enumerate(past):
        for i in range(count):
            pool[tables[row, i // BLOCK], i % BLOCK] = random(RANK + ROPE)
    return {
        "q_nope": random(batch, seq, HEADS, NOPE), "q_rope": random(batch, seq, HEADS, ROPE),
        "latent": random(batch, seq, RANK), "k_rope": random(batch, seq, ROPE), "pool": pool,
        "block_tables": tables, "past_lens": torch.tensor(past),
    }  # fmt: skip


def session(path: Path, level: str) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt-rtx"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_equals_the_operator(op_onnx: Make, dtype: torch.dtype, target: str, level: str) -> None:
    kv_b = kv_b_weight(dtype)
    runner = session(mla_onnx(op_onnx, dtype, target, kv_b), level)
    for batch, seq, past in CASES:
        inputs = inputs_of(batch, seq, past, dtype)
        (found,) = runner.run(None, {name: value.numpy() for name, value in inputs.items()})
        y = torch.from_numpy(found)
        # In fp32: fp16 rounds in another order in each form, 1e-3 of a value.
        exact = {name: v.float() if v.is_floating_point() else v for name, v in inputs.items()}
        expected = gathered_mla_attention_reference(*exact.values(), kv_b.float(), SCALE)
        what = f"{batch=} {seq=} {past=} {target}"
        if dtype == torch.float32:
            assert_close(y, expected, what)
        else:
            assert y.dtype == dtype and normalised_error(y.float(), expected) < 4e-6, what


def test_beside_experts_the_cache_is_read_after_the_query(op_onnx: Make) -> None:
    """For TensorRT, which otherwise gathers the caches of all layers before the first If."""
    kv_b, stack = kv_b_weight(torch.float32), torch.randn(4, 6, 5)
    weights = {"kv_b": kv_b, "gate_up": stack, "down": torch.randn(4, 5, 3)}
    extra = {
        "x": (torch.float32, ("tokens", 5)),
        "w": (torch.float32, ("tokens", 2)),
        "indices": (torch.int64, ("tokens", 2)),
    }

    def function(graph: torch.fx.Graph, *nodes: torch.fx.Node) -> list[torch.fx.Node]:
        latents, rest = nodes[:7], nodes[7:10]
        return [
            graph.call_function(gathered_mla_attention, (*latents, nodes[10], SCALE)),
            graph.call_function(moe_experts, (*rest, *nodes[11:])),
        ]

    inputs = mla_inputs(torch.float32) | extra
    path = op_onnx(function, inputs, weights, ["new_y", "logits"], "tensorrt-rtx")
    given = inputs_of(2, 3, [3, 8], torch.float32)
    more = {"x": torch.randn(1, 5), "w": torch.ones(1, 2), "indices": torch.tensor([[0, 3]])}
    runner = session(path, "ORT_ENABLE_ALL")
    found = runner.run(None, {name: v.numpy() for name, v in (given | more).items()})[0]
    expected = gathered_mla_attention_reference(*given.values(), kv_b, SCALE)
    assert_close(torch.from_numpy(found), expected, "beside experts")
    graph = onnx.load(path, load_external_data=False).graph
    maker = {name: node for node in graph.node for name in node.output}
    (gather,) = (n for n in graph.node if n.op_type == "Gather" and n.input[0] == "pool")
    assert maker[gather.input[1]].op_type == "Add"


def test_both_forms_are_used(op_onnx: Make) -> None:
    """One If for ONNX Runtime; for TensorRT the absorbed form alone, which has no Attention."""
    path = mla_onnx(op_onnx, torch.float32, "onnxruntime", kv_b_weight(torch.float32))
    onnx.checker.check_model(str(path), full_check=True)
    graph = onnx.load(path, load_external_data=False).graph
    (choice,) = (node for node in graph.node if node.op_type == "If")
    kinds = {a.name: [n.op_type for n in a.g.node] for a in choice.attribute}
    assert "Attention" not in kinds["then_branch"] and "Softmax" in kinds["then_branch"]
    assert kinds["else_branch"].count("Attention") == 1
    (weight,) = (t for t in graph.initializer if t.name == "kv_b")
    assert weight.data_location == onnx.TensorProto.EXTERNAL
    path = mla_onnx(op_onnx, torch.float32, "tensorrt-rtx", kv_b_weight(torch.float32))
    graph = onnx.load(path, load_external_data=False).graph
    assert not {"If", "Attention"} & {node.op_type for node in graph.node}


def test_a_small_rank_never_decompresses() -> None:
    """Where 2 rank <= nope + v the absorbed form multiplies less for any number of tokens."""
    sizes = {"heads": 1, "nope": 128, "rope": 64, "v_dim": 128, "dtype": torch.float32}
    names = ("q_nope", "q_rope", "context", "mask", "kv_b")
    assert Latent(*names, scale=1.0, rank=512, **sizes).crossover == 170
    assert Latent(*names, scale=1.0, rank=128, **sizes).crossover > 1 << 30
