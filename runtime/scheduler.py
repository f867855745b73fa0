"""Which sequences run in the next step: first come, first served, prefill in chunks.

In: sequences as they arrive and finish. Out: for each step the sequences with the number of tokens
each computes, their blocks allocated. It knows neither tokens' values nor the engine.

A step takes first the decodes, one token each, then prompt tokens up to `max_chunk`. Where the
blocks run out, the youngest sequence gives up its blocks and is computed again later.

A sequence's last token may be unread: sampled, but not known to the host. It is a token like others
in a decode step. One that would have to be computed in a prompt is waited for, and a sequence that
has all its tokens with it is left alone.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from seekforge.runtime.blocks import BlockManager
from seekforge.runtime.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A sequence's next `num_tokens` tokens are computed in this step."""

    sequence: Sequence
    num_tokens: int


class Scheduler:
    """`waiting` and `running` are both in the order of arrival.

    At most one running sequence, the last, is in the middle of its prompt: the next is admitted
    only when the one before took all it needs. A sequence must fit the pool alone; the caller
    refuses one that does not.
    """

    def __init__(self, blocks: BlockManager, max_batch: int, max_chunk: int) -> None:
        self.blocks = blocks
        self.max_batch = max_batch
        self.max_chunk = max_chunk
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Finished or aborted: out of both queues, its blocks free. Harmless if done before."""
        self.blocks.free(sequence.id)
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def schedule(self) -> list[Scheduled]:
        """The next step; empty only when there is nothing to do."""
        step = self._decodes()
        budget = self.max_chunk
        if self.running and self.running[-1].num_pending > 1:
            budget -= self._prefill(self.running[-1], budget, step)
        while budget > 0 and self.waiting and self._admits(self.waiting[0]):
            self.running.append(self.waiting.popleft())
            budget -= self._prefill(self.running[-1], budget, step)
        left = (*self.running, *self.waiting)
        assert step or not left or any(s.num_unread for s in left), "nothing can run"
        return step

    def _decodes(self) -> list[Scheduled]:
        step = []
        for sequence in list(self.running):
            if sequence.num_pending > 1 or sequence not in self.running:
                continue
            if sequence.num_output >= sequence.max_tokens:
                continue
            while not self.blocks.allocate(sequence.id, sequence.num_tokens):
                youngest = self.running[-1]
                self._preempt(youngest)
                if youngest is sequence:
                    break
            else:
                step.append(Scheduled(sequence, 1))
        return step

    def _prefill(self, sequence: Sequence, budget: int, step: list[Scheduled]) -> int:
        tokens = min(sequence.num_pending, budget)
        if not self.blocks.allocate(sequence.id, sequence.num_computed + tokens):
            return 0  # only beside older sequences: it waits for theirs, or is preempted for them
        step.append(Scheduled(sequence, tokens))
        return tokens

    def _admits(self, sequence: Sequence) -> bool:
        """Whether all its tokens fit beside what the running ones still need for theirs.

        Only then: a prompt let in half way would be thrown out again before it yields a token.
        """
        promised = sum(
            self.blocks.blocks_for(other.num_tokens) - len(self.blocks.table(other.id))
            for other in self.running
        )
        needed = self.blocks.blocks_for(sequence.num_tokens)
        room = len(self.running) < self.max_batch and needed + promised <= self.blocks.num_free
        return room and not sequence.num_unread

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.blocks.free(sequence.id)
        sequence.num_computed = 0
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1
