"""A session runs steps on one engine. Here: its Protocol, and a step's chunks laid out as tensors.

In: chunks (one sequence's new tokens, its start and its block table). Out: the tensors of the two
graph forms, all int64 on the CPU. Pure functions but for `scatter_kv`; no backend is known here.

T: all new tokens of the step. N: rows of the logits. A slot is block * block_size + offset.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor

from seekforge.kernels.errors import EngineError
from seekforge.runtime.fit import resolve_engine, unfit_reason
from seekforge.runtime.manifest import Manifest, read_manifest

Track = Callable[[Iterable[int]], Iterable[int]]
SESSIONS = {
    "inductor": ("seekforge.runtime.inductor", "InductorSession"),
    "onnxruntime": ("seekforge.runtime.onnxruntime", "OnnxRuntimeSession"),
    "tensorrt": ("seekforge.runtime.tensorrt", "TensorRTSession"),
    "tensorrt-rtx": ("seekforge.runtime.tensorrt", "TensorRTSession"),
}


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence's share of a step.

    `token_ids`: its new tokens, at least one. `start`: its tokens already in the cache, so the
    position of the first new one. `block_table`: blocks for start + len(token_ids) tokens. `rows`:
    indices into `token_ids` whose logits are wanted; none in the first chunks of a long prompt.
    `source`: where the only token is still on the device, its row in the tokens sampled last (and
    `token_ids` is then [0]); else -1.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    rows: Sequence[int]
    source: int = -1


class Session(Protocol):
    """One loaded engine; constructed by `open_session` as `Backend(directory, manifest)`."""

    manifest: Manifest
    logits_device: torch.device  # where a step's logits lie

    def pool_bytes(self, max_batch: int, max_chunk: int, block_size: int) -> int:
        """Bytes that the KV pools may take, beside steps of that size; before `allocate`."""

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Makes the KV pools, zeroed; an earlier set is dropped."""

    def capture_all(self, track: Track = iter) -> None:
        """Does now what steps would do when they first come up, such as capturing graphs; nothing
        where there is nothing of the kind. `track` is put around the loop, to show progress."""

    def clear(self, blocks: Sequence[int]) -> None:
        """Zeroes these blocks of every pool: what a failed sequence left there may be NaN, which
        reaches a later owner of the block through masked positions (0 * NaN)."""

    def step(self, chunks: Sequence[Chunk], last: Tensor | None = None) -> Tensor:
        """Writes the chunks' K and V into the pools -> logits [sum(len(rows)), V], in the order of
        the chunks and of their rows. They hold until the next step.

        last: the tokens sampled last, int64 on the device; negative ones count as 0. Only sessions
        whose logits are on a GPU are given some.
        """


def open_session(path: Path) -> Session:
    """Opens an engine directory, or the first engine of a bundle that can run here.

    Raises `EngineError` for a damaged engine and for one that does not fit this machine.
    """
    directory = resolve_engine(path)
    manifest = read_manifest(directory)
    reason = unfit_reason(manifest)
    if reason is not None:
        raise EngineError(f"{directory}: this {manifest.backend} engine cannot run here: {reason}")
    module, name = SESSIONS[manifest.backend]
    try:
        backend = getattr(importlib.import_module(module), name)
    except ImportError as error:  # installed, but one of its libraries is not
        raise EngineError(
            f"{directory}: the {manifest.backend} backend cannot be imported: {error}"
        ) from error
    return cast(Session, backend(directory, manifest))


@dataclass(frozen=True, slots=True)
class RaggedInputs:
    """Inputs of the ragged form, one entry in `query_start` and `context_lens` for each chunk.

    `num_rows` counts the rows asked for. It is 0 when no chunk wants logits; `logits_rows` is then
    [0], because a graph has at least one row, and the caller keeps `logits[:num_rows]`.
    """

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    slot_mapping: Tensor  # [T]
    block_tables: Tensor  # [R, M], unused entries 0
    context_lens: Tensor  # [R], tokens in the cache after this step
    query_start: Tensor  # [R + 1]
    logits_rows: Tensor  # [N], indices into T
    num_rows: int


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """Inputs of the padded form for some of a step's chunks, and where its outputs belong.

    The batch's `logits[i]` is row `output_rows[i]` of the step; `output_rows` is empty when no
    chunk wants logits (`logits_rows` is then [0]). `new_k` and `new_v` [B, S, ...] go to `slots`.
    """

    token_ids: Tensor  # [B, S]
    positions: Tensor  # [B, S]
    block_tables: Tensor  # [B, M], M >= 1: only the blocks that hold past tokens, unused entries 0
    past_lens: Tensor  # [B], tokens in the cache before this step
    logits_rows: Tensor  # [N], indices into B * S
    slots: Tensor  # [B, S], -1 for padding
    output_rows: Tensor  # [N] or [0]


def ragged_inputs(chunks: Sequence[Chunk], block_size: int) -> RaggedInputs:
    """All chunks end to end, prefill and decode together."""
    lengths = torch.tensor([len(chunk.token_ids) for chunk in chunks])
    query_start = torch.zeros(len(chunks) + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=query_start[1:])
    rows = [
        first + row
        for chunk, first in zip(chunks, query_start.tolist(), strict=False)
        for row in chunk.rows
    ]
    return RaggedInputs(
        token_ids=torch.tensor([token for chunk in chunks for token in chunk.token_ids]),
        positions=torch.cat([_positions(chunk) for chunk in chunks]),
        slot_mapping=torch.cat([_slots(chunk, block_size) for chunk in chunks]),
        block_tables=_pad([chunk.block_table for chunk in chunks]),
        context_lens=torch.tensor([chunk.start for chunk in chunks]) + lengths,
        query_start=query_start,
        logits_rows=torch.tensor(rows or [0]),
        num_rows=len(rows),
    )


def padded_batches(chunks: Sequence[Chunk], block_size: int) -> list[PaddedBatch]:
    """Each prefill chunk is a batch of its own, [1, S]; all single tokens together are one, [B, 1].

    So nothing is padded but block tables: `S` differs only between batches.
    """
    first_row = []
    total = 0
    for chunk in chunks:
        first_row.append(total)
        total += len(chunk.rows)
    decodes = [i for i, chunk in enumerate(chunks) if len(chunk.token_ids) == 1]
    groups = [[i] for i, chunk in enumerate(chunks) if len(chunk.token_ids) > 1]
    if decodes:
        groups.append(decodes)
    return [
        _batch([chunks[i] for i in group], [first_row[i] for i in group], block_size)
        for group in groups
    ]


def scatter_kv(pool: Tensor, new: Tensor, slots: Tensor) -> None:
    """`new` [B, S, ...] into `pool` [blocks, block_size, ...] at `slots` [B, S]; -1 is skipped.

    Slots that are on a GPU already hold no -1: to look would wait for it.
    """
    flat = slots.flatten()
    values = new.flatten(0, 1)
    if flat.device.type == "cpu" and bool((flat < 0).any()):
        keep = flat >= 0
        flat, values = flat[keep], values[keep.to(values.device)]
    # view, not reshape: a copy would swallow the write
    pool.view(-1, *pool.shape[2:])[flat.to(pool.device)] = values.to(pool)


def _batch(chunks: list[Chunk], first_rows: list[int], block_size: int) -> PaddedBatch:
    length = len(chunks[0].token_ids)
    rows = [b * length + row for b, chunk in enumerate(chunks) for row in chunk.rows]
    past_tables = [chunk.block_table[: -(-chunk.start // block_size)] for chunk in chunks]
    return PaddedBatch(
        token_ids=torch.tensor([list(chunk.token_ids) for chunk in chunks]),
        positions=torch.stack([_positions(chunk) for chunk in chunks]),
        block_tables=_pad(past_tables),
        past_lens=torch.tensor([chunk.start for chunk in chunks]),
        logits_rows=torch.tensor(rows or [0]),
        slots=torch.stack([_slots(chunk, block_size) for chunk in chunks]),
        output_rows=torch.tensor(
            [
                first + i
                for chunk, first in zip(chunks, first_rows, strict=True)
                for i in range(len(chunk.rows))
            ],
            dtype=torch.int64,
        ),
    )


def _positions(chunk: Chunk) -> Tensor:
    return torch.arange(chunk.start, chunk.start + len(chunk.token_ids))


def _slots(chunk: Chunk, block_size: int) -> Tensor:
    positions = _positions(chunk)
    blocks = torch.tensor(chunk.block_table)[positions // block_size]
    return blocks * block_size + positions % block_size


def _pad(tables: Sequence[Sequence[int]]) -> Tensor:
    """Rows of different lengths -> [R, M] with zeros behind; M is at least 1."""
    width = max(1, *(len(table) for table in tables))
    return torch.tensor([[*table, *[0] * (width - len(table))] for table in tables])
