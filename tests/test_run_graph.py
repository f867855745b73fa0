"""Graphs run node by node: the same values however the weights come in, and no more of them read
than nodes need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from seekforge.compile.export import export_checkpoint
from seekforge.compile.run_graph import output_nodes, run_graph
from seekforge.compile.run_graph_weights import GraphWeights
from seekforge.compile.verify import copied
from seekforge.kernels.errors import BuildError
from seekforge.kernels.moe_experts import moe_experts
from seekforge.kernels.tolerance import assert_close
from seekforge.models.checkpoint import Checkpoint, open_checkpoint
from seekforge.passes.int4 import insert_int4
from seekforge.passes.int4_options import Int4Options
from seekforge.passes.pipeline import run_fusions
from seekforge.passes.program import Program

IDS = torch.tensor([[5, 9, 250, 4, 17], [8, 3, 3, 100, 41]])
INPUTS = {"input_ids": IDS, "position_ids": torch.arange(5).expand(2, 5)}


@pytest.fixture(scope="module")
def fused(tiny_checkpoint: Callable[..., Path]) -> Callable[..., tuple[Program, Checkpoint]]:
    """Factory `(family, dtype="float32", int4=False) -> (program after the fusions, its
    checkpoint)`."""
    made: dict[tuple[str, str], tuple[Program, Checkpoint]] = {}

    def make(family: str, dtype: str = "float32", int4: bool = False) -> tuple[Program, Checkpoint]:
        if (family, dtype) not in made:
            checkpoint = open_checkpoint(tiny_checkpoint(family))
            program = export_checkpoint(checkpoint, dtype, 64)
            run_fusions(program, 64)
            made[family, dtype] = program, checkpoint
        program, checkpoint = made[family, dtype]
        program = copied(program)
        if int4:
            insert_int4(program, Int4Options(16))
        return program, checkpoint

    return make


def logits(program: Program, weights: GraphWeights, wide: bool = False) -> Tensor:
    name = output_nodes(program)[0].name
    return run_graph(program, weights.read, INPUTS, [name], wide=wide, weights=weights)[name]


@pytest.mark.parametrize("int4", [False, True])
def test_pieces_give_what_whole_weights_give(
    fused: Callable[..., tuple[Program, Checkpoint]], int4: bool
) -> None:
    """Linear layers by rows, experts a few at a time, the embedding by tokens."""
    program, checkpoint = fused("deepseek_v3", int4=int4)
    whole = logits(program, GraphWeights(checkpoint.read, checkpoint.int4))
    weights = GraphWeights(checkpoint.read, checkpoint.int4, room=0, block=1000)
    assert_close(logits(program, weights), whole, "pieces of 1000 elements")
    assert not weights.held


def test_eager_says_the_same(
    fused: Callable[..., tuple[Program, Checkpoint]], tiny_model: Callable[..., torch.nn.Module]
) -> None:
    program, checkpoint = fused("deepseek_v3")
    right = tiny_model("deepseek_v3")(input_ids=IDS, use_cache=False).logits
    assert_close(logits(program, GraphWeights(checkpoint.read)), right, "logits")


def test_of_the_experts_only_chosen_ones_are_read(
    fused: Callable[..., tuple[Program, Checkpoint]],
) -> None:
    program, checkpoint = fused("deepseek_v3")
    read: list[str] = []

    def watched(name: str) -> Tensor:
        read.append(name)
        return checkpoint.read(name)

    (node,) = program.nodes(moe_experts)
    indices = node.args[2].name  # type: ignore[union-attr]
    one = {"input_ids": IDS[:1, :1], "position_ids": torch.zeros(1, 1, dtype=torch.int64)}
    found = run_graph(
        program, watched, one, [indices, node.name],
        weights=GraphWeights(watched, room=0, block=2000),
    )  # fmt: skip
    chosen = {f".experts.{i}." for i in found[indices].flatten().tolist()}
    experts = [name for name in read if ".experts." in name]
    assert len(chosen) == 2 and len(experts) == 6  # gate, up and down of each
    assert {part for part in chosen for name in experts if part in name} == chosen
    assert found[node.name].shape == (1, 1, 32)


def test_small_weights_are_read_once(fused: Callable[..., tuple[Program, Checkpoint]]) -> None:
    program, checkpoint = fused("llama")
    read: list[str] = []

    def watched(name: str) -> Tensor:
        read.append(name)
        return checkpoint.read(name)

    weights = GraphWeights(watched)
    first, again = logits(program, weights), logits(program, weights)
    assert torch.equal(first, again)
    assert len(read) == len(set(read)) > 20


def test_wide_is_float32_throughout(fused: Callable[..., tuple[Program, Checkpoint]]) -> None:
    """A bf16 graph with unrounded weights is the fp32 graph."""
    narrow, checkpoint = fused("llama", "bfloat16")
    full, _ = fused("llama")
    weights = GraphWeights(checkpoint.read)
    calls = [node.name for node in narrow.graph.nodes if node.op == "call_function"]
    own, wide = (
        {v.dtype for v in run_graph(narrow, checkpoint.read, INPUTS, calls, wide=w).values()}
        for w in (False, True)
    )
    assert torch.bfloat16 in own and torch.bfloat16 not in wide
    assert_close(logits(narrow, weights, wide=True), logits(full, weights), "bf16 graph, wide")
    assert logits(narrow, weights).dtype == torch.bfloat16


def test_a_node_that_fails_is_named(fused: Callable[..., tuple[Program, Checkpoint]]) -> None:
    program, checkpoint = fused("llama")
    linears = program.nodes(torch.ops.aten.linear.default)
    node, down = linears[0], linears[3]  # of 32 and of 56 input features
    node.args = (node.args[0], down.args[1])
    with pytest.raises(BuildError, match=rf"%{node.name} .*\(from llama/modeling_llama\.py:\d+\)"):
        logits(program, GraphWeights(checkpoint.read))
