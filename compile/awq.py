"""The searches of AWQ, on tensors: scales of input channels, and clipping of weights.

In: weights of linear layers and `Statistics` of their inputs. Out: scales [in_features] that make
rounding to INT4 cost least in the layers' outputs, and bounds [out_features, groups] beyond which
weights are clipped. Neither result is ever worse than plain rounding on the given statistics, which
both grids contain. Knows nothing of models or files.
Source: Lin et al., "AWQ: Activation-aware Weight Quantization", 2023 (scale and clip grids).

The loss of a rounded weight W' is |X (W' - W)^T|^2 over all tokens X. It depends on X only through
X^T X, so up to `ROWS` tokens are kept as they are, and more are mixed into `ROWS` rows S X by
random signs S: E[(S X)^T (S X)] = X^T X. Every token counts, memory doesn't grow with the text, and
all candidates are judged by the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from seekforge.kernels.int4 import Int4, clipped_groups, dequantise, fake_quantise, grouped

ROWS = 512
POINTS = 20  # of the grid over the ratio: 0, 0.05, ... 0.95
SHRINKS = tuple(1 - 0.05 * i for i in range(11))  # of the clip grid: 1, 0.95, ... 0.5
MAX_SCALE = 1e4  # either way; keeps products within the range of fp16
CHUNK = 1 << 20  # weights at a time: 4 MB, which stay in the processor's caches


@dataclass(frozen=True, slots=True)
class Recipe:
    """How weights are rounded. dtype: of the stored scales."""

    group_size: int
    symmetric: bool = True
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Statistics:
    """Inputs of a linear layer: tokens seen, mean |x| of each channel [in_features], and rows
    [<= ROWS, in_features] with rows^T rows (an unbiased estimate of) X^T X. grams: X^T X itself,
    of consecutive blocks of channels."""

    tokens: int
    mean_abs: Tensor
    rows: Tensor
    grams: tuple[Tensor, ...] = ()


class Collector:
    """Gathers the statistics of one input, batch by batch.

    rows: kept at most. block: channels of one Gram matrix; 0: none is gathered.
    """

    def __init__(self, in_features: int, rows: int = ROWS, block: int = 0, seed: int = 0) -> None:
        sizes = (
            [min(block, in_features - at) for at in range(0, in_features, block)] if block else []
        )
        self._grams = tuple(torch.zeros(size, size) for size in sizes)
        self.tokens = 0
        self._sum_abs = torch.zeros(in_features)
        self._kept: list[Tensor] = []
        self._mixed: Tensor | None = None
        self._rows = rows
        self._random = torch.Generator().manual_seed(seed)

    def add(self, x: Tensor) -> None:
        """x: [..., in_features], any float dtype."""
        x = x.detach().reshape(-1, x.shape[-1]).float()
        self.tokens += x.shape[0]
        self._sum_abs += x.abs().sum(0)
        if self._grams:
            parts = torch.split(x, [len(gram) for gram in self._grams], 1)
            for gram, part in zip(self._grams, parts, strict=True):
                gram.addmm_(part.T, part)
        if self._mixed is None and self.tokens <= self._rows:
            self._kept.append(x.clone())
            return
        if self._mixed is None:
            x = torch.cat((*self._kept, x))
            self._kept = []
            self._mixed = torch.zeros(self._rows, x.shape[1])
        signs = torch.randint(0, 2, (self._rows, x.shape[0]), generator=self._random)
        self._mixed.addmm_(signs.float() * 2 - 1, x, alpha=self._rows**-0.5)

    def statistics(self) -> Statistics:
        rows = self._mixed
        if rows is None:
            rows = torch.cat((*self._kept, self._sum_abs.new_empty(0, len(self._sum_abs))))
        return Statistics(self.tokens, self._sum_abs / max(1, self.tokens), rows, self._grams)


@dataclass(frozen=True, slots=True)
class ScaleSearch:
    """scales [in_features]; ratio: of the best grid point, 0 is plain rounding. loss, plain_loss:
    |X (W' - W)^T|^2 over all weights of the group, with these scales and with none; size:
    |X W^T|^2."""

    scales: Tensor
    ratio: float
    loss: float
    plain_loss: float
    size: float

    @property
    def error(self) -> float:
        return self.loss / (self.size or 1.0)

    @property
    def plain_error(self) -> float:
        return self.plain_loss / (self.size or 1.0)


def search_scales(
    weights: Sequence[Tensor],
    inputs: Sequence[Statistics],
    recipe: Recipe,
    tie: Callable[[Tensor], Tensor] = lambda channels: channels,
    points: int = POINTS,
) -> ScaleSearch:
    """Scales of the input that `weights` [out_features, in_features] share.

    inputs: for each weight what it saw (experts see different tokens). tie: makes channels equal
    that must share a scale. Without any token the scales are ones and the errors 0.
    """
    distinct = {id(seen): seen for seen in inputs}.values()
    tokens = sum(seen.tokens for seen in distinct)
    ones = torch.ones(weights[0].shape[-1])
    if not tokens:
        return ScaleSearch(ones, 0.0, 0.0, 0.0, 0.0)
    total = torch.stack([seen.mean_abs * (seen.tokens / tokens) for seen in distinct]).sum(0)
    mean_abs = tie(total)
    pairs = list(zip(weights, inputs, strict=True))
    size = sum(squares(weight, seen.rows) for weight, seen in pairs)
    best: ScaleSearch | None = None
    plain = 0.0
    for point in range(points):
        scales = normalised(mean_abs, point / points)
        loss = sum(float(output_errors(w, seen.rows, recipe, scales).sum()) for w, seen in pairs)
        if point == 0:
            plain = loss
        if best is None or loss < best.loss:
            best = ScaleSearch(scales, point / points, loss, plain, size)
    assert best is not None, "an empty grid"
    return best


def normalised(mean_abs: Tensor, ratio: float) -> Tensor:
    """mean_abs^ratio, divided by sqrt(largest * smallest); channels that are always 0 get 1."""
    live = mean_abs > 0
    if not bool(live.any()) or ratio == 0:
        return torch.ones_like(mean_abs)
    logs = ratio * mean_abs[live].double().log()
    scales = torch.ones_like(mean_abs)
    scales[live] = (logs - (logs.amax() + logs.amin()) / 2).exp().float()
    return scales.clamp_(1 / MAX_SCALE, MAX_SCALE)


def search_clip(weight: Tensor, rows: Tensor, recipe: Recipe) -> Tensor:
    """Bounds [out_features, groups] of the magnitudes in a weight [out_features, in_features].

    rows: of the statistics of its input, both already smoothed. Each group is searched by itself; a
    row keeps its bounds only where its output, with all groups together, gets nearer. A bound
    without effect is the group's largest magnitude.
    """
    groups = weight.shape[-1] // recipe.group_size
    by_group = grouped(rows, groups).transpose(0, 1)  # [groups, tokens, group_size]
    gram = by_group.transpose(1, 2) @ by_group  # [groups, group_size, group_size]
    bounds = torch.empty(weight.shape[0], groups)
    for part, chunk in _chunks(weight):
        values = clipped_groups(chunk, recipe.group_size)
        largest = values.abs().amax(-1)
        best, bound = torch.full_like(largest, float("inf")), largest.clone()
        for shrink in SHRINKS:
            clip = largest * shrink
            error = _rounding_error(chunk, recipe, clip)
            by_group = grouped(error, groups).transpose(0, 1)  # [groups, out_features, group_size]
            loss = ((by_group @ gram) * by_group).sum(-1).T
            better = loss < best
            best, bound = torch.where(better, loss, best), torch.where(better, clip, bound)
        plain, clipped = (
            (rows @ _rounding_error(chunk, recipe, clip).T).square().sum(0)
            for clip in (None, bound)
        )
        bounds[part] = torch.where((clipped < plain)[:, None], bound, largest)
    return bounds


def output_errors(
    weight: Tensor,
    rows: Tensor,
    recipe: Recipe,
    scales: Tensor | None = None,
    clip: Tensor | None = None,
) -> Tensor:
    """|X (W' - W)^T|^2 of each output feature [out_features]; W' is W rounded after its columns
    were multiplied by `scales`, and divided by them again."""
    if scales is not None:
        rows = rows / scales
    errors = torch.empty(weight.shape[0])
    for part, chunk in _chunks(weight):
        scaled = chunk if scales is None else chunk * scales
        error = _rounding_error(scaled, recipe, None if clip is None else clip[part])
        errors[part] = (rows @ error.T).square().sum(0)
    return errors


def error_of(weight: Tensor, rounded: Int4, rows: Tensor) -> float:
    """|X (W' - W)^T|^2 of a weight and what it was rounded to."""
    difference = dequantise(rounded, torch.float32).sub_(weight)
    return float((rows @ difference.T).square().sum())


def relative_error(
    weight: Tensor, rows: Tensor, recipe: Recipe, clip: Tensor | None = None
) -> float:
    """|X (W' - W)^T|^2 / |X W^T|^2 of one weight."""
    loss = float(output_errors(weight, rows, recipe, clip=clip).sum())
    return loss / (squares(weight, rows) or 1.0)


def _rounding_error(weight: Tensor, recipe: Recipe, clip: Tensor | None) -> Tensor:
    rounded = fake_quantise(weight, recipe.group_size, recipe.symmetric, clip, recipe.dtype)
    return rounded.sub_(weight)


def squares(weight: Tensor, rows: Tensor) -> float:
    """|X W^T|^2."""
    return sum(float((rows @ chunk.T).square().sum()) for _, chunk in _chunks(weight))


def _chunks(weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows of a weight in fp32, about `CHUNK` elements at a time."""
    step = max(1, CHUNK // weight.shape[-1])
    for start in range(0, weight.shape[0], step):
        part = slice(start, start + step)
        yield part, weight[part].float()
