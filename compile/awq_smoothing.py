"""Smoothing as factors: for each weight, what its rows and its columns are multiplied by.

In: a scale group and the scales of its input channels. Out: `Factors` by parameter name, which
leave the layer's output as it is (before rounding) and are applied tensor by tensor.
Knows nothing of how the scales were chosen.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from seekforge.models.awq_groups import Rows, ScaleGroup


@dataclass(frozen=True, slots=True)
class Heads:
    """What of the attention's shape decides how rows of v, or of kv_b, meet columns of o.

    repeats: query heads for each KV head. nope: dimensions of a head's key in kv_b (0: none).
    """

    kv_heads: int
    repeats: int
    v_head_dim: int
    nope: int = 0


@dataclass(frozen=True, slots=True)
class Factors:
    """Multipliers of a weight, fp32; None: ones. rows [..., out_features] (of a norm or a bias: its
    elements), columns [..., in_features]."""

    rows: Tensor | None = None
    columns: Tensor | None = None

    def times(self, other: Factors) -> Factors:
        """Both, one after the other."""
        return Factors(_product(self.rows, other.rows), _product(self.columns, other.columns))

    def apply(self, weight: Tensor) -> Tensor:
        """The weight multiplied in fp32 and rounded once to its dtype."""
        wide = weight.float()
        if self.columns is not None:
            wide = wide * self.columns[..., None, :]
        if self.rows is not None:
            # A vector's elements are its rows; stacked experts have [experts, out_features].
            vector = wide.ndim == self.rows.ndim
            wide = wide * (self.rows if vector else self.rows[..., None])
        return wide.to(weight.dtype)


def tied(rows: Rows, channels: Tensor, heads: Heads) -> Tensor:
    """Values of input channels [..., in_features], made equal where one producer's row feeds
    several of them: their mean over the query heads of a KV head."""
    if rows != "kv_heads" or heads.repeats == 1:
        return channels
    shape = (heads.kv_heads, heads.repeats, heads.v_head_dim)
    return channels.view(shape).mean(1, keepdim=True).expand(shape).flatten()


def smoothing(
    group: ScaleGroup, scales: Tensor, heads: Heads, parameters: Collection[str]
) -> dict[str, Factors]:
    """The factors of one group. scales: [..., in_features] of its readers, positive and tied.

    parameters: all names of the layer; the producer's bias is scaled with its rows.
    """
    factors = {name: Factors(columns=scales) for name in group.readers}
    rows = _producer_rows(group.rows, scales.reciprocal(), heads)
    factors[group.producer] = Factors(rows=rows)
    bias = group.producer.removesuffix("weight") + "bias"
    if bias in parameters:
        factors[bias] = Factors(rows=rows)
    return factors


def merged(parts: Collection[Mapping[str, Factors]]) -> dict[str, Factors]:
    """All groups' factors together: a weight may be the reader of one and the producer of
    another."""
    total: dict[str, Factors] = {}
    for part in parts:
        for name, factors in part.items():
            total[name] = total[name].times(factors) if name in total else factors
    return total


def _producer_rows(rows: Rows, inverse: Tensor, heads: Heads) -> Tensor:
    if rows == "kv_heads":
        return inverse.view(heads.kv_heads, heads.repeats, heads.v_head_dim)[:, 0].flatten()
    if rows == "values":
        values = inverse.view(heads.kv_heads, heads.v_head_dim)
        keys = torch.ones(heads.kv_heads, heads.nope, dtype=inverse.dtype)
        return torch.cat((keys, values), 1).flatten()
    if rows == "up":
        return torch.cat((torch.ones_like(inverse), inverse), -1)
    return inverse


def _product(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a * b
