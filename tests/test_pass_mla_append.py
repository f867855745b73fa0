"""norm, rope + latent attention as one operator: fires for each layer, the same numbers,
near-misses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from seekforge.compile.execute import materialise
from seekforge.kernels.paged_mla_attention import paged_mla_attention
from seekforge.kernels.rms_norm import rms_norm
from seekforge.kernels.rope import rope
from seekforge.kernels.rope_paged_mla_attention import rope_paged_mla_attention
from seekforge.passes.kv_cache import trace_values
from seekforge.passes.mla_append import fuse_mla_append
from seekforge.passes.pipeline import run_pipeline
from seekforge.passes.program import Program

Exported = Callable[..., tuple[Program, Any]]
Change = Callable[[fx.Graph, fx.Node], None]
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("deepseek_v2", {}),
    ("deepseek_v2", {"q_lora_rank": 24, "attention_bias": True}),
    ("deepseek_v3", {}),
    ("deepseek_v3", {"q_lora_rank": None, "rope_interleave": False, "v_head_dim": 20}),
    ("deepseek_v3", {"qk_nope_head_dim": 6, "qk_rope_head_dim": 10}),
]


def logits(program: Program, module: Any) -> list[torch.Tensor]:
    """Logits and pools of two sequences of 3 and 1 new tokens behind 2 and 5 cached ones."""
    random = torch.Generator().manual_seed(0)
    index = [
        torch.tensor([5, 9, 7, 11]), torch.tensor([2, 3, 4, 5]), torch.tensor([18, 19, 20, 37]),
        torch.tensor([[1], [2]]), torch.tensor([5, 6]), torch.tensor([0, 3, 4]), torch.arange(4),
    ]  # fmt: skip
    nodes = program.graph.find_nodes(op="placeholder")[len(index) :]
    pools = [torch.randn(4, 16, int(n.meta["val"].shape[2]), generator=random) for n in nodes]
    (y,) = materialise(program, module.state_dict().__getitem__)(*index, *pools)
    return [y, *pools]


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_every_layer_and_the_same_numbers(
    exported: Exported, family: str, overrides: dict[str, Any]
) -> None:
    program, module = exported(family, **overrides)
    run_pipeline(program, "ragged", 64, None)
    expected = logits(program, module)
    norms = len(program.nodes(rms_norm))
    result = fuse_mla_append(program)
    assert (result.fired, result.misses) == (2, ())
    assert not program.nodes(rope) and not program.nodes(paged_mla_attention)
    assert len(program.nodes(rms_norm)) == norms - 2
    for node in program.nodes(rope_paged_mla_attention):
        assert [x.meta["val"].dim() for x in node.args[:4]] == [3, 3, 2, 2]  # type: ignore[union-attr]
        assert node.args[9] is overrides.get("rope_interleave", True)
    assert all(map(torch.equal, logits(program, module), expected))
    again = fuse_mla_append(program)
    assert (again.fired, again.misses) == (0, ())


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_only_for_gpus(exported: Exported, family: str) -> None:
    program, _ = exported(family)
    results, inputs = run_pipeline(program, "ragged", 64, None, device="cuda")
    assert {r.name: r.fired for r in results}["mla_append"] == 2
    nodes = program.nodes(rope_paged_mla_attention)
    shapes = [node.meta["val"].shape[1:] for node in nodes]
    trace_values(program, inputs)  # the values in the metadata are right
    assert [node.meta["val"].shape[1:] for node in nodes] == shapes
    for form, device in (("ragged", "cpu"), ("padded", "cuda")):
        program, _ = exported(family)
        results, _ = run_pipeline(program, form, 64, None, device=device)
        assert "mla_append" not in {r.name for r in results}


def test_other_attention_is_none(exported: Exported) -> None:
    program, _ = exported("llama")
    run_pipeline(program, "ragged", 64, None)
    result = fuse_mla_append(program)
    assert (result.fired, result.misses) == (0, ())


def add(graph: fx.Graph, x: Any, y: Any) -> fx.Node:
    made = graph.call_function(torch.ops.aten.add.Tensor, (x, y))
    made.meta["val"] = x.meta["val"]
    return made


def swapped(graph: fx.Graph, node: fx.Node) -> None:
    node.update_arg(1, node.args[3])


def no_norm(graph: fx.Graph, node: fx.Node) -> None:
    norm: Any = node.args[2]
    node.update_arg(2, norm.args[0])


def scaled_key(graph: fx.Graph, node: fx.Node) -> None:
    node.update_arg(3, add(graph, node.args[3], 1.0))


def latent_read_twice(graph: fx.Graph, node: fx.Node) -> None:
    node.update_arg(9, add(graph, node.args[9], node.args[2]))


def query_read_twice(graph: fx.Graph, node: fx.Node) -> None:
    node.update_arg(0, add(graph, node.args[0], node.args[1]))


def key_read_twice(graph: fx.Graph, node: fx.Node) -> None:
    key: Any = node.args[3]
    node.update_arg(0, add(graph, node.args[0], key.args[0]))


def partly(graph: fx.Graph, node: fx.Node) -> None:
    key: Any = node.args[3]
    turned = key.args[0].args[0]
    cut = graph.call_function(torch.ops.aten.slice.Tensor, (turned.args[2], 1, 0, 3))
    cut.meta["val"] = turned.args[2].meta["val"][:, :3]
    turned.prepend(cut)
    turned.update_arg(2, cut)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (swapped, "q is result 1"), (no_norm, "not a norm's result"),
        (scaled_key, "not a result of rope"), (latent_read_twice, "latent is also read by"),
        (query_read_twice, "q is also read by"), (key_read_twice, "k is also read by"),
        (partly, "rotates 6 of 8"),
    ],
)  # fmt: skip
def test_near_misses(exported: Exported, change: Change, reason: str) -> None:
    program, _ = exported("deepseek_v2")
    run_pipeline(program, "ragged", 64, None)
    node = program.nodes(paged_mla_attention)[1]
    with program.graph.inserting_before(node):
        change(program.graph, node)
    result = fuse_mla_append(program)
    assert result.fired == 1 and len(program.nodes(paged_mla_attention)) == 1
    (miss,) = result.misses
    assert miss.node == node.name and reason in miss.reason
