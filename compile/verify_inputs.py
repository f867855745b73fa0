"""The inputs on which graphs are compared, in every form a graph has, and the logits they give.

Two sequences of different length. Before KV-cache insertion they are one right-padded batch; after
it all tokens but the last of each are one prefill step, and the last ones a decode step that reads
what the first step left in the pools. Blocks are small and shuffled, and slots that no token owns
hold random values, so that a wrong slot, table or mask shows. Either way the logits are those of
the same tokens in the same order, and can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from seekforge.compile.run_graph import output_nodes, run_graph
from seekforge.compile.run_graph_weights import GraphWeights
from seekforge.passes.program import Program

LENGTHS = (9, 6)  # tokens of each sequence
BLOCK_SIZE = 4


def draw_tokens(vocab_size: int, max_len: int, seed: int = 0) -> list[Tensor]:
    """Token ids of the sequences; shorter ones where a sequence can have fewer tokens."""
    random = torch.Generator().manual_seed(seed)
    return [
        torch.randint(vocab_size, (min(count, max_len),), generator=random) for count in LENGTHS
    ]


def logits_of(
    program: Program, tokens: Sequence[Tensor], weights: GraphWeights, wide: bool
) -> Tensor:
    """Logits [tokens of all sequences, vocab] in float32, one sequence behind the other."""
    if program.form is not None:
        return _Cached(program, tokens, weights, wide).logits()
    (node, *_) = output_nodes(program)
    ids = _padded(tokens)
    inputs = {"input_ids": ids, "position_ids": torch.arange(ids.shape[1]).expand_as(ids)}
    found = run_graph(program, weights.read, inputs, [node.name], wide=wide, weights=weights)[
        node.name
    ]
    return torch.cat([found[i, : len(ids)] for i, ids in enumerate(tokens)]).float()


class _Cached:
    """A graph with a paged cache, its pools, and which blocks each sequence has."""

    def __init__(
        self, program: Program, tokens: Sequence[Tensor], weights: GraphWeights, wide: bool
    ) -> None:
        self.program, self.tokens, self.weights, self.wide = program, tokens, weights, wide
        random = torch.Generator().manual_seed(1)
        each = -(-max(map(len, tokens)) // BLOCK_SIZE)
        order = torch.randperm(len(tokens) * each + 2, generator=random)  # two belong to nobody
        self.tables = order[: len(tokens) * each].view(len(tokens), each)
        self.pools: dict[str, Tensor] = {}
        for node in program.graph.find_nodes(op="placeholder"):
            if "_pool_" in str(node.target):
                value = node.meta["val"]
                shape = len(order), BLOCK_SIZE, *map(int, value.shape[2:])
                junk = torch.randn(shape, generator=random)
                self.pools[str(node.target)] = junk if wide else junk.to(value.dtype)

    def logits(self) -> Tensor:
        parts: list[list[Tensor]] = [[] for _ in self.tokens]
        ends = [len(ids) for ids in self.tokens]
        for start, end in (
            ([0 for _ in ends], [n - 1 for n in ends]),
            ([n - 1 for n in ends], ends),
        ):
            if all(a < b for a, b in zip(start, end, strict=True)):
                for part, found in zip(parts, self._step(start, end), strict=True):
                    part.append(found)
        return torch.cat([piece for part in parts for piece in part]).float()

    def _step(self, start: list[int], end: list[int]) -> list[Tensor]:
        """Every sequence's tokens from `start` to `end` -> its logits."""
        new = [ids[a:b] for ids, a, b in zip(self.tokens, start, end, strict=True)]
        at = [torch.arange(a, b) for a, b in zip(start, end, strict=True)]
        slots = [
            table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
            for table, positions in zip(self.tables, at, strict=True)
        ]
        counts = torch.tensor([len(ids) for ids in new])
        past = torch.tensor(start)
        if self.program.form == "ragged":
            inputs = {
                "token_ids": torch.cat(new), "positions": torch.cat(at),
                "slot_mapping": torch.cat(slots), "context_lens": past + counts,
                "query_start": pad(counts.cumsum(0), (1, 0)),
                "logits_rows": torch.arange(int(counts.sum())),
            }  # fmt: skip
        else:
            ids = _padded(new)
            real = [i * ids.shape[1] + torch.arange(n) for i, n in enumerate(counts.tolist())]
            inputs = {
                "token_ids": ids, "positions": _padded(at), "past_lens": past,
                "logits_rows": torch.cat(real),
            }  # fmt: skip
        inputs |= {"block_tables": self.tables} | self.pools
        nodes = output_nodes(self.program)
        found = run_graph(
            self.program, self.weights.read, inputs, [node.name for node in nodes],
            wide=self.wide, weights=self.weights,
        )  # fmt: skip
        for name, node in list(zip(self.program.outputs, nodes, strict=True))[1:]:
            pool = self.pools[name.replace("new_", "").replace("_", "_pool_")]
            values = found[node.name].flatten(0, 1)[inputs["logits_rows"]]
            pool.flatten(0, 1)[torch.cat(slots)] = values.to(pool.dtype)
        return list(torch.split(found[nodes[0].name], counts.tolist()))


def _padded(rows: Sequence[Tensor]) -> Tensor:
    """[rows, longest], zeros behind the shorter ones."""
    longest = max(map(len, rows))
    return torch.stack([pad(row, (0, longest - len(row))) for row in rows])
