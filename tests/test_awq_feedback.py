"""Rounding with error feedback against plain rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from seekforge.compile.awq import Recipe, search_clip
from seekforge.compile.awq_feedback import round_with_feedback
from seekforge.kernels.int4 import dequantise, quantise

N, K, T = 24, 160, 700
RECIPES = [Recipe(32), Recipe(32, symmetric=False), Recipe(160, dtype=torch.bfloat16)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def correlated(tokens: int = T) -> Tensor:
    """Inputs that lie near 40 directions."""
    return draw(tokens, 40, seed=1) @ draw(40, K, seed=2) + 0.1 * draw(tokens, K, seed=3)


def loss(weight: Tensor, rounded: Tensor, x: Tensor) -> float:
    return float((x @ (rounded - weight).T).square().sum())


@pytest.mark.parametrize("recipe", RECIPES)
def test_output_error_falls(recipe: Recipe) -> None:
    """Also on inputs that the Gram matrix doesn't hold."""
    weight, x = draw(N, K), correlated()
    seen, unseen = x[:500], x[500:]
    for clip in (None, search_clip(weight, seen, recipe)):
        packed = round_with_feedback(weight, [seen.T @ seen], recipe, clip)
        plain = quantise(weight, recipe.group_size, recipe.symmetric, clip, recipe.dtype)
        assert torch.equal(packed.scales, plain.scales)
        for inputs in (seen, unseen):
            rounded, nearest = (dequantise(w, torch.float32) for w in (packed, plain))
            assert loss(weight, rounded, inputs) < 0.5 * loss(weight, nearest, inputs)


@pytest.mark.parametrize("recipe", RECIPES)
def test_independent_inputs_give_plain_rounding(recipe: Recipe) -> None:
    weight = draw(N, K)
    plain = quantise(weight, recipe.group_size, recipe.symmetric, dtype=recipe.dtype)
    for gram in (torch.eye(K), torch.zeros(K, K), torch.diag(torch.arange(1.0, K + 1))):
        packed = round_with_feedback(weight, [gram], recipe)
        assert torch.equal(packed.qweight, plain.qweight)


def test_dead_channels_and_zero_rows() -> None:
    """B31"""
    weight, x = draw(N, K), correlated()
    x[:, 5] = 0
    weight[3] = 0
    packed = round_with_feedback(weight, [x.T @ x], Recipe(32))
    decoded = dequantise(packed)
    assert decoded.isfinite().all() and (decoded[3] == 0).all()


def test_fewer_tokens_than_channels() -> None:
    weight, x = draw(N, K), correlated(20)
    packed = round_with_feedback(weight, [x.T @ x], Recipe(32))
    assert loss(weight, dequantise(packed), x) < loss(weight, dequantise(quantise(weight, 32)), x)


def test_feedback_within_blocks() -> None:
    """Two blocks, one of odd size: better than none, and each by itself."""
    weight, x = draw(N, K), correlated()
    parts = x.split([101, K - 101], 1)
    packed = round_with_feedback(weight, [part.T @ part for part in parts], Recipe(32))
    whole = round_with_feedback(weight, [x.T @ x], Recipe(32))
    losses = [loss(weight, dequantise(w), x) for w in (whole, packed, quantise(weight, 32))]
    assert losses[0] < losses[1] < losses[2]
    zero = torch.block_diag(*(part.T @ part for part in parts))
    same = round_with_feedback(weight, [zero], Recipe(32))
    assert float((same.qweight != packed.qweight).float().mean()) < 0.1  # damping differs
