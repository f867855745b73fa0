"""Inputs of the attention rows: random paged pools of each kind, tables; peers' candidates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from seekforge.compile.bench_kernels import Candidate
from seekforge.kernels.kv_write import quantise_heads

STORED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def pages(batch: int, length: int, page: int) -> tuple[Tensor, Tensor, Tensor]:
    """Shuffled block tables, context lengths and query starts of a batch of decodes."""
    count = -(-length // page)
    table = torch.randperm(batch * count, device="cuda").view(batch, count)
    lens = torch.full((batch,), length, device="cuda")
    return table, lens, torch.arange(batch + 1, device="cuda")


def present(
    peers: ModuleType | None, table: str, prepare: Callable[[Any], Any], q: Tensor, few: int,
    count: int, notes: dict[str, str], skip: tuple[str, ...] = (),
) -> Iterator[Candidate]:  # fmt: skip
    """Candidates of the adapters in one of the peers' tables."""
    for name, adapter in getattr(peers, table, {}).items() if peers else ():
        if name in skip:
            continue
        present, why = peers.available(name)  # type: ignore[union-attr]
        if not present:
            notes[name] = f"absent: {why[:60]}"
            continue
        try:
            state = prepare(adapter)
        except Exception as failure:
            notes[name] = f"{type(failure).__name__}: {str(failure)[:60]}"
            continue
        clone = peers.clone  # type: ignore[union-attr]
        states = [state, *(clone(state) for _ in range(count - 1))]
        yield Candidate(
            name,
            lambda a=adapter, s=state: a.run(q, s)[:few],  # type: ignore[misc]
            [partial(adapter.run, q, s) for s in states],
        )


def store(values: Tensor, kind: str) -> tuple[Tensor, Tensor | None, Tensor]:
    """values [blocks, page, heads, dim] as a pool of a kind, the scales, and what it stands for."""
    if kind == "bfloat16":
        return values, None, values
    given = torch.full((values.shape[2],), 0.02, device=values.device)
    stored, scale = quantise_heads(values.flatten(0, 1), STORED[kind], given)
    stored = stored.view(values.shape)
    if kind == "int8":
        scale = scale.view(values.shape[:3])
    return stored, scale, stored.float() * scale[..., None]


def value_bytes(kind: str, dim: int) -> float:
    """Of one token and head in a pool, its scale included."""
    return {"bfloat16": 2.0 * dim, "int8": dim + 4.0, "fp8": float(dim)}[kind]
