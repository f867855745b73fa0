"""The ledger against the runtime's own layout of a step: equal where that is right, and each single
entry that is off is named with its tensor and sequence."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from seekforge.compile.bisect_ledger import Call, Item, Ledger, Mismatch, expected_calls
from seekforge.runtime.session import Chunk, padded_batches, ragged_inputs

BLOCK, BLOCKS = 4, 12
# Two sequences in the middle of their prompts, two that decode, one of them at a block's start.
ITEMS = [
    Item(7, 5, [11, 12, 13], [3, 9], False),
    Item(8, 0, [21, 22, 23, 24, 25], [6, 2], True),
    Item(9, 8, [31], [1, 8, 0], True),
    Item(5, 6, [41], [11, 4], True),
]


def chunk(item: Item) -> Chunk:
    rows = [len(item.tokens) - 1] if item.final else []
    return Chunk(item.tokens, item.start, item.table, rows)


def laid_out(form: str) -> list[tuple[Call, dict[str, Tensor]]]:
    """Each call with the inputs that the runtime makes for it."""
    chunks = [chunk(item) for item in ITEMS]
    made: list[Any] = [ragged_inputs(chunks, BLOCK)]
    if form == "padded":
        made = padded_batches(chunks, BLOCK)
    calls = expected_calls(ITEMS, form, BLOCK)
    assert len(calls) == len(made)
    names = {field.name for field in dataclasses.fields(made[0])}
    return [
        (call, {name: getattr(inputs, name).clone() for name in call.inputs if name in names})
        for call, inputs in zip(calls, made, strict=True)
    ]


@pytest.mark.parametrize("form", ["ragged", "padded"])
def test_equal_to_the_runtime(form: str) -> None:
    ledger = Ledger(BLOCK, BLOCKS)
    for call, given in laid_out(form):
        assert set(given) == set(call.inputs)
        for name, tensor in given.items():
            ledger.compare(call, name, tensor)


@pytest.mark.parametrize("form", ["ragged", "padded"])
def test_every_entry_counts(form: str) -> None:
    ledger = Ledger(BLOCK, BLOCKS)
    looked = 0
    for call, given in laid_out(form):
        for name, right in call.inputs.items():
            for place in torch.cartesian_prod(*map(torch.arange, right.shape)).view(
                -1, right.dim()
            ):
                at = tuple(place.tolist())
                tensor = given[name].clone()
                tensor[at] = BLOCKS if int(right[at]) == -1 else tensor[at] + 1
                with pytest.raises(Mismatch) as raised:
                    ledger.compare(call, name, tensor)
                assert raised.value.tensor == name
                assert f"entry {list(at)} is" in raised.value.detail
                if name == "block_tables":
                    assert raised.value.sequence == call.items[at[0]].sequence
                looked += 1
    assert looked > 30


def test_slots_name_their_sequence() -> None:
    ((call, given),) = laid_out("ragged")
    given["slot_mapping"][9] += 1  # the tenth token, the only one of the last sequence
    with pytest.raises(Mismatch) as raised:
        Ledger(BLOCK, BLOCKS).compare(call, "slot_mapping", given["slot_mapping"])
    assert raised.value.sequence == 5 and raised.value.source == "runtime/session.py"


def test_a_table_that_is_too_short() -> None:
    calls = laid_out("padded")
    call, given = calls[-1]  # the two that decode
    with pytest.raises(Mismatch, match="reads 2 blocks and gets 1") as raised:
        Ledger(BLOCK, BLOCKS).compare(call, "block_tables", given["block_tables"][:, :1])
    assert raised.value.sequence == 9


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ([3], r"1 blocks of 4 for 8 tokens, expected 2"),
        ([3, 6], r"entry 1 is block 6, which sequence 8 has already"),
        ([3, 3], r"entry 1 is block 3, which sequence 7 has already"),
        ([3, 12], r"entry 1 is 12, of 12 blocks"),
        ([9, 3], r"entry 0 is block 9, but position 0 was written to block 3"),
    ],
)
def test_what_a_table_may_not_be(table: list[int], told: str) -> None:
    ledger = Ledger(BLOCK, BLOCKS)
    ledger.written([Item(7, 0, [1, 2, 3, 4, 5], [3, 9], False)])
    good = ITEMS[1]
    ledger.check([good, ITEMS[0]])
    with pytest.raises(Mismatch, match=told) as raised:
        ledger.check([good, dataclasses.replace(ITEMS[0], table=table)])
    assert raised.value.sequence == 7 and raised.value.tensor == "block_tables"


def test_tokens_that_were_never_computed() -> None:
    ledger = Ledger(BLOCK, BLOCKS)
    ledger.written([Item(7, 0, [1, 2, 3, 4], [3, 9], False)])
    with pytest.raises(Mismatch, match="begins at position 5, but 4 tokens are in the cache"):
        ledger.check(ITEMS[:1])
    ledger.forget(set())  # it was put back: it begins again, wherever its blocks are now
    ledger.check([Item(7, 0, [1, 2, 3, 4], [5], False)])
