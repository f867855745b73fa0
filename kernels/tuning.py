"""Configurations of the attention kernels, measured on an H200 and kept as data.

A configuration is chosen from what the host knows without waiting for the device: dtypes, shapes
(a block table's width bounds the context) and the number of multiprocessors. Shapes or processors
without a row of their own take the nearest row above; the last row of a table is the default.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Config:
    """block_m: rows (query heads x new tokens) of a program; block_n: tokens of the context it
    reads at a time; splits: programs a context is shared among; warps, stages: Triton's num_warps
    and num_stages."""

    block_m: int
    block_n: int
    splits: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Decode:
    """A row of the table below; waves: programs per multiprocessor aimed at by splitting."""

    block_n: int
    waves: float
    warps: int
    stages: int


# dtype or kind of the pools -> rows of (most tiles per multiprocessor, smallest block, Decode).
# Blocks below 64 tokens cost more instructions a token, so there two programs share a processor.
DECODE: dict[str, list[tuple[float, int, Decode]]] = {
    "bfloat16": [
        (0.5, 1, Decode(64, 1.0, 4, 3)),
        (1.2, 64, Decode(128, 1.0, 4, 3)),
        (1.2, 1, Decode(128, 2.0, 4, 2)),
        (math.inf, 1, Decode(64, 1.0, 4, 4)),
    ],
    "int8": [(math.inf, 1, Decode(128, 1.0, 4, 4))],
    "fp8": [(math.inf, 1, Decode(128, 1.0, 4, 4))],
    "float32": [(math.inf, 1, Decode(32, 2.0, 4, 2))],
}


def decode_config(
    kind: str, *, tiles: int, context: int, block_size: int, dim: int, processors: int
) -> Config:
    """kind: "int8", "fp8" or the dtype of q and the pools; tiles: sequences x KV heads."""
    rows = DECODE.get(kind, DECODE["bfloat16"])
    load = tiles / processors
    row = next(row for most, least, row in rows if load <= most and block_size >= least)
    block_n = row.block_n if dim <= 128 else max(16, row.block_n // 2)
    most = -(-context // block_n)
    splits = max(1, min(most, 128, int(row.waves * processors / tiles)))
    return Config(16, block_n, splits, row.warps, row.stages)


# dtype of q and the pools -> with bulk copies of whole tiles, and without; head dims up to 128
PREFILL: dict[str, tuple[Config, Config]] = {
    "bfloat16": (Config(64, 64, 1, 4, 3), Config(128, 64, 1, 8, 4)),
    "float32": (Config(32, 32, 1, 4, 2), Config(32, 32, 1, 4, 2)),
}


def prefill_config(kind: str, dim: int, *, tiles: bool) -> Config:
    """kind: the dtype of q and the pools; tiles: whether the pools have them (paged_prefill.py)."""
    row = PREFILL.get(kind, PREFILL["bfloat16"])[0 if tiles else 1]
    if dim <= 128:
        return row
    return Config(max(16, row.block_m // 2), max(16, row.block_n // 2), 1, 4, 2)


# (dtype, rows of one token: up to 16 heads, or more) -> row; waves as in Decode
MLA: dict[tuple[str, bool], tuple[int, int, float, int, int]] = {
    # block_m, block_n, waves, warps, stages
    ("bfloat16", False): (16, 64, 1.0, 4, 3),
    ("bfloat16", True): (64, 64, 1.0, 8, 2),
    ("float32", False): (16, 16, 1.0, 4, 1),
    ("float32", True): (16, 16, 1.0, 4, 1),
}


def mla_config(
    kind: str, *, tokens: int, sequences: int, heads: int, context: int, processors: int
) -> Config:
    many = heads > 32 or tokens > 4 * sequences
    if kind != "float32":
        kind = "bfloat16"
    block_m, block_n, waves, warps, stages = MLA[kind, many]
    tiles = max(1, tokens * heads // block_m)
    most = -(-context // block_n)
    splits = max(1, min(most, 64, int(waves * processors / tiles)))
    return Config(block_m, block_n, splits, warps, stages)


@functools.lru_cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 4 for the CPU, where the kernels run in Triton's interpreter."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.lru_cache
def overlaps_launches(device: torch.device) -> bool:
    """Whether a kernel may start before the one before it has ended: Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
