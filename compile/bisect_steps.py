"""The inputs of a bisection: a batch of tokens, and the same tokens as steps of a paged cache.

From first principles and sharing no code with the runtime: where a slot or a table there is wrong,
these are right. Two sequences of equal length; their blocks are small, shuffled and interleaved,
and slots that no token owns hold random values.

    prefill        all tokens of all sequences, in blocks of their own
    first chunk    the first part of every sequence (ragged: parts of different length)
    second chunk   what follows, but for the last token
    decode         the last token of every sequence
    one token      the last token of the first sequence once more, which some engines have code for
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seekforge.passes.program import Program


@dataclass(frozen=True, slots=True)
class PagedStep:
    """inputs: by name, the pools among them, which all steps share. rows: for each of the step's
    tokens its place among all tokens, [sequences * length]. slots: where each token's K and V
    belong."""

    name: str
    inputs: dict[str, Tensor]
    rows: Tensor
    slots: Tensor

    def keep(self, outputs: dict[str, Tensor]) -> None:
        """Padded form: writes a step's new K and V into the pools, as the runtime has to."""
        for name, new in outputs.items():
            if name.startswith("new_"):
                kind, _, layer = name.removeprefix("new_").rpartition("_")
                pool = self.inputs[f"{kind}_pool_{layer}"]
                pool.view(-1, *pool.shape[2:])[self.slots] = new.flatten(0, 1).to(pool.dtype)


@dataclass(frozen=True, slots=True)
class Share:
    """A sequence's part of a step: tokens start..end - 1."""

    sequence: int
    start: int
    end: int
    table: Tensor


def unpaged_inputs(tokens: Tensor) -> dict[str, Tensor]:
    """Inputs of a graph before KV-cache insertion. tokens: [sequences, length]."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
    return {"input_ids": tokens, "position_ids": positions}


def paged_steps(tokens: Tensor, program: Program, block_size: int) -> list[PagedStep]:
    """The steps above for a program with its KV cache. tokens: [sequences, length]."""
    assert program.form is not None
    count, length = tokens.shape
    each = -(-length // block_size)
    random = torch.Generator().manual_seed(2)
    # One set of blocks for the prefill, one for the chunks, three that belong to nobody.
    order = torch.randperm(2 * count * each + 3, generator=random)
    whole, parts = order[: 2 * count * each].view(2, each, count).transpose(1, 2)
    pools: dict[str, Tensor] = {}
    for node in program.graph.find_nodes(op="placeholder"):
        if "_pool_" in str(node.target):
            value = node.meta["val"]
            shape = (len(order), block_size, *map(int, value.shape[2:]))
            pools[str(node.target)] = torch.randn(shape, generator=random).to(value.dtype)
    cut = max(1, length // 2 - 1)
    # Ragged sequences need not have equal parts.
    ends = [min(length - 1, cut + (2 * i if program.form == "ragged" else 0)) for i in range(count)]
    last = length - 1
    shares = {
        "prefill": [Share(i, 0, length, whole[i]) for i in range(count)],
        "first chunk": [Share(i, 0, end, parts[i]) for i, end in enumerate(ends)],
        "second chunk": [Share(i, e, last, parts[i]) for i, e in enumerate(ends) if e < last],
        "decode": [Share(i, last, length, parts[i]) for i in range(count)],
        "one token": [Share(0, last, length, parts[0])],
    }
    return [
        _step(name, tokens, program.form, block_size, share, pools)
        for name, share in shares.items()
        if share
    ]


def _step(
    name: str, tokens: Tensor, form: str, block_size: int, shares: list[Share],
    pools: dict[str, Tensor],
) -> PagedStep:  # fmt: skip
    length = tokens.shape[1]
    ids, positions, slots, rows = [], [], [], []
    for share in shares:
        at = list(range(share.start, share.end))
        ids.append([int(tokens[share.sequence, p]) for p in at])
        positions.append(at)
        slots += [int(share.table[p // block_size]) * block_size + p % block_size for p in at]
        rows += [share.sequence * length + p for p in at]
    inputs = {"logits_rows": torch.arange(len(rows))}
    if form == "ragged":
        starts = [0]
        for at in positions:
            starts.append(starts[-1] + len(at))
        inputs |= {
            "token_ids": torch.tensor([i for row in ids for i in row]),
            "positions": torch.tensor([p for row in positions for p in row]),
            "slot_mapping": torch.tensor(slots),
            "block_tables": torch.stack([share.table for share in shares]),
            "context_lens": torch.tensor([share.end for share in shares]),
            "query_start": torch.tensor(starts),
        }
    else:
        past = max(-(-share.start // block_size) for share in shares)
        inputs |= {
            "token_ids": torch.tensor(ids),
            "positions": torch.tensor(positions),
            "block_tables": torch.stack([share.table[: max(1, past)] for share in shares]),
            "past_lens": torch.tensor([share.start for share in shares]),
        }
    return PagedStep(name, inputs | pools, torch.tensor(rows), torch.tensor(slots))
