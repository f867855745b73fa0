"""Configurations of the kernels, measured on an H200 and kept as data in h200.json.

The file maps an operator to its rows: flat objects of the shape class they are for and of the
configuration's values. `seekforge bench kernels --tune` refreshes it. A configuration is chosen
from what the host knows without waiting for the device: dtypes, shapes (a block table's width
bounds the context) and the number of multiprocessors. Other processors take the same rows.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Row = Mapping[str, Any]
PATH = Path(__file__).with_name("h200.json")


@functools.cache
def _file() -> dict[str, list[dict[str, Any]]]:
    content: dict[str, list[dict[str, Any]]] = json.loads(PATH.read_text(encoding="utf-8"))
    return content


def rows(op: str) -> list[dict[str, Any]]:
    """The rows of an operator in the file's order, shared: not to be changed. Empty: none."""
    return _file().get(op, [])


def first(op: str, **sizes: float) -> dict[str, Any] | None:
    """The first row of an operator whose limits these sizes do not exceed; null is no limit."""
    for row in rows(op):
        if all(row[name] is None or size <= row[name] for name, size in sizes.items()):
            return row
    return None


def smallest(op: str, **sizes: float) -> dict[str, Any] | None:
    """Of the rows of an operator whose limits these sizes do not exceed, the one with the lowest
    limits, the first named counting first."""
    fit = [row for row in rows(op) if all(size <= row[name] for name, size in sizes.items())]
    return min(fit, key=lambda row: [row[name] for name in sizes], default=None)


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


def decode_config(
    kind: str, *, tiles: int, context: int, block_size: int, dim: int, processors: int,
    given: Row | None = None,
) -> Config:  # fmt: skip
    """kind: "int8", "fp8" or the dtype of q and the pools; tiles: sequences x KV heads.

    A row serves up to `load` tiles per multiprocessor (null: any) and blocks from `block_size`
    tokens on: blocks below 64 tokens cost more instructions a token, so there two programs share a
    processor. waves: programs per multiprocessor aimed at by splitting. A kind without rows takes
    those of bfloat16. given: the row to use, from a tuner.
    """
    load = tiles / processors
    found = given or next(
        row
        for row in _of_kind("paged_decode", kind)
        if load <= (row["load"] or math.inf) and block_size >= row["block_size"]
    )
    block_n = found["block_n"] if dim <= 128 else max(16, found["block_n"] // 2)
    most = -(-context // block_n)
    splits = max(1, min(most, 128, int(found["waves"] * processors / tiles)))
    return Config(16, block_n, splits, found["warps"], found["stages"])


def prefill_config(kind: str, dim: int, *, tiles: bool, given: Row | None = None) -> Config:
    """kind: as above; tiles: whether the pools have them (paged_prefill.py); given: as above.

    The rows are for head dims up to 128; beyond, half of both blocks.
    """
    found = given or next(row for row in _of_kind("paged_prefill", kind) if row["tiles"] == tiles)
    if dim <= 128:
        return Config(found["block_m"], found["block_n"], 1, found["warps"], found["stages"])
    return Config(max(16, found["block_m"] // 2), max(16, found["block_n"] // 2), 1, 4, 2)


def mla_config(
    kind: str, *, tokens: int, sequences: int, heads: int, context: int, processors: int,
    given: Row | None = None,
) -> Config:  # fmt: skip
    """kind, given, waves: as above. A row is for few or `many` rows of one token (up to 32 heads,
    or more)."""
    many = heads > 32 or tokens > 4 * sequences
    found = given or next(row for row in _of_kind("paged_mla_decode", kind) if row["many"] == many)
    block_m, block_n = found["block_m"], found["block_n"]
    tiles = max(1, tokens * heads // block_m)
    most = -(-context // block_n)
    splits = max(1, min(most, 64, int(found["waves"] * processors / tiles)))
    return Config(block_m, block_n, splits, found["warps"], found["stages"])


@functools.cache
def _of_kind(op: str, kind: str) -> list[dict[str, Any]]:
    found = [row for row in rows(op) if row["kind"] == kind]
    return found or [row for row in rows(op) if row["kind"] == "bfloat16"]


@functools.lru_cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 4 for the CPU, where the kernels run in Triton's interpreter."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.lru_cache
def overlaps_launches(device: torch.device) -> bool:
    """Whether a kernel may start before the one before it has ended: Hopper and later.

    Such a kernel waits (gdc_wait) before it writes anything, and before it reads what the launch
    before it may have written. What it reads earlier must be older: weights, index tensors. Some
    kernels let the next one start (gdc_launch_dependents) before they wait themselves, so what is
    read early must also be older than the last launch that let go only after its wait.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
