"""rope + paged_attention as one operator: fires for each layer, the same numbers, near-misses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from seekforge.compile.execute import materialise
from seekforge.kernels.paged_attention import paged_attention
from seekforge.kernels.rope import rope
from seekforge.kernels.rope_paged_attention import rope_paged_attention
from seekforge.passes.kv_cache import example_inputs
from seekforge.passes.pipeline import run_pipeline
from seekforge.passes.program import Program
from seekforge.passes.rope_append import fuse_rope_append

Exported = Callable[..., tuple[Program, Any]]


def inputs_of(program: Program, seed: int = 0) -> list[torch.Tensor]:
    """Two sequences of 3 and 1 new tokens behind 2 and 5 cached ones, random pools."""
    random = torch.Generator().manual_seed(seed)
    index = [
        torch.tensor([5, 9, 7, 11]), torch.tensor([2, 3, 4, 5]), torch.tensor([18, 19, 20, 37]),
        torch.tensor([[1], [2]]), torch.tensor([5, 6]), torch.tensor([0, 3, 4]), torch.arange(4),
    ]  # fmt: skip
    nodes = program.graph.find_nodes(op="placeholder")
    pools = [
        torch.randn(4, 16, *map(int, n.meta["val"].shape[2:]), generator=random)
        for n in nodes[len(index) :]
    ]
    return index + pools


def logits(program: Program, module: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    given = inputs_of(program)
    (y,) = materialise(program, module.get_parameter)(*given)
    return y, given[7:]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_layer_and_the_same_numbers(exported: Exported, family: str) -> None:
    program, module = exported(family)
    run_pipeline(program, "ragged", 64, None)
    expected, pools = logits(program, module)
    assert len(program.nodes(rope)) == 2
    result = fuse_rope_append(program)
    assert (result.fired, result.misses) == (2, ())
    assert not program.nodes(rope) and not program.nodes(paged_attention)
    assert len(program.nodes(rope_paged_attention)) == 2
    for node in program.graph.nodes:  # values in the metadata are still right
        if node.target is rope_paged_attention:
            assert [len(x.meta["val"].shape) for x in node.args[:3]] == [3, 3, 3]
    found, written = logits(program, module)
    assert torch.equal(found, expected)
    assert all(torch.equal(a, b) for a, b in zip(written, pools, strict=True))


def test_only_for_gpus(exported: Exported) -> None:
    program, _ = exported("llama")
    results, _ = run_pipeline(program, "ragged", 64, None, device="cuda")
    assert {r.name: r.fired for r in results}["rope_append"] == 2
    for form, device in (("ragged", "cpu"), ("padded", "cuda")):
        program, _ = exported("llama")
        results, _ = run_pipeline(program, form, 64, None, device=device)
        assert "rope_append" not in {r.name for r in results}


def near_miss(program: Program, change: Callable[[fx.Graph, fx.Node], None]) -> str:
    run_pipeline(program, "ragged", 64, None)
    node = program.nodes(paged_attention)[1]
    with program.graph.inserting_before(node):
        change(program.graph, node)
    result = fuse_rope_append(program)
    assert result.fired == 1 and len(program.nodes(paged_attention)) == 1
    (miss,) = result.misses
    return miss.reason


def swapped(graph: fx.Graph, node: fx.Node) -> None:
    q, k, *rest = node.args
    node.args = (k, q, *rest)


def scaled(graph: fx.Graph, node: fx.Node) -> None:
    q, *rest = node.args
    node.args = (graph.call_function(torch.ops.aten.mul.Tensor, (q, 2.0)), *rest)


def read_twice(graph: fx.Graph, node: fx.Node) -> None:
    q, k, v, *rest = node.args
    node.args = (q, k, graph.call_function(torch.ops.aten.add.Tensor, (v, k)), *rest)


@pytest.mark.parametrize(
    ("change", "reason"),
    [(swapped, "not result 0"), (scaled, "not a squeezed"), (read_twice, "something else")],
)
def test_near_misses(
    exported: Exported, change: Callable[[fx.Graph, fx.Node], None], reason: str
) -> None:
    program, _ = exported("llama")
    assert reason in near_miss(program, change)


def test_fake_values(exported: Exported) -> None:
    program, _ = exported("llama")
    _, inputs = run_pipeline(program, "ragged", 64, None, device="cuda")
    assert len(example_inputs(inputs)) == len(program.inputs)
    (node, _) = program.nodes(rope_paged_attention)
    q, v = node.args[0].meta["val"], node.args[2].meta["val"]
    assert node.meta["val"].shape[-2:] == (q.shape[-2], v.shape[-1])
