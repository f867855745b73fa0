"""One scale group of one layer: smoothing, clipping and, where asked for, error feedback, together.

In: the weights that share an input, and statistics of it. Out: their scales, bounds and INT4
weights, and the losses of each step. Knows nothing of modules or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from seekforge.compile.awq import (
    Recipe,
    Statistics,
    error_of,
    output_errors,
    search_clip,
    search_scales,
)
from seekforge.compile.awq_feedback import round_with_feedback
from seekforge.compile.awq_smoothing import Heads, tied
from seekforge.kernels.int4 import Int4, grouped, quantise
from seekforge.models.awq_groups import UNCLIPPED, ScaleGroup


@dataclass(frozen=True, slots=True)
class Reader:
    name: str
    weight: Tensor
    inputs: Statistics


@dataclass(frozen=True, slots=True)
class Outcome:
    """Scales, bounds for each reader, its INT4 weight if rounded with feedback, and sums over the
    readers; losses as in `ScaleSearch`."""

    scales: Tensor
    clips: list[Tensor]
    packed: list[Int4]
    ratio: float
    plain_loss: float
    scaled_loss: float
    loss: float
    size: float
    clipped: int
    groups: int


def search_group(
    readers: Sequence[Reader], recipe: Recipe, group: ScaleGroup, heads: Heads
) -> Outcome:
    found = search_scales(
        [reader.weight for reader in readers],
        [reader.inputs for reader in readers],
        recipe,
        tie=lambda channels: tied(group.rows, channels, heads),
    )
    clips, packed, loss, clipped = [], list[Int4](), 0.0, 0
    for reader in readers:
        smoothed, rows = reader.weight * found.scales, reader.inputs.rows / found.scales
        largest = grouped(smoothed.abs(), smoothed.shape[-1] // recipe.group_size).amax(-1)
        clip = largest
        if reader.name not in UNCLIPPED:
            clip = search_clip(smoothed, rows, recipe)
        clips.append(clip)
        clipped += int((clip < largest).sum())
        nearest = float(output_errors(smoothed, rows, recipe, clip=clip).sum())
        if reader.inputs.grams:
            grams = _scaled(reader.inputs, found.scales)
            result = round_with_feedback(smoothed, grams, recipe, clip)
            fed_back = error_of(smoothed, result, rows)
            if fed_back > nearest:  # few tokens beside many channels: it fitted noise
                result = quantise(smoothed, recipe.group_size, recipe.symmetric, clip, recipe.dtype)
            packed.append(result)
            nearest = min(nearest, fed_back)
        loss += nearest
    return Outcome(
        found.scales, clips, packed, found.ratio, found.plain_loss, found.loss, loss, found.size,
        clipped, sum(clip.numel() for clip in clips),
    )  # fmt: skip


def _scaled(inputs: Statistics, scales: Tensor) -> list[Tensor]:
    """The Gram matrices of the input divided by `scales`."""
    parts = torch.split(scales, [len(gram) for gram in inputs.grams])
    return [gram / (s[:, None] * s) for gram, s in zip(inputs.grams, parts, strict=True)]


def matrices(weight: Tensor) -> list[Tensor]:
    """The matrices of a weight: of each expert, or the one."""
    return list(weight) if weight.ndim == 3 else [weight]
