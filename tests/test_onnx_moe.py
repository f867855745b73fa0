"""Routing and experts in ONNX Runtime: equal to the operators, in both forms, at both levels."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor

from seekforge.compile.onnx_nodes import OnnxNodes
from seekforge.kernels.moe_experts import moe_experts, moe_experts_reference
from seekforge.kernels.moe_route import moe_route, moe_route_reference
from seekforge.kernels.tolerance import assert_close, normalised_error

Make = Callable[..., Path]
LEVELS = ["ORT_DISABLE_ALL", "ORT_ENABLE_ALL"]
E, H, I, K = 8, 24, 20, 3  # noqa: E741


def run(path: Path, level: str, **inputs: Tensor) -> list[Tensor]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    given = {name: value.numpy() for name, value in inputs.items()}
    return [torch.from_numpy(y) for y in session.run(None, given)]


def experts_onnx(make: Make, dtype: torch.dtype, target: str, weights: dict[str, Tensor]) -> Path:
    inputs = {
        "x": (dtype, ("tokens", H)),
        "w": (torch.float32, ("tokens", K)),
        "indices": (torch.int64, ("tokens", K)),
    }
    return make(
        lambda graph, *nodes: [graph.call_function(moe_experts, nodes)],
        inputs, weights, ["logits"], target,
    )  # fmt: skip


def stacked(dtype: torch.dtype, std: float = 0.5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"gate_up": (E, 2 * I, H), "down": (E, H, I)}
    return {
        name: (std * torch.randn(shape, generator=generator)).to(dtype)
        for name, shape in shapes.items()
    }


def chosen(tokens: int, experts: list[int] | None = None) -> tuple[Tensor, Tensor]:
    """Weights and indices; of the given experts only."""
    generator = torch.Generator().manual_seed(tokens)
    pool = torch.tensor(experts or list(range(E)))
    rows = [pool[torch.randperm(len(pool), generator=generator)[:K]] for _ in range(tokens)]
    return torch.rand(tokens, K, generator=generator), torch.stack(rows)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt-rtx"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_experts_equal_the_operator(
    op_onnx: Make, dtype: torch.dtype, target: str, level: str
) -> None:
    weights = stacked(dtype)
    path = experts_onnx(op_onnx, dtype, target, weights)
    # 1 and 2 tokens: chosen experts; 3 and more (9 > E): all of them. (0, 2, 7): five get none.
    for tokens, among in ((1, None), (2, None), (3, None), (7, None), (13, [0, 2, 7])):
        x = torch.randn(tokens, H, generator=torch.Generator().manual_seed(2)).to(dtype)
        w, indices = chosen(tokens, among)
        (y,) = run(path, level, x=x, w=w, indices=indices)
        expected = moe_experts_reference(x, w, indices, *weights.values())
        what = f"{tokens=} {among=} {target}"
        if dtype == torch.float32 or target == "onnxruntime":
            assert_close(y, expected, what)
        else:  # TensorRT's form keeps products of fp16 in fp16: 2e-3 relative
            assert y.dtype == dtype and normalised_error(y, expected) < 2e-6, what


@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt-rtx"])
@pytest.mark.parametrize("tokens", [1, 7])
def test_an_expert_beyond_fp16_does_not_overflow_the_sum(
    op_onnx: Make, target: str, tokens: int
) -> None:
    """Activations pass 65504; what remains after the weights fits."""
    weights = stacked(torch.float16)
    weights["gate_up"] = weights["gate_up"] * 200
    x = torch.randn(tokens, H, generator=torch.Generator().manual_seed(2)).half()
    w, indices = chosen(tokens)
    w = w / 100
    expected = moe_experts_reference(x, w, indices, *weights.values())
    inner = weights["gate_up"][indices[0, 0]].float() @ x[0].float()
    assert (inner[:I].clamp(min=0) * inner[I:]).abs().max() > 65504
    assert expected.isfinite().all() and expected.abs().max() > 1000
    (y,) = run(experts_onnx(op_onnx, torch.float16, target, weights), "ORT_ENABLE_ALL",
               x=x, w=w, indices=indices)  # fmt: skip
    assert normalised_error(y, expected) < 2e-6


def test_a_sum_beyond_fp16_is_infinite_not_wrapped(op_onnx: Make) -> None:
    weights = stacked(torch.float16)
    x = torch.full((5, H), 100.0).half()
    w, indices = chosen(5)
    expected = moe_experts_reference(x, w * 1000, indices, *weights.values())
    assert expected.isinf().any()
    for target in ("onnxruntime", "tensorrt-rtx"):
        path = experts_onnx(op_onnx, torch.float16, target, weights)
        (y,) = run(path, "ORT_ENABLE_ALL", x=x, w=w * 1000, indices=indices)
        assert torch.equal(y.isinf(), expected.isinf()) and not y.isnan().any(), target


@pytest.mark.parametrize("bad", [float("nan"), 60000.0])
def test_one_bad_token_leaves_the_others(op_onnx: Make, bad: float) -> None:
    weights = stacked(torch.float16)
    x = torch.randn(7, H, generator=torch.Generator().manual_seed(2)).half()
    w, indices = chosen(7)
    expected = moe_experts_reference(x, w, indices, *weights.values())
    x[3] = bad
    others = [0, 1, 2, 4, 5, 6]
    for target in ("onnxruntime", "tensorrt-rtx"):
        path = experts_onnx(op_onnx, torch.float16, target, weights)
        (y,) = run(path, "ORT_ENABLE_ALL", x=x, w=w, indices=indices)
        assert not y[3].isfinite().all(), target
        assert normalised_error(y[others], expected[others]) < 2e-6, target


@pytest.mark.parametrize(("target", "tokens"), [("onnxruntime", 9), ("tensorrt-rtx", 2)])
def test_experts_not_chosen_are_not_read(op_onnx: Make, target: str, tokens: int) -> None:
    """For TensorRT up to tokens * top_k = experts."""
    weights = stacked(torch.float32)
    x = torch.randn(tokens, H, generator=torch.Generator().manual_seed(2))
    w, indices = chosen(tokens, [0, 2, 5, 7])
    expected = moe_experts_reference(x, w, indices, *weights.values())
    for weight in weights.values():
        weight[[1, 3, 4, 6]] = float("nan")
    (y,) = run(experts_onnx(op_onnx, torch.float32, target, weights), "ORT_ENABLE_ALL",
               x=x, w=w, indices=indices)  # fmt: skip
    assert_close(y, expected, f"{target} {tokens=}")


def test_leading_dimensions_are_free(op_onnx: Make) -> None:
    weights = stacked(torch.float32)
    shape = ("batch", "seq")
    inputs = {
        "x": (torch.float32, (*shape, H)),
        "w": (torch.float32, (*shape, K)),
        "indices": (torch.int64, (*shape, K)),
    }
    w, indices = (x.view(2, 3, K) for x in chosen(6))
    x = torch.randn(2, 3, H)
    for target in ("onnxruntime", "tensorrt-rtx"):
        path = op_onnx(
            lambda graph, *nodes: [graph.call_function(moe_experts, nodes)],
            inputs, weights, ["new_y"], target,
        )  # fmt: skip
        (y,) = run(path, "ORT_ENABLE_ALL", x=x, w=w, indices=indices)
        assert_close(y, moe_experts_reference(x, w, indices, *weights.values()), target)


def test_the_weights_stay_where_they_are(op_onnx: Make) -> None:
    """No copy of an expert's weights in the model, in any form, and one branch for few tokens."""
    for target, kind in (("onnxruntime", "Loop"), ("tensorrt-rtx", "If")):
        path = experts_onnx(op_onnx, torch.float16, target, stacked(torch.float16))
        graph = onnx.load(path, load_external_data=False).graph
        assert [node.op_type for node in graph.node].count(kind) == 1
        inside = sum(len(t.raw_data) for t in graph.initializer)
        assert inside < 1000, f"{target}: {inside} bytes of constants"
        onnx.checker.check_model(str(path), full_check=True)


def test_nodes_of_branches_are_known_by_name(op_onnx: Make) -> None:
    """So that a backend's refusal names them, and that one it drops is noticed."""
    path = experts_onnx(op_onnx, torch.float16, "tensorrt-rtx", stacked(torch.float16))
    nodes = OnnxNodes(path)
    kinds = [nodes.by_name[name].op_type for name in nodes.carrying_data]
    assert kinds.count("MatMul") == 2 and kinds.count("ReduceMax") == 1
    assert "Shape" not in kinds and "Size" not in kinds
    assert {nodes.by_name[n].op_type for n in nodes.readers("gate_up")} == {"Gather", "MatMul"}
    # What no output of a branch needs is not missed.
    (choice,) = (node for node in nodes.model.graph.node if node.op_type == "If")
    branch = choice.attribute[0].g
    branch.node.append(onnx.helper.make_node("Relu", ["x"], ["unused"], name="unused"))
    changed = OnnxNodes(path.with_name("changed.onnx"))
    changed.path.write_bytes(nodes.model.SerializeToString())
    assert "unused" in changed.by_name and changed.carrying_data == nodes.carrying_data


ROUTES: dict[str, dict[str, Any]] = {
    "v3": {"bias": True, "scoring": "sigmoid", "groups": 4, "top_groups": 2,
           "group_score": "top2", "normalise": True, "scale": 2.5},
    "v2": {"groups": 4, "top_groups": 2},
    "v2 lite": {"scale": 16.0},
    "qwen3": {"normalise": True, "top_k": 3},
    "one expert a group": {"groups": 8, "top_groups": 3, "group_score": "top2"},
    "one group": {"groups": 4, "top_groups": 1},
}  # fmt: skip
DEFAULTS = {
    "bias": False, "top_k": 2, "scoring": "softmax", "groups": 1, "top_groups": 1,
    "group_score": "max", "normalise": False, "scale": 1.0,
}  # fmt: skip


def route_onnx(
    make: Make, dtype: torch.dtype, bias: Tensor | None, options: dict[str, Any], experts: int = E
) -> Path:
    def function(graph: torch.fx.Graph, logits: torch.fx.Node, *rest: torch.fx.Node) -> list[Any]:
        args = (logits, rest[0] if rest else None, *options.values())
        pair = graph.call_function(moe_route, args)
        return [graph.call_function(operator.getitem, (pair, i)) for i in range(2)]

    weights = {} if bias is None else {"bias": bias}
    return make(function, {"x": (dtype, ("tokens", experts))}, weights, ["w", "indices"])


def spread(weights: Tensor, indices: Tensor) -> Tensor:
    """[tokens, experts]: the order of the chosen experts is free."""
    return torch.zeros(len(weights), E).scatter(1, indices, weights)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("route", ROUTES)
def test_routing_equals_the_operator(
    op_onnx: Make, route: str, dtype: torch.dtype, level: str
) -> None:
    options = DEFAULTS | ROUTES[route]
    generator = torch.Generator().manual_seed(3)
    # All biased scores negative: an excluded group of value 0 would win (B13).
    bias = torch.randn(E, generator=generator) - 4 if options.pop("bias") else None
    path = route_onnx(op_onnx, dtype, bias, options)
    for tokens in (1, 7):
        x = (3 * torch.randn(tokens, E, generator=generator)).to(dtype)
        w, indices = run(path, level, x=x)
        expected = moe_route_reference(x, bias, **options)
        assert w.dtype == torch.float32 and indices.dtype == torch.int64
        assert torch.equal(indices.sort().values, expected[1].sort().values), f"{route} {tokens=}"
        assert_close(spread(w, indices), spread(*expected), f"{route} {tokens=}")


def test_an_excluded_group_does_not_win_with_negative_scores(op_onnx: Make) -> None:
    """B13: 8 experts, 4 groups, keep 2, top 2, bias -2: experts 0 and 1, not 3 and 6."""
    scores = torch.tensor([[0.9, 0.8, 0.05, 0.05, 0.7, 0.6, 0.1, 0.1]])
    options = DEFAULTS | ROUTES["v3"]
    del options["bias"]
    path = route_onnx(op_onnx, torch.float32, torch.full((E,), -2.0), options)
    w, indices = run(path, "ORT_ENABLE_ALL", x=scores.logit())
    assert sorted(indices[0].tolist()) == [0, 1]
    torch.testing.assert_close(w.sort().values, torch.tensor([[1.17647, 1.32353]]))


@pytest.mark.parametrize(
    ("scoring", "group_score", "right"), [("softmax", "max", [0, 1]), ("sigmoid", "top2", [2, 3])]
)
def test_the_score_of_a_group_is_its_familys(
    op_onnx: Make, scoring: str, group_score: str, right: list[int]
) -> None:
    """V2 takes the group of the best expert, V3 that of the best two."""
    scores = torch.tensor([[0.40, 0.01, 0.25, 0.24, 0.05, 0.05]])
    logits = scores.log() if scoring == "softmax" else scores.logit()
    groups = {"scoring": scoring, "groups": 3, "top_groups": 1, "group_score": group_score}
    options = DEFAULTS | groups
    del options["bias"]
    path = route_onnx(op_onnx, torch.float32, None, options, experts=6)
    w, indices = run(path, "ORT_ENABLE_ALL", x=logits)
    assert sorted(indices[0].tolist()) == right
    torch.testing.assert_close(w, scores.gather(1, indices))


def test_routing_of_batches_with_groups(op_onnx: Make) -> None:
    options = DEFAULTS | ROUTES["v2"]
    del options["bias"]

    def function(graph: torch.fx.Graph, logits: torch.fx.Node) -> list[Any]:
        pair = graph.call_function(moe_route, (logits, None, *options.values()))
        return [graph.call_function(operator.getitem, (pair, 1))]

    path = op_onnx(function, {"x": (torch.float32, ("batch", "seq", E))}, {}, ["indices"])
    x = torch.randn(2, 5, E)
    (indices,) = run(path, "ORT_ENABLE_ALL", x=x)
    expected = moe_route_reference(x, None, **options)[1]
    assert torch.equal(indices.sort().values, expected.sort().values)
