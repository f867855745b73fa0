"""The searches of AWQ: never worse than plain rounding, safe with dead channels, and fair."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from seekforge.compile.awq import (
    Collector,
    Recipe,
    Statistics,
    normalised,
    output_errors,
    relative_error,
    search_clip,
    search_scales,
)
from seekforge.kernels.int4 import fake_quantise

N, K, T = 32, 256, 96
RECIPES = [Recipe(128), Recipe(64, symmetric=False)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(tokens: int = T, outliers: bool = True) -> Tensor:
    x = draw(tokens, K, seed=1)
    if outliers:
        x[:, 7] *= 50
        x[:, 100:104] *= 20
    return x


def seen(x: Tensor) -> Statistics:
    collector = Collector(x.shape[-1])
    for batch in x.split(40):
        collector.add(batch)
    return collector.statistics()


def test_statistics_of_few_tokens_are_the_tokens() -> None:
    x = inputs()
    statistics = seen(x)
    assert statistics.tokens == T
    assert torch.equal(statistics.rows, x)
    assert torch.allclose(statistics.mean_abs, x.abs().mean(0), rtol=1e-5)


def test_mixed_rows_estimate_the_gram_matrix() -> None:
    """Loss from 512 mixed rows of 4,000 tokens, against all tokens."""
    x = inputs(4000)
    statistics = seen(x)
    assert statistics.rows.shape == (512, K) and statistics.tokens == 4000
    weight, recipe = draw(N, K), Recipe(128)
    for scales in (None, normalised(statistics.mean_abs, 0.5)):
        estimate = output_errors(weight, statistics.rows, recipe, scales).sum()
        exact = output_errors(weight, x, recipe, scales).sum()
        assert abs(estimate / exact - 1) < 0.1


@pytest.mark.parametrize("recipe", RECIPES)
def test_errors_are_those_of_the_rounded_weight(recipe: Recipe) -> None:
    x, weight = inputs(), draw(N, K)
    scales = 0.5 + torch.rand(K)
    rounded = fake_quantise(weight * scales, recipe.group_size, recipe.symmetric) / scales
    right = (x @ (rounded - weight).T).square().sum(0)
    assert torch.allclose(output_errors(weight, x, recipe, scales), right, rtol=1e-3)
    rounded = fake_quantise(weight, recipe.group_size, recipe.symmetric)
    right = (x @ (rounded - weight).T).square().sum() / (x @ weight.T).square().sum()
    assert relative_error(weight, x, recipe) == pytest.approx(float(right), rel=1e-3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_search_protects_outlier_channels(recipe: Recipe) -> None:
    weight, statistics = draw(N, K), seen(inputs())
    found = search_scales([weight], [statistics], recipe)
    assert 0 < found.ratio < 1 and found.error < 0.6 * found.plain_error
    assert found.scales[7] > 2 * found.scales.median()
    again = output_errors(weight, statistics.rows, recipe, found.scales).sum()
    size = (statistics.rows @ weight.T).square().sum()
    assert found.error == pytest.approx(float(again / size), rel=1e-4)


def test_the_scale_serves_all_weights_that_share_it() -> None:
    """One weight's rounding error is a thousand times the other's: it decides."""
    big, small, statistics = 30 * draw(N, K), draw(N, K, seed=5), seen(inputs())
    big[:, ::128] = 300  # no scale helps the groups with this
    together = search_scales([big, small], [statistics] * 2, Recipe(128))
    alone = search_scales([big], [statistics], Recipe(128))
    assert together.ratio == alone.ratio


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dead_channels_and_zero_groups(recipe: Recipe, dtype: torch.dtype) -> None:
    """B31: finite everywhere, zero groups exactly zero, no worse than plain rounding."""
    weight = (0.1 * draw(N, K)).to(dtype)
    weight[3, :128] = 0
    weight[9, 40:50] = 1e-8  # 0 in fp16
    x = inputs()
    x[:, 5] = 0
    statistics = seen(x)
    found = search_scales([weight], [statistics], recipe)
    assert found.scales.isfinite().all() and (found.scales > 0).all() and found.scales[5] == 1
    assert found.error <= found.plain_error and found.ratio > 0
    smoothed, rows = weight.float() * found.scales, statistics.rows / found.scales
    clip = search_clip(smoothed, rows, recipe)
    assert clip.isfinite().all()
    clipped = relative_error(smoothed, rows, recipe, clip)
    assert clipped <= relative_error(smoothed, rows, recipe)
    rounded = fake_quantise(smoothed, recipe.group_size, recipe.symmetric, clip)
    assert (rounded[3, :128] == 0).all() and rounded.isfinite().all()


def test_inputs_that_are_always_zero() -> None:
    found = search_scales([draw(N, K)], [seen(torch.zeros(9, K))], Recipe(128))
    assert (found.scales == 1).all() and found.error == 0


def test_experts_without_tokens_are_neutral() -> None:
    empty = Collector(K).statistics()
    assert empty.rows.shape == (0, K)
    found = search_scales([draw(N, K)], [empty], Recipe(128))
    assert (found.scales == 1).all() and found.ratio == 0
    # Beside an expert with tokens it has no say.
    weights, busy = [draw(N, K), draw(N, K, seed=4)], seen(inputs())
    both = search_scales(weights, [busy, empty], Recipe(128))
    alone = search_scales(weights[:1], [busy], Recipe(128))
    assert torch.equal(both.scales, alone.scales) and both.error == pytest.approx(alone.error)
    clip = search_clip(weights[1], empty.rows, Recipe(128))
    assert torch.equal(clip, weights[1].view(N, 2, 128).abs().amax(-1))


def test_scales_are_centred_and_bounded() -> None:
    """The naive formula gives [nan, inf, inf] for means of [0, .5, 2]."""
    assert normalised(torch.tensor([0.0, 0.5, 2.0]), 1.0).tolist() == pytest.approx([1, 0.5, 2])
    wide = normalised(torch.tensor([1e-30, 1.0, 1e30]), 0.95)
    assert wide.max() <= 1e4 and wide.min() >= 1e-4


@pytest.mark.parametrize("recipe", RECIPES)
def test_clipping_cuts_outliers_that_cost_more_than_they_give(recipe: Recipe) -> None:
    weight = draw(N, K)
    weight[:, 50] = 8.0  # on a channel that is nearly silent
    x = inputs(outliers=False)
    x[:, 50] *= 1e-3
    statistics = seen(x)
    clip = search_clip(weight, statistics.rows, recipe)
    group = 50 // recipe.group_size
    assert (clip[:, group] < 7).all()
    plain = relative_error(weight, statistics.rows, recipe)
    assert relative_error(weight, statistics.rows, recipe, clip) < 0.7 * plain


def test_clipping_is_judged_by_whole_rows() -> None:
    """Two groups with equal inputs: their errors add up, and what helps each may hurt the sum."""
    half = draw(T, 32)
    statistics = seen(torch.cat((half, half), 1))
    weight = draw(512, 64)
    clip = search_clip(weight, statistics.rows, Recipe(32))
    plain = output_errors(weight, statistics.rows, Recipe(32))
    clipped = output_errors(weight, statistics.rows, Recipe(32), clip=clip)
    assert (clipped <= plain * (1 + 1e-4)).all()
    assert clipped.sum() < plain.sum()
