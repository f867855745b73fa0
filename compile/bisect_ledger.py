"""The index tensors of a step from first principles, and a ledger of which slot holds which token.

In: what the scheduler planned (sequence, its tokens, its block table). Out: what every input of the
compiled model must hold, or the first thing that is wrong. Shares no code with the runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

MANAGER = "runtime/blocks.py"
LAYOUT = "runtime/session.py"


@dataclass(frozen=True, slots=True)
class Item:
    """One sequence's share of a step: its new tokens, the first one's position, its blocks. final:
    its last logits are sampled from."""

    sequence: int
    start: int
    tokens: list[int]
    table: list[int]
    final: bool

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the compiled model: the sequences in it, and what each input must hold."""

    items: list[Item]
    inputs: dict[str, Tensor]


class Mismatch(Exception):
    """A tensor of the runtime that is not what it must be. sequence: -1 where it is of no one."""

    def __init__(
        self, tensor: str, sequence: int, detail: str, source: str = "",
        tensors: dict[str, Tensor] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(f"{tensor}: {detail}")
        self.tensor, self.sequence, self.detail = tensor, sequence, detail
        self.source, self.tensors = source, tensors or {}


class Ledger:
    """Where the K and V of each token of each running sequence were written."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self.block_size, self.num_blocks = block_size, num_blocks
        self.slots: dict[int, list[int]] = {}  # by sequence, one for each token

    def forget(self, running: set[int]) -> None:
        """Sequences that ended or were put back have nothing in the cache."""
        self.slots = {s: slots for s, slots in self.slots.items() if s in running}

    def check(self, items: list[Item]) -> None:
        """Raises Mismatch for a plan or a block table that can't be right."""
        owners: dict[int, int] = {}
        for item in items:
            known = self.slots.get(item.sequence, [])
            if item.start == 0:  # preempted: it begins again
                known = self.slots[item.sequence] = []
            if item.start != len(known):
                told = f"begins at position {item.start}, but {len(known)} tokens are in the cache"
                raise Mismatch("positions", item.sequence, told, "runtime/scheduler.py")
            blocks = -(-item.end // self.block_size)
            if len(item.table) < blocks:
                told = (
                    f"{len(item.table)} blocks of {self.block_size} for {item.end} tokens, "
                    f"expected {blocks}"
                )
                raise self._table(item, told)
            for index, block in enumerate(item.table):
                if not 0 <= block < self.num_blocks:
                    raise self._table(
                        item, f"entry {index} is {block}, of {self.num_blocks} blocks"
                    )
                other = owners.setdefault(block, item.sequence)
                if other != item.sequence or item.table.index(block) != index:
                    told = f"entry {index} is block {block}, which sequence {other} has already"
                    raise self._table(item, told)
            for position, slot in enumerate(known):
                if self._slot(item, position) != slot:
                    told = (
                        f"entry {position // self.block_size} is block "
                        f"{item.table[position // self.block_size]}, but position {position} was "
                        f"written to block {slot // self.block_size}"
                    )
                    raise self._table(item, told)

    def _shape(self, call: Call, name: str, found: Tensor, tensors: dict[str, Tensor]) -> Mismatch:
        """The sequence whose row is too short, where it is a table."""
        right, sequence = call.inputs[name], -1
        told = f"shape {tuple(found.shape)}, expected {tuple(right.shape)}"
        if name == "block_tables" and found.shape[0] == len(call.items):
            counts = (right >= 0).sum(1).tolist()
            row = next(i for i, count in enumerate(counts) if count > found.shape[1])
            sequence = call.items[row].sequence
            told += f": it reads {counts[row]} blocks and gets {found.shape[1]}"
        return Mismatch(name, sequence, told, LAYOUT, tensors)

    def _table(self, item: Item, detail: str) -> Mismatch:
        table = {"found": torch.tensor(item.table)}
        return Mismatch("block_tables", item.sequence, f"block manager: {detail}", MANAGER, table)

    def _slot(self, item: Item, position: int) -> int:
        return slot_of(item, position, self.block_size)

    def written(self, items: list[Item]) -> None:
        """The step is over: its tokens are in the cache."""
        for item in items:
            slots = self.slots.setdefault(item.sequence, [])
            slots += [self._slot(item, position) for position in range(item.start, item.end)]

    def check_written(
        self, call: Call, pools: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
    ) -> None:
        """Padded form: raises Mismatch where a step's new K or V did not get into its slot."""
        slots = [
            slot_of(item, p, self.block_size)
            for item in call.items
            for p in range(item.start, item.end)
        ]
        for name, pool in pools.items():
            new = outputs["new_" + name.replace("pool_", "")].flatten(0, 1).to(pool.dtype)
            found = pool.flatten(0, 1)[torch.tensor(slots)]
            same = (found == new).flatten(1).all(1)
            if not bool(same.all()):
                at = int(same.logical_not().nonzero()[0])
                sequence = [i.sequence for i in call.items for _ in i.tokens][at]
                told = f"slot {slots[at]} does not hold what the engine gave for it"
                tensors = {"reference": new, "found": found, "input.slots": torch.tensor(slots)}
                raise Mismatch(name, sequence, told, "runtime/padded.py", tensors)

    def compare(self, call: Call, name: str, found: Tensor) -> None:
        """Raises Mismatch at the first place where an input is not what it must be. Expected
        entries of -1 may be any block."""
        right = call.inputs[name]
        if name == "block_tables":
            found = found[:, : right.shape[1]]
        tensors = {"reference": right, "found": found}
        tensors |= {f"input.table.{i.sequence}": torch.tensor(i.table) for i in call.items}
        if found.shape != right.shape:
            raise self._shape(call, name, found, tensors)
        free = (right == -1) & (found >= 0) & (found < self.num_blocks)
        wrong = (found != right) & ~free
        if bool(wrong.any()):
            place = tuple(wrong.nonzero()[0].tolist())
            told = f"entry {list(place)} is {int(found[place])}, expected {int(right[place])}"
            raise Mismatch(name, _owner(call, name, place), told, LAYOUT, tensors)


def slot_of(item: Item, position: int, block_size: int) -> int:
    block, offset = divmod(position, block_size)
    return item.table[block] * block_size + offset


def _owner(call: Call, name: str, place: tuple[int, ...]) -> int:
    """The sequence that an entry of an input belongs to, -1 where none is known."""
    right, items = call.inputs[name], call.items
    if name == "logits_rows" or name == "query_start":
        return -1
    if right.dim() == 2 or name in ("context_lens", "past_lens"):
        return items[place[0]].sequence
    at = place[0]
    for item in items:
        if at < len(item.tokens):
            return item.sequence
        at -= len(item.tokens)
    return -1


def expected_calls(items: list[Item], form: str, block_size: int) -> list[Call]:
    """Every call of the compiled model in one step, with its inputs but for the pools.

    Ragged: one call. Padded: one for each sequence with several tokens, then one for all that have
    one. Only as much of a block table as the step reads; -1: may be any block.
    """
    if not items:
        return []
    if form == "ragged":
        return [Call(items, _ragged(items, block_size))]
    several = [[item] for item in items if len(item.tokens) > 1]
    single = [item for item in items if len(item.tokens) == 1]
    groups = [*several, single] if single else several
    return [Call(group, _padded(group, block_size)) for group in groups]


def _ragged(items: list[Item], block_size: int) -> dict[str, Tensor]:
    starts = [0]
    for item in items:
        starts.append(starts[-1] + len(item.tokens))
    rows = [end - 1 for item, end in zip(items, starts[1:], strict=True) if item.final]
    slots = [slot_of(item, p, block_size) for item in items for p in range(item.start, item.end)]
    return {
        "token_ids": torch.tensor([token for item in items for token in item.tokens]),
        "positions": torch.tensor([p for item in items for p in range(item.start, item.end)]),
        "slot_mapping": torch.tensor(slots),
        "block_tables": _tables([item.table[: -(-item.end // block_size)] for item in items]),
        "context_lens": torch.tensor([item.end for item in items]),
        "query_start": torch.tensor(starts),
        "logits_rows": torch.tensor(rows or [0]),
    }


def _padded(items: list[Item], block_size: int) -> dict[str, Tensor]:
    length = len(items[0].tokens)
    rows = [(i + 1) * length - 1 for i, item in enumerate(items) if item.final]
    return {
        "token_ids": torch.tensor([item.tokens for item in items]),
        "positions": torch.tensor([list(range(item.start, item.end)) for item in items]),
        "block_tables": _tables([item.table[: -(-item.start // block_size)] for item in items]),
        "past_lens": torch.tensor([item.start for item in items]),
        "logits_rows": torch.tensor(rows or [0]),
    }


def _tables(tables: list[list[int]]) -> Tensor:
    width = max(1, *map(len, tables))
    return torch.tensor([[*table, *[-1] * (width - len(table))] for table in tables])
