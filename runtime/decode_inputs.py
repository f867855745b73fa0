"""The inputs of a decode step in memory that never moves: one new token of each sequence.

In: a step's chunks, one token each. Out: the ragged form's index tensors of a padded batch, slices
of buffers made once, so that a captured graph reads the same addresses at every replay.

A row without a sequence writes nothing (slot -1) and sees one token, of a block that no sequence
owns and that always holds zeros: finite numbers whatever the pools hold, and no live block is read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from seekforge.runtime.session import Chunk

EMPTY = (0, 0, -1, 1)  # token id, position, slot and context length of a row without a sequence


def is_decode(chunks: Sequence[Chunk]) -> bool:
    """Whether each sequence has one new token and wants its logits."""
    return all(len(chunk.token_ids) == 1 == len(chunk.rows) for chunk in chunks)


class DecodeInputs:
    """Buffers for up to `rows` sequences with block tables of `width` entries.

    spare: the block that no sequence owns.
    """

    def __init__(
        self, rows: int, width: int, block_size: int, spare: int, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.spare = spare
        self._index = torch.tensor([EMPTY] * rows, device=device).T.contiguous()
        self._starts = torch.arange(rows + 1, device=device)
        self._tables = torch.full((rows, width), spare, dtype=torch.int64, device=device)
        self._mirror = torch.full((rows, width), spare, dtype=torch.int64)
        self._held: list[Sequence[int]] = [()] * rows  # the table in each row of `_tables`

    def tensors(self, size: int) -> tuple[Tensor, ...]:
        """The graph's index inputs for `size` rows, in its order: the same memory every time."""
        tokens, positions, slots, contexts = (row[:size] for row in self._index)
        starts = self._starts[: size + 1]
        return tokens, positions, slots, self._tables[:size], contexts, starts, starts[:size]

    def write(self, chunks: Sequence[Chunk], size: int, last: Tensor | None = None) -> None:
        """Fills the first len(chunks) of `size` rows; the others belong to no sequence.

        last: as in `Session.step`. Transfers are queued on the current stream, each from memory
        of its own: the host may go on to the next step's.
        """
        block, count = self.block_size, len(chunks)
        rows = [
            (
                chunk.token_ids[0],
                chunk.start,
                chunk.block_table[chunk.start // block] * block + chunk.start % block,
                chunk.start + 1,
            )
            for chunk in chunks
        ]
        rows += [EMPTY] * (size - count)
        # All rows of the buffer at once, contiguous on both sides: one transfer.
        rows += [EMPTY] * (self._index.shape[1] - size)
        to_device(torch.tensor(rows).T, self._index)
        place_tokens(self._index[0], range(count), chunks, last)
        tables = [chunk.block_table for chunk in chunks] + [()] * (size - count)
        changed = [row for row, table in enumerate(tables) if table != self._held[row]]
        view = self._mirror.numpy()
        for row in changed:
            view[row] = self.spare
            view[row, : len(tables[row])] = tables[row]
            self._held[row] = tables[row]
        if changed:
            span = slice(changed[0], changed[-1] + 1)
            to_device(self._mirror[span], self._tables[span])


def to_device(source: Tensor, target: Tensor) -> None:
    """Queues a copy from the host. The page-locked memory in between is torch's to reuse, once
    the copy is through."""
    if target.device.type == "cuda":
        staged = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        source = staged.copy_(source)
    target.copy_(source, non_blocking=True)


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """The host's values there, their copy queued; on the CPU the values themselves."""
    if device.type == "cpu":
        return values
    made = torch.empty(values.shape, dtype=values.dtype, device=device)
    to_device(values, made)
    return made


def place_tokens(
    tokens: Tensor, at: Sequence[int], chunks: Sequence[Chunk], last: Tensor | None
) -> None:
    """Puts those tokens that are still on the device where they belong: tokens[at[i]] is the
    first of chunk i. The host never sees them."""
    sources = [chunk.source for chunk in chunks]
    unread = [i for i, source in enumerate(sources) if source >= 0]
    if not unread:
        return
    assert last is not None, "a token on the device, and none were given"
    if sources == list(range(len(sources))) == list(at):  # the batch of the step before
        torch.clamp_min(last[: len(sources)], 0, out=tokens[: len(sources)])
        return
    where = torch.tensor([[at[i] for i in unread], [sources[i] for i in unread]])
    index = on_device(where, tokens.device)
    tokens.index_copy_(0, index[0], last.index_select(0, index[1]).clamp_min_(0))
