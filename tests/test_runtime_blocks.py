"""Blocks, scheduling and the layout of a step, without a model."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest
import torch

from seekforge.runtime.blocks import BlockManager
from seekforge.runtime.sampling import SamplingParams
from seekforge.runtime.scheduler import Scheduler
from seekforge.runtime.sequence import Sequence
from seekforge.runtime.session import Chunk, padded_batches, ragged_inputs, scatter_kv


def sequence(id: int, prompt: int, new: int) -> Sequence:
    return Sequence(
        id=id,
        request_id=id,
        index=0,
        token_ids=[0] * prompt,
        num_prompt=prompt,
        max_tokens=new,
        params=SamplingParams(),
        key=0,
        generator=torch.Generator(),
        stream=cast(Any, None),
    )


def test_a_sequence_holds_exactly_the_blocks_its_tokens_need() -> None:  # B56
    blocks = BlockManager(num_blocks=5, block_size=4)
    for tokens in range(1, 21):
        assert blocks.allocate(7, tokens)
        assert len(blocks.table(7)) == -(-tokens // 4), f"{tokens=}"
        assert blocks.num_free + blocks.num_used == 5
    assert not blocks.allocate(7, 21)
    assert not blocks.allocate(8, 1)
    assert len(blocks.table(7)) == 5 and blocks.table(8) == ()  # a refusal takes nothing
    blocks.free(7)
    blocks.free(7)
    assert (blocks.num_free, blocks.num_used) == (5, 0)


def test_blocks_are_never_shared_or_lost() -> None:
    rng = random.Random(0)
    blocks = BlockManager(num_blocks=13, block_size=4)
    lengths: dict[int, int] = {}
    for _ in range(2000):
        id = rng.randrange(6)
        if rng.random() < 0.2:
            blocks.free(id)
            lengths.pop(id, None)
        elif blocks.allocate(id, lengths.get(id, 0) + (grow := rng.randrange(1, 9))):
            lengths[id] = lengths.get(id, 0) + grow
        tables = [b for id in range(6) for b in blocks.table(id)]
        assert len(set(tables)) == len(tables) == blocks.num_used
        assert blocks.num_free + blocks.num_used == 13
        assert all(len(blocks.table(i)) == -(-n // 4) for i, n in lengths.items())


def run(scheduler: Scheduler, sequences: list[Sequence]) -> list[list[tuple[int, int]]]:
    """Runs all to their end -> for each step (id, tokens)."""
    for each in sequences:
        scheduler.add(each)
    trace = []
    while step := scheduler.schedule():
        trace.append([(item.sequence.id, item.num_tokens) for item in step])
        for item in step:
            s = item.sequence
            s.num_computed += item.num_tokens
            held = len(scheduler.blocks.table(s.id))
            assert held == scheduler.blocks.blocks_for(s.num_computed), f"{trace=}"
            if s.num_pending == 0:
                s.token_ids.append(0)
                if len(s.token_ids) - s.num_prompt == s.max_tokens:
                    scheduler.remove(s)
        assert len(trace) < 500, "no progress"
    assert scheduler.blocks.num_used == 0
    return trace


def test_steps_take_decodes_first_then_prefill_chunks() -> None:
    scheduler = Scheduler(BlockManager(100, 4), max_batch=3, max_chunk=5)
    trace = run(
        scheduler, [sequence(0, 3, 3), sequence(1, 7, 2), sequence(2, 1, 2), sequence(3, 2, 1)]
    )
    assert trace == [
        [(0, 3), (1, 2)],
        [(0, 1), (1, 5)],
        [(0, 1), (1, 1), (2, 1)],
        [(2, 1), (3, 2)],
    ]


@pytest.mark.parametrize("prompt", [3, 4, 5, 8])
def test_pool_exactly_large_enough_or_one_block_short(prompt: int) -> None:  # B56
    need = -(-(prompt + 5) // 4)  # 6 new tokens, the last is never in the cache
    enough = Scheduler(BlockManager(2 * need, 4), max_batch=2, max_chunk=16)
    run(enough, [sequence(0, prompt, 6), sequence(1, prompt, 6)])
    assert enough.num_preemptions == 0
    short = Scheduler(BlockManager(2 * need - 1, 4), max_batch=2, max_chunk=16)
    done = [sequence(0, prompt, 6), sequence(1, prompt, 6)]
    run(short, done)
    assert [len(s.token_ids) for s in done] == [prompt + 6] * 2


def test_the_youngest_gives_way_and_arrival_order_stays() -> None:
    scheduler = Scheduler(BlockManager(4, 2), max_batch=3, max_chunk=8)
    trace = run(scheduler, [sequence(id, 2, 5) for id in range(3)])
    assert scheduler.num_preemptions > 0
    ends = [max(i for i, step in enumerate(trace) if id in dict(step)) for id in range(3)]
    assert ends[0] < ends[1] < ends[2]


def test_random_loads_all_finish() -> None:
    rng = random.Random(1)
    for _ in range(50):
        block_size = rng.choice([1, 2, 4])
        lengths = [(rng.randrange(1, 20), rng.randrange(1, 12)) for _ in range(8)]
        largest = max(-(-(prompt + new - 1) // block_size) for prompt, new in lengths)
        blocks = BlockManager(largest + rng.randrange(4), block_size)
        scheduler = Scheduler(blocks, max_batch=rng.randrange(1, 5), max_chunk=rng.randrange(1, 9))
        for step in run(scheduler, [sequence(i, p, n) for i, (p, n) in enumerate(lengths)]):
            assert len(step) <= scheduler.max_batch
            assert sum(n for _, n in step if n > 1) <= scheduler.max_chunk


CHUNKS = [
    Chunk([11, 12, 13], start=0, block_table=[5], rows=[]),
    Chunk([21], start=4, block_table=[2, 7], rows=[0]),
    Chunk([31, 32], start=3, block_table=[9, 1], rows=[1]),
    Chunk([41], start=0, block_table=[3], rows=[0]),
]


def test_ragged_layout() -> None:
    inputs = ragged_inputs(CHUNKS, block_size=4)
    assert inputs.token_ids.tolist() == [11, 12, 13, 21, 31, 32, 41]
    assert inputs.positions.tolist() == [0, 1, 2, 4, 3, 4, 0]
    assert inputs.slot_mapping.tolist() == [20, 21, 22, 28, 39, 4, 12]
    assert inputs.block_tables.tolist() == [[5, 0], [2, 7], [9, 1], [3, 0]]
    assert inputs.context_lens.tolist() == [3, 5, 5, 1]
    assert inputs.query_start.tolist() == [0, 3, 4, 6, 7]
    assert inputs.logits_rows.tolist() == [3, 5, 6] and inputs.num_rows == 3
    tensors = [getattr(inputs, name) for name in inputs.__slots__ if name != "num_rows"]
    assert {tensor.dtype for tensor in tensors} == {torch.int64}


def test_padded_layout() -> None:
    first, second, decodes = padded_batches(CHUNKS, block_size=4)
    assert first.token_ids.tolist() == [[11, 12, 13]] and first.slots.tolist() == [[20, 21, 22]]
    assert first.block_tables.tolist() == [[0]] and first.past_lens.tolist() == [0]
    assert first.logits_rows.tolist() == [0] and first.output_rows.tolist() == []  # wanted by none
    assert second.block_tables.tolist() == [[9]] and second.past_lens.tolist() == [3]
    assert second.logits_rows.tolist() == [1] and second.output_rows.tolist() == [1]
    assert decodes.token_ids.tolist() == [[21], [41]] and decodes.positions.tolist() == [[4], [0]]
    assert decodes.block_tables.tolist() == [[2], [0]] and decodes.past_lens.tolist() == [4, 0]
    assert decodes.logits_rows.tolist() == [0, 1] and decodes.output_rows.tolist() == [0, 2]
    for batch in (first, second, decodes):
        assert {getattr(batch, name).dtype for name in batch.__slots__} == {torch.int64}


def test_a_step_that_wants_no_logits_still_has_a_row() -> None:
    chunk = Chunk([1, 2], start=0, block_table=[0], rows=[])
    inputs = ragged_inputs([chunk], block_size=4)
    assert inputs.logits_rows.tolist() == [0] and inputs.num_rows == 0


def test_scatter_writes_only_real_slots() -> None:
    pool = torch.zeros(3, 2, 1, 2, dtype=torch.float16)
    new = torch.arange(1, 13, dtype=torch.float32).view(2, 3, 1, 2)
    scatter_kv(pool, new, torch.tensor([[4, 1, -1], [0, -1, -1]]))
    flat = pool.view(6, 2).tolist()
    assert flat == [[7, 8], [3, 4], [0, 0], [0, 0], [1, 2], [0, 0]]
