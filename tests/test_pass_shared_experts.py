"""Routed and shared experts as one operator: fires in each MoE layer, the same numbers, and
near-misses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx

from seekforge.compile.export import export_checkpoint
from seekforge.compile.run_graph_weights import GraphWeights
from seekforge.compile.verify import copied
from seekforge.compile.verify_inputs import draw_tokens, logits_of
from seekforge.kernels.errors import BuildError
from seekforge.kernels.int4_linear import int4_linear
from seekforge.kernels.int4_moe_experts import int4_moe_experts
from seekforge.kernels.moe_experts import moe_experts
from seekforge.kernels.shared_experts import int4_moe_shared_experts, moe_shared_experts
from seekforge.kernels.swiglu import swiglu
from seekforge.kernels.tolerance import assert_close
from seekforge.models.checkpoint import Checkpoint, open_checkpoint
from seekforge.models.families import expected_fusions
from seekforge.passes import pipeline
from seekforge.passes.int4_options import Int4Options
from seekforge.passes.kv_cache import GraphInput
from seekforge.passes.linears import LINEAR
from seekforge.passes.pipeline import run_pipeline
from seekforge.passes.program import Program
from seekforge.passes.rule import PassResult
from seekforge.passes.shared_experts import fuse_shared_experts

aten = torch.ops.aten
Built = tuple[Program, Checkpoint, list[GraphInput]]
INT4 = Int4Options(16)
PLAIN_SHARED = Int4Options(16, skip=("shared_experts",))


@pytest.fixture
def built(tiny_checkpoint: Callable[..., Path]) -> Callable[..., Built]:
    """Factory `(family, dtype="float32", int4=None) -> (ragged program, its checkpoint, inputs)`,
    the pass not yet run; two layers with experts."""

    def make(family: str, dtype: str = "float32", int4: Int4Options | None = None) -> Built:
        checkpoint = open_checkpoint(tiny_checkpoint(family, first_k_dense_replace=0))
        program = export_checkpoint(checkpoint, dtype, 64)
        _, inputs = run_pipeline(program, "ragged", 64, None, int4)
        return program, checkpoint, inputs

    return make


def logits(program: Program, checkpoint: Checkpoint, block: int = 1 << 20) -> Tensor:
    """block: elements of a weight that are read at a time."""
    weights = GraphWeights(checkpoint.read, checkpoint.int4, room=0, block=block)
    return logits_of(program, draw_tokens(293, 64, 0), weights, wide=False)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("int4", [None, INT4])
def test_every_layer_and_the_same_numbers(
    built: Callable[..., Built], family: str, dtype: str, int4: Int4Options | None
) -> None:
    program, checkpoint, _ = built(family, dtype, int4)
    expected, before = logits(program, checkpoint), len(program.graph.nodes)
    routed, linear, both = (
        (int4_moe_experts, int4_linear, int4_moe_shared_experts)
        if int4
        else (moe_experts, LINEAR, moe_shared_experts)
    )
    linears = len(program.nodes(linear))
    result = fuse_shared_experts(program)
    assert (result.fired, result.misses) == (2, ())
    assert (result.nodes_before, result.nodes_after) == (before, before - 2 * 4)
    assert len(program.nodes(both)) == 2 and not program.nodes(routed)
    assert not program.nodes(swiglu) and len(program.nodes(linear)) == linears - 4
    for node in program.nodes(both):
        assert node.meta["val"].shape[-1] == 32
    assert torch.equal(logits(program, checkpoint), expected)
    if dtype == "float32":
        assert_close(logits(program, checkpoint, block=100), expected, "weights in pieces")
    assert fuse_shared_experts(program).fired == 0, "a second run"


def test_only_for_gpus(tiny_checkpoint: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("deepseek_v3"))
    for form, device, fired in (("ragged", "cuda", 1), ("ragged", "cpu", 0), ("padded", "cuda", 0)):
        program = export_checkpoint(checkpoint, "float32", 64)
        results, _ = run_pipeline(program, form, 64, None, device=device)
        assert {r.name: r.fired for r in results}.get("shared_experts", 0) == fired


@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
def test_models_without_shared_experts(tiny_checkpoint: Callable[..., Path], family: str) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint(family))
    program = export_checkpoint(checkpoint, "float32", 64)
    results, _ = run_pipeline(program, "ragged", 64, None, device="cuda")
    (result,) = (r for r in results if r.name == "shared_experts")
    assert result.fired == 0 and len(result.misses) == (2 if family == "qwen3_moe" else 0)
    assert all("not to one addition" in miss.reason for miss in result.misses)


def addition(program: Program) -> tuple[fx.Node, fx.Node]:
    """The second layer's addition, and the shared experts' last node."""
    experts = program.nodes(moe_experts)[1]
    (add,) = experts.users
    (down,) = (node for node in add.all_input_nodes if node is not experts)
    return add, down


def test_either_order(built: Callable[..., Built]) -> None:
    program, checkpoint, _ = built("deepseek_v3")
    expected = logits(program, checkpoint)
    add, _ = addition(program)
    add.args = tuple(reversed(add.args))
    assert fuse_shared_experts(program).fired == 2
    assert torch.equal(logits(program, checkpoint), expected)


def scaled(program: Program, add: fx.Node, down: fx.Node) -> None:
    add.replace_input_with(down, program.emit(aten.mul.Tensor, down, 2.0, like=down))


def weighted(program: Program, add: fx.Node, down: fx.Node) -> None:
    add.kwargs = {"alpha": 2}


def read_twice(program: Program, add: fx.Node, down: fx.Node) -> None:
    less = program.emit(aten.sub.Tensor, add, down, like=add)
    add.replace_all_uses_with(less, lambda user: user is not less)


def biased(program: Program, add: fx.Node, down: fx.Node) -> None:
    down.args = (*down.args, program.graph.find_nodes(op="get_attr")[-1])


def other_input(program: Program, add: fx.Node, down: fx.Node) -> None:
    (gate_up,) = (node for node in program.nodes(LINEAR) if node is down.args[0].args[0])  # type: ignore[union-attr]
    with program.graph.inserting_before(gate_up):
        x = program.emit(aten.neg.default, gate_up.args[0], like=gate_up)
    gate_up.args = (x, *gate_up.args[1:])


def other_activation(program: Program, add: fx.Node, down: fx.Node) -> None:
    (inner,) = (node for node in program.nodes(swiglu) if node is down.args[0])
    with program.graph.inserting_before(inner):
        gate = program.emit(aten.slice.Tensor, inner.args[0], -1, 0, 16, like=inner)
        made = program.emit(aten.gelu.default, gate, like=inner)
    down.replace_input_with(inner, made)


def other_dtype(program: Program, add: fx.Node, down: fx.Node) -> None:
    weight: fx.Node = down.args[1]  # type: ignore[assignment]
    weight.meta["val"] = weight.meta["val"].double()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (scaled, "aten.mul.Tensor, not aten.linear"),
        (weighted, "not to one addition"),
        (read_twice, "is read by something else"),
        (biased, "has a bias"),
        (other_input, "the shared experts read neg"),
        (other_activation, "aten.gelu.default, not seekforge.swiglu"),
        (other_dtype, "is torch.float64, not torch.float32"),
    ],
)
def test_near_misses(
    built: Callable[..., Built], change: Callable[[Program, fx.Node, fx.Node], None], reason: str
) -> None:
    program = copied(built("deepseek_v3")[0])
    add, down = addition(program)
    place = (
        program.graph.inserting_after if change is read_twice else program.graph.inserting_before
    )
    with place(add):
        change(program, add, down)
    result = fuse_shared_experts(program)
    assert result.fired == 1 and len(program.nodes(moe_experts)) == 1
    (miss,) = result.misses
    assert reason in miss.reason


def test_plain_beside_int4(built: Callable[..., Built]) -> None:
    program, _, _ = built("deepseek_v2", int4=PLAIN_SHARED)
    result = fuse_shared_experts(program)
    assert result.fired == 0 and len(program.nodes(int4_moe_experts)) == 2
    assert all("aten.linear.default, not seekforge.int4_linear" in m.reason for m in result.misses)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_passes_for_gpus_are_expected(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """A build ends with an error where one of them fires too seldom."""
    checkpoint = open_checkpoint(tiny_checkpoint(family))
    expected = expected_fusions(checkpoint.spec)

    def run(int4: Int4Options | None = None) -> None:
        program = export_checkpoint(checkpoint, "float32", 64)
        run_pipeline(program, "ragged", 64, expected, int4, "cuda")

    run()
    run(INT4)
    latent = family.startswith("deepseek")
    for name in ("mla_append", "shared_experts") if latent else ("rope_append",):
        lazy = PassResult(name, 0, (), 1, 1, 0.0)
        with monkeypatch.context() as patch:
            patch.setattr(pipeline, f"fuse_{name}", lambda program, lazy=lazy: lazy)
            with pytest.raises(BuildError, match=f"{name}: expected"):
                run()
