"""Configurations of the mixture of experts' kernels; the rows of h200.json and their defaults.

A row serves up to `tokens` tokens and `load` pairs per expert, tokens * top_k / experts (null: any
number); the first that fits is taken. A row with k_warps is a FewConfig, another without m one for
the matrix-vector kernels.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from seekforge.kernels.tuning import first


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """n: rows of a matrix in a program (of gate and of up each); k: columns read at a time (words
    of eight with INT4 weights); warps: of a program. For the first kernel, then for the second."""

    n: int
    k: int
    warps: int
    down_n: int
    down_k: int
    down_warps: int


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """m: pairs of a tile; n: rows of a matrix in a program (of gate and of up each); k: columns at
    a time (with INT4 weights always one group); warps, stages: Triton's; for the first product,
    then for the second."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    down_n: int
    down_k: int
    down_warps: int
    down_stages: int


@dataclass(frozen=True, slots=True)
class FewConfig:
    """For INT4 weights. m: pairs of a tile, 0 for pairs apart; n: rows of a matrix in a program (of
    gate and of up each), 16 to 128 and 16 or more for each of row_warps; k_warps: warps that share
    the columns, `unroll` units of 128 each at a time; the same for the second product."""

    m: int
    n: int
    row_warps: int
    k_warps: int
    unroll: int
    down_n: int
    down_row_warps: int
    down_k_warps: int
    down_unroll: int


Config = GemvConfig | GemmConfig | FewConfig
ONE = GemvConfig(4, 128, 1, 1, 128, 1)
DEFAULT = GemmConfig(16, 64, 64, 4, 4, 64, 64, 4, 4)


@functools.lru_cache(maxsize=4096)
def moe_config(op: str, *, tokens: int, pairs: int, experts: int) -> Config:
    row = first(op, tokens=tokens, load=pairs / experts)
    return config_of(row) if row else DEFAULT


def config_of(row: dict[str, Any]) -> Config:
    """A row of the file as a configuration."""
    kind: type[Config] = FewConfig if "k_warps" in row else GemmConfig if "m" in row else GemvConfig
    return kind(**{f.name: row[f.name] for f in fields(kind) if f.name in row})


def fitted(config: GemmConfig, dtype: torch.dtype) -> GemmConfig:
    """fp32 tiles, which no matrix unit multiplies exactly, are smaller."""
    if dtype is not torch.float32:
        return config
    return replace(
        config, m=min(config.m, 32), n=32, k=32, warps=4, stages=2, down_n=32, down_k=32,
        down_warps=4, down_stages=2,
    )  # fmt: skip
