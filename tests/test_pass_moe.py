"""Mixture of experts on transformers' graphs, and routings that must stay as they are."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from seekforge.compile.execute import run
from seekforge.kernels.moe_experts import moe_experts
from seekforge.kernels.moe_route import moe_route
from seekforge.kernels.tolerance import assert_close
from seekforge.passes.cleanup import VIEWS, cleanup
from seekforge.passes.moe import fuse_moe
from seekforge.passes.program import Program, module_path
from seekforge.passes.rule import PassResult

aten = torch.ops.aten

B, S, H, E, K, I = 2, 7, 12, 8, 2, 10  # noqa: E741


def fused(program: Program) -> PassResult:
    cleanup(program)
    return fuse_moe(program)


def logits_of(program: Program, read: Callable[[str], Tensor], ids: Tensor) -> Tensor:
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    return run(program, read, ids, positions, False)[0]


def eager_logits(module: nn.Module, ids: Tensor) -> Tensor:
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    module.set_experts_implementation("eager")  # type: ignore[operator]
    logits = module(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert isinstance(logits, Tensor)
    return logits


V2, V3, QWEN = "deepseek_v2", "deepseek_v3", "qwen3_moe"
V2_GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
# family, overrides, MoE layers of 2, arguments of moe_route behind logits and bias
MODELS: list[tuple[str, dict[str, Any], int, tuple[Any, ...]]] = [
    (V3, {}, 1, (2, "sigmoid", 4, 2, "top2", True, 2.5)),
    (V3, {"norm_topk_prob": False}, 1, (2, "sigmoid", 4, 2, "top2", False, 2.5)),
    (V3, {"routed_scaling_factor": 1.0}, 1, (2, "sigmoid", 4, 2, "top2", True, 1.0)),
    (V3, {"n_group": 1, "topk_group": 1}, 1, (2, "sigmoid", 1, 1, "max", True, 2.5)),
    (V3, {"topk_group": 4}, 1, (2, "sigmoid", 1, 1, "max", True, 2.5)),
    (V3, {"first_k_dense_replace": 0}, 2, (2, "sigmoid", 4, 2, "top2", True, 2.5)),
    (V3, {"first_k_dense_replace": 2}, 0, ()),
    (V2, {}, 1, (2, "softmax", 1, 1, "max", False, 1.0)),
    (V2, {"routed_scaling_factor": 16.0}, 1, (2, "softmax", 1, 1, "max", False, 16.0)),
    (V2, V2_GROUPS, 1, (2, "softmax", 4, 2, "max", False, 1.0)),
    (V2, V2_GROUPS | {"n_group": 8}, 1, (2, "softmax", 8, 2, "max", False, 1.0)),
    (V2, {"n_group": None, "topk_group": None}, 1, (2, "softmax", 1, 1, "max", False, 1.0)),
    (V2, {"first_k_dense_replace": 0}, 2, (2, "softmax", 1, 1, "max", False, 1.0)),
    (V2, {"first_k_dense_replace": 2}, 0, ()),
    (QWEN, {}, 2, (3, "softmax", 1, 1, "max", True, 1.0)),
    (QWEN, {"norm_topk_prob": False}, 2, (3, "softmax", 1, 1, "max", False, 1.0)),
]


@pytest.mark.parametrize(
    "family, overrides, layers, settings", MODELS, ids=lambda x: str(x) if x else "-"
)
def test_whole_models(
    exported: Callable[..., Any],
    tiny_model: Callable[..., nn.Module],
    family: str,
    overrides: dict[str, Any],
    layers: int,
    settings: tuple[Any, ...],
) -> None:
    """B16, B21: fires in every MoE layer, with the configuration's numbers, and equals eager."""
    program, _ = exported(family, **overrides)
    result = fused(program)
    assert (result.fired, result.misses) == (layers, ())
    routes = program.nodes(moe_route)
    assert [node.args[2:] for node in routes] == [settings] * layers
    assert len(program.nodes(moe_experts)) == layers
    assert not program.nodes(aten.topk.default) and not program.nodes(aten.scatter_.value)
    module = tiny_model(family, **overrides)
    for shape in ((3, 5), (1, 1)):  # one token too (B44)
        ids = torch.randint(0, 293, shape, generator=torch.Generator().manual_seed(3))
        logits = logits_of(program, module.state_dict().__getitem__, ids)
        assert_close(logits, eager_logits(module, ids), f"{family} {overrides} {shape}")


@pytest.mark.parametrize("family", [V2, V3, QWEN])
def test_graph_is_static(exported: Callable[..., Any], family: str) -> None:
    """B44: no size depends on data, and no operator is transformers' own."""
    program, _ = exported(family)
    fused(program)
    for node in program.graph.nodes:
        assert node.target is not aten.nonzero.default
        assert not str(node.target).startswith("transformers")
        assert not free_unbacked_symbols(node.meta.get("val")), node


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [V2, V3, QWEN])
def test_residual_stream_keeps_its_dimensions(
    exported: Callable[..., Any], family: str, dtype: torch.dtype
) -> None:
    """No view as [tokens, hidden] and back around the gate, the routing and the experts."""
    program, _ = exported(family, dtype)
    fused(program)
    moe = [
        n for n in program.graph.nodes if re.search(r"1\.mlp(\.gate|\.experts)?$", module_path(n))
    ]
    assert moe and not [node for node in moe if node.target in VIEWS]
    (experts,) = program.nodes(moe_experts)[-1:]
    (route,) = program.nodes(moe_route)[-1:]
    logits = route.args[0]
    gate_input = logits.args[0] if dtype == torch.float32 else logits.args[0].args[0]
    assert experts.args[0] is (logits.args[0] if family == QWEN else gate_input)
    for node in (experts, logits):
        assert node.meta["val"].dim() == 3


@pytest.mark.parametrize("family", [V2, V3])
def test_gate_is_stored_in_fp32(exported: Callable[..., Any], family: str) -> None:
    """In a bf16 model the weight is cast once, when it is written; the hidden states in each step.
    Results stay bitwise the same."""
    ids = torch.randint(0, 293, (3, 5), generator=torch.Generator().manual_seed(3))
    plain, module = exported(family, torch.bfloat16)
    cleanup(plain)
    read = module.state_dict().__getitem__
    before = logits_of(plain, read, ids)
    program, _ = exported(family, torch.bfloat16)
    fused(program)
    name = "model.layers.1.mlp.gate.weight"
    assert program.tensor(name).dtype == torch.float32
    (gate,) = (n for n in program.nodes(aten.linear.default) if n.args[1].target == name)
    assert (gate.args[0].target, gate.args[0].args[1]) == (aten.to.dtype, torch.float32)
    assert gate.args[1].op == "get_attr"
    assert torch.equal(logits_of(program, read, ids), before)


def test_rounding_of_the_weights_is_left_out(exported: Callable[..., Any]) -> None:
    """Qwen3-MoE rounds the weights to bf16; the experts take them in fp32."""
    ids = torch.randint(0, 293, (3, 5), generator=torch.Generator().manual_seed(3))
    program, module = exported(QWEN, torch.bfloat16, num_hidden_layers=1)
    cleanup(program)
    before = logits_of(program, module.state_dict().__getitem__, ids)
    assert fused(program).fired == 1
    (experts,) = program.nodes(moe_experts)
    assert experts.args[1].meta["val"].dtype == torch.float32
    assert_close(logits_of(program, module.state_dict().__getitem__, ids), before, "weights")


def test_all_negative_biases(
    exported: Callable[..., Any], tiny_model: Callable[..., nn.Module]
) -> None:
    """B13 in the whole model."""
    program, _ = exported(V3)
    fused(program)
    module = tiny_model(V3)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert not torch.equal(module.get_buffer(name), torch.zeros(8))
    module.get_buffer(name).fill_(-2)
    ids = torch.randint(0, 293, (3, 9), generator=torch.Generator().manual_seed(3))
    logits = logits_of(program, module.state_dict().__getitem__, ids)
    assert_close(logits, eager_logits(module, ids), "biases of -2")


def test_second_run_changes_nothing(exported: Callable[..., Any]) -> None:
    program, _ = exported(V3)
    fused(program)
    before = str(program.graph)
    again = fuse_moe(program)
    assert (again.fired, again.misses) == (0, ())
    assert str(program.graph) == before


def test_models_without_experts(exported: Callable[..., Any]) -> None:
    program, _ = exported("llama", num_hidden_layers=1)
    result = fused(program)
    assert (result.fired, result.misses) == (0, ())


def parts() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "gate": nn.Linear(H, E, bias=False),
        "other": nn.Linear(H, E, bias=False),
        "bias": torch.randn(E),
        "gate_up": torch.randn(E, 2 * I, H),
        "down": torch.randn(E, H, I),
    }


def block(route: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    """A MoE block whose routing is `route(module, logits [tokens, experts], x)`."""

    def function(m: nn.Module, x: Tensor) -> Tensor:
        flat = x.view(-1, H)
        weights, indices = route(m, m.gate(flat), flat)
        return moe_experts(flat, weights, indices, m.gate_up, m.down).view(x.shape)  # type: ignore[no-any-return]

    return function


def softmax(m: nn.Module, logits: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.topk(logits.softmax(-1), K)  # type: ignore[return-value]


def noaux(
    m: nn.Module, logits: Tensor, *, excluded: float = float("-inf"), best: int = 2,
    biased: bool = False, added: float = 1e-20, groups: int = 4, top_k: int = K,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """V3's routing, with faults to choose from."""
    scores = logits.sigmoid()
    choice = scores + m.bias
    group = choice.view(-1, groups, E // groups).topk(best, -1)[0].sum(-1)
    kept = torch.zeros_like(group).scatter(1, group.topk(2, -1, sorted=False)[1], 1)
    mask = kept[..., None].expand(-1, groups, E // groups).reshape(-1, E)
    indices = choice.masked_fill(~mask.bool(), excluded).topk(top_k, -1, sorted=False)[1]
    weights = (choice if biased else scores).gather(1, indices)
    return weights / (weights.sum(-1, keepdim=True) + added) * 2.5, indices


@pytest.mark.parametrize(
    "route",
    [softmax, lambda m, logits, x: noaux(m, logits), lambda m, logits, x: noaux(m, logits, best=1)],
)
def test_blocks(traced: Callable[..., Any], route: Callable[..., tuple[Tensor, Tensor]]) -> None:
    x = torch.randn(B, S, H)
    program, module = traced(block(route), x, **parts())
    result = fused(program)
    assert (result.fired, result.misses) == (1, ())
    assert not set(VIEWS) & {node.target for node in program.graph.nodes}
    assert_close(run(program, module.get_parameter, x)[0], module(x), "block")


def test_values_that_others_read_stay(traced: Callable[..., Any]) -> None:
    """B51: the router's logits, weights (written in place) and indices are outputs too."""

    def function(m: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        flat = x.view(-1, H)
        logits = m.gate(flat)
        weights, indices = torch.topk(logits.softmax(-1), K)
        weights /= weights.sum(-1, keepdim=True)
        y = moe_experts(flat, weights, indices, m.gate_up, m.down)
        return y.view(x.shape), y, logits, weights, indices

    x = torch.randn(B, S, H)
    program, module = traced(function, x, **parts())
    assert fused(program).fired == 1
    for y, right in zip(run(program, module.get_parameter, x), module(x), strict=True):
        assert_close(y.float(), right.float(), "B51")


NEAR_MISSES: dict[str, tuple[Callable[..., tuple[Tensor, Tensor]], str]] = {
    "excluded groups get 0": (
        lambda m, logits, x: noaux(m, logits, excluded=0.0), r"biases around -2.0: chooses experts",
    ),
    "weights from biased scores": (
        lambda m, logits, x: noaux(m, logits, biased=True), "gives weights",
    ),
    "more added to the sum": (
        lambda m, logits, x: noaux(m, logits, added=1e-6), "logits around -24.0.*gives weights",
    ),
    "groups kept are too few": (
        lambda m, logits, x: noaux(m, logits, groups=8, best=1, top_k=3),
        "chooses 3 experts, but the groups kept have 2",
    ),
    "scores by relu": (
        lambda m, logits, x: torch.topk(logits.relu(), K), "expected one softmax or sigmoid.*relu",
    ),
    "softmax of the chosen": (
        lambda m, logits, x: (lambda w, i: (w.softmax(-1), i))(*torch.topk(logits, K)),
        "gives weights",
    ),
    "two routers": (
        lambda m, logits, x: torch.topk((logits + m.other(x)).softmax(-1), K), "2 linear layers",
    ),
    "bias that is an activation": (
        lambda m, logits, x: torch.topk(logits.softmax(-1) + x[:, :E], K), "depends on placeholder",
    ),
    "logits of another temperature": (
        lambda m, logits, x: torch.topk((logits / 2).softmax(-1), K), "gives weights",
    ),
    "worst experts": (
        lambda m, logits, x: torch.topk(logits.softmax(-1), K, largest=False), "chooses experts",
    ),
    "square root of the weights": (
        lambda m, logits, x: (lambda w, i: (w.sqrt(), i))(*torch.topk(logits.softmax(-1), K)),
        "gives weights",
    ),
    "weights in another order than indices": (
        lambda m, logits, x: (lambda w, i: (w.flip(-1), i))(*torch.topk(logits.softmax(-1), K)),
        "gives weights",
    ),
    "indices that are computed": (
        lambda m, logits, x: (lambda w, i: (w, (i + 1) % E))(*torch.topk(logits.softmax(-1), K)),
        "expected the indices of a topk",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(traced: Callable[..., Any], name: str) -> None:
    route, reason = NEAR_MISSES[name]
    x = torch.randn(B, S, H)
    program, module = traced(block(route), x, **parts())
    result = fused(program)
    assert result.fired == 0 and not program.nodes(moe_route)
    assert re.search(reason, result.misses[0].reason), result.misses[0].reason
    assert torch.equal(run(program, module.get_parameter, x)[0], module(x))
