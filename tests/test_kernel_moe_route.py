"""Routing against transformers' routers, and the values of known faults."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from seekforge.kernels.moe_route import moe_route
from seekforge.kernels.tolerance import assert_close

B, S, H = 2, 7, 24


def routed(*args: Any) -> tuple[Tensor, Tensor]:
    """weights and indices of [tokens, top_k], by ascending expert."""
    weights, indices = (x.flatten(0, -2) for x in moe_route(*args))
    assert (weights.dtype, indices.dtype) == (torch.float32, torch.int64)
    indices, order = indices.sort(-1)
    return weights.gather(-1, order), indices


def assert_same(router: nn.Module, x: Tensor, bias: Tensor | None, *settings: Any) -> None:
    logits, right_weights, right_indices = router(x)
    right_indices, order = right_indices.sort(-1)
    weights, indices = routed(logits.view(*x.shape[:-1], -1), bias, *settings)
    assert torch.equal(indices, right_indices)
    assert_close(weights, right_weights.float().gather(-1, order), f"{settings}")


def router_of(family: str, kind: type[nn.Module], **settings: Any) -> tuple[nn.Module, Tensor]:
    """A router with weights of standard deviation 0.5, and hidden states."""
    torch.manual_seed(0)
    router = kind(AutoConfig.for_model(family, hidden_size=H, num_attention_heads=4, **settings))
    router.requires_grad_(False).weight.normal_(0, 0.5)
    return router, torch.randn(B, S, H)


# experts, groups, groups kept, experts chosen
GROUPS = [(8, 4, 2, 2), (12, 3, 1, 4), (10, 5, 4, 3), (9, 1, 1, 3), (12, 4, 4, 5)]


@pytest.mark.parametrize("experts, groups, kept, top_k", GROUPS)
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("bias", [0.0, -2.0])
def test_deepseek_v3(
    experts: int, groups: int, kept: int, top_k: int, normalise: bool, bias: float
) -> None:
    """B16: the scale applies, divided by the sum or not. B13: also if all biases are negative."""
    router, x = router_of(
        "deepseek_v3", DeepseekV3TopkRouter, n_routed_experts=experts, n_group=groups,
        topk_group=kept, num_experts_per_tok=top_k, norm_topk_prob=normalise,
        routed_scaling_factor=2.5,
    )  # fmt: skip
    router.e_score_correction_bias.normal_(bias, 0.3)
    correction = router.e_score_correction_bias
    settings = (top_k, "sigmoid", groups, kept, "top2", normalise, 2.5)
    assert_same(router, x, correction, *settings)


@pytest.mark.parametrize("experts, groups, kept, top_k", [*GROUPS, (8, 8, 3, 2)])  # one in a group
@pytest.mark.parametrize("scale", [1.0, 16.0])
def test_deepseek_v2(experts: int, groups: int, kept: int, top_k: int, scale: float) -> None:
    method = "group_limited_greedy" if groups > 1 else "greedy"
    router, x = router_of(
        "deepseek_v2", DeepseekV2TopkRouter, n_routed_experts=experts, n_group=groups,
        topk_group=kept, num_experts_per_tok=top_k, routed_scaling_factor=scale,
        topk_method=method,
    )  # fmt: skip
    assert_same(router, x, None, top_k, "softmax", groups, kept, "max", False, scale)


@pytest.mark.parametrize("normalise", [True, False])
def test_qwen3_moe(normalise: bool) -> None:
    router, x = router_of(
        "qwen3_moe", Qwen3MoeTopKRouter, num_experts=11, num_experts_per_tok=3,
        norm_topk_prob=normalise,
    )  # fmt: skip
    assert_same(router, x, None, 3, "softmax", 1, 1, "max", normalise, 1.0)


def test_excluded_groups_never_win() -> None:
    """B13: with a mask of 0, experts 3 and 6 would win over the negative biased scores."""
    scores = torch.tensor([0.9, 0.8, 0.05, 0.05, 0.7, 0.6, 0.1, 0.1])
    bias = torch.full((8,), -2.0)
    weights, indices = routed(scores.logit()[None], bias, 2, "sigmoid", 4, 2, "top2", True, 2.5)
    assert indices.tolist() == [[0, 1]]
    torch.testing.assert_close(weights, torch.tensor([[1.32353, 1.17647]]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("group_score, chosen", [("max", [0, 1]), ("top2", [2, 3])])
def test_group_scores(group_score: str, chosen: list[int]) -> None:
    """B15: V2 keeps the group of the best expert, V3 that of the best two."""
    scores = torch.tensor([[0.40, 0.01, 0.25, 0.24, 0.05, 0.05]])
    scoring = "softmax" if group_score == "max" else "sigmoid"
    logits = scores.log() if scoring == "softmax" else scores.logit()
    _, indices = routed(logits, None, 2, scoring, 3, 1, group_score, False, 1.0)
    assert indices.tolist() == [chosen]


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_scale_and_normalise(scoring: str, scale: float, normalise: bool) -> None:
    """B16: scores over all experts, the optional division, then always the scale."""
    logits = torch.tensor([[2.0, -1.0, 0.5, 0.0]])
    weights, indices = routed(logits, None, 2, scoring, 1, 1, "max", normalise, scale)
    right = (logits.softmax(-1) if scoring == "softmax" else logits.sigmoid())[:, [0, 2]]
    if normalise:
        right = right / right.sum()
    assert indices.tolist() == [[0, 2]]
    assert_close(weights, right * scale, f"{scoring} {scale} {normalise}")


def test_bias_chooses_and_does_not_weigh() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    bias = torch.tensor([0.0, 0.0, 1.0])
    weights, indices = routed(logits, bias, 1, "sigmoid", 1, 1, "max", False, 1.0)
    assert indices.tolist() == [[2]]
    assert torch.equal(weights, torch.sigmoid(logits[:, 2:]))


def test_one_expert_a_group() -> None:
    """A group's two best are its one expert then: as without groups."""
    torch.manual_seed(0)
    logits, bias = torch.randn(B, S, 6), torch.randn(6) - 2
    for score in ("max", "top2"):
        grouped = routed(logits, bias, 2, "sigmoid", 6, 3, score, True, 2.5)
        plain = routed(logits, bias, 2, "sigmoid", 1, 1, "max", True, 2.5)
        assert all(map(torch.equal, grouped, plain))


@pytest.mark.parametrize("experts", [8, 256])  # topk sorts in another way above 64 * top_k
def test_ties_fall_as_in_topk(experts: int) -> None:
    logits = torch.arange(3.0).repeat(5, experts)[:, :experts]
    right = logits.sigmoid().topk(2, -1).indices.sort(-1).values
    assert torch.equal(routed(logits, None, 2, "sigmoid", 1, 1, "max", True, 1.0)[1], right)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_computed_in_fp32(dtype: torch.dtype) -> None:
    logits = (4 * torch.randn(B, S, 12, generator=torch.Generator().manual_seed(1))).to(dtype)
    settings = (None, 3, "softmax", 1, 1, "max", True, 1.0)
    assert all(map(torch.equal, routed(logits, *settings), routed(logits.float(), *settings)))


def test_fake_has_the_shapes() -> None:
    logits = torch.empty(B, S, 8, dtype=torch.bfloat16, device="meta")
    weights, indices = moe_route(logits, None, 3, "softmax", 1, 1, "max", False, 1.0)
    assert (weights.shape, weights.dtype) == ((B, S, 3), torch.float32)
    assert (indices.shape, indices.dtype) == ((B, S, 3), torch.int64)
