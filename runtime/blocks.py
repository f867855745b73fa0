"""The paged KV cache's bookkeeping: which blocks belong to which sequence.

In: sequence ids and the tokens each has in the cache. Out: block tables. It never sees a tensor.
Always: blocks free + blocks used = total, no block in two tables, and a sequence with `t` tokens
holds exactly ceil(t / block_size) blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class BlockManager:
    """A pool of `num_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = deque(range(num_blocks))
        self._tables: dict[int, list[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return sum(len(table) for table in self._tables.values())

    def blocks_for(self, tokens: int) -> int:
        """ceil(tokens / block_size)"""
        return -(-tokens // self.block_size)

    def table(self, sequence_id: int) -> Sequence[int]:
        """The sequence's blocks in the order of its tokens."""
        return self._tables.get(sequence_id, ())

    def allocate(self, sequence_id: int, tokens: int) -> bool:
        """Makes the sequence's table cover `tokens` tokens in total.

        False, and nothing is taken, when too few blocks are free.
        """
        missing = self.blocks_for(tokens) - len(self.table(sequence_id))
        if missing > len(self._free):
            return False
        table = self._tables.setdefault(sequence_id, [])
        table.extend(self._free.popleft() for _ in range(missing))
        return True

    def free(self, sequence_id: int) -> None:
        """Gives all blocks of the sequence back; a sequence without blocks is fine."""
        self._free.extend(self._tables.pop(sequence_id, ()))
