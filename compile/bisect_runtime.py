"""The runtime with a paged cache against first principles: what it hands to the engine, and what
comes back.

Several requests of different lengths go through an engine in chunks, arriving and ending at
different times, so that block tables are long, not in order, and handed on. Beside them runs a
ledger that needs no block manager: the slot to which a token's K and V were written is where every
later step must look for them, and no two tokens of running sequences share one. What each index
tensor must hold follows from the tokens and the tables. Then the logits: those of a token must be
eager's for the same text.

Where a tensor is wrong, the culprit is that tensor, with sequence, step and place; where all of
them are right and the logits are not, it is the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seekforge.compile.bisect_engine import Allowed
from seekforge.compile.bisect_ledger import (
    LAYOUT,
    Call,
    Item,
    Ledger,
    Mismatch,
    expected_calls,
)
from seekforge.compile.bisect_reference import Reference
from seekforge.compile.bisect_result import Culprit, Found
from seekforge.runtime.llm import LLM
from seekforge.runtime.manifest import read_manifest
from seekforge.runtime.sampling import SamplingParams

# (prompt tokens, new tokens, the step in which the request arrives), in blocks for the first.
REQUESTS = ((1.25, 4, 0), (2.7, 7, 1), (0.6, 3, 2), (1.9, 6, 6))


@dataclass(slots=True)
class Trace:
    """What one run showed. steps, tensors: how many were looked at. logits: {(sequence, position):
    row}, of the positions that were sampled from. tokens: of each sequence, at the end."""

    steps: int = 0
    tensors: int = 0
    logits: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)


def run_requests(directory: Path, text: list[int]) -> Trace:
    """Serves REQUESTS with the engine, every tensor checked. text: token ids, from which the
    prompts are cut. Raises Found for the first tensor that is wrong."""
    manifest = read_manifest(directory, check_files=False)
    block, limits = manifest.kv.block_size, manifest.limits
    lengths = [
        (min(max(2, int(p * block)), limits.max_len - new), new, step) for p, new, step in REQUESTS
    ]
    blocks = [-(-(prompt + new) // block) for prompt, new, _ in lengths]
    llm = LLM(
        directory,
        max_batch=min(3, limits.max_batch),
        max_chunk=min(limits.max_chunk, max(2, block // 2 + 1)),
        num_blocks=max(*blocks, 2 * sum(blocks) // 3),  # not for all at once: blocks change hands
        overlap=False,
    )
    if manifest.device == "cuda":  # replayed graphs can't be looked into
        llm.session.graphs = None  # type: ignore[attr-defined]
    watch = _Watch(llm)
    start, number, running = 0, 0, set[int]()
    while lengths or running:
        while lengths and (lengths[0][2] <= number or not running):
            prompt, new, _ = lengths.pop(0)
            ids = [text[(start + i) % len(text)] for i in range(prompt)]
            start += prompt
            running.add(llm.add_request(ids, SamplingParams(max_tokens=new, ignore_eos=True)))
        running -= watch.step()
        number += 1
    watch.trace.tokens = {id: list(s.token_ids) for id, s in watch.sequences.items()}
    return watch.trace


def check_answers(trace: Trace, reference: Reference, backend: str) -> float:
    """The logits that were sampled from against eager's for the same text: the worst share of what
    is allowed. Raises Found."""
    sequences = sorted(trace.tokens)
    at = [sorted(p for s, p in trace.logits if s == sequence) for sequence in sequences]
    usual, judge = (
        [logits[0, rows] for logits, rows in zip(side, at, strict=True)]
        for side in reference.logits([torch.tensor([trace.tokens[s]]) for s in sequences])
    )
    allowed = Allowed.by(torch.cat(usual), torch.cat(judge), reference.routed)
    worst = 0.0
    for index, sequence in enumerate(sequences):
        found = torch.stack([trace.logits[sequence, p] for p in at[index]])
        share = allowed.part(found, judge[index])
        worst = max(worst, share)
        if not share <= 1:
            culprit = Culprit(
                step="runtime",
                node="logits",
                operator=backend,
                layer=None,
                module="",
                source="",
                error=share,
                limit=1.0,
                detail=f"sequence {sequence}, positions {at[index]}: every index tensor is right, "
                "what the engine answers is not",
                tensors={"reference": usual[index], "found": found},
            )
            raise Found(culprit)
    return worst


class _Watch:
    """Looks at what the scheduler plans, what the compiled model gets, and what it answers."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.trace = Trace()
        self.ledger = Ledger(llm.blocks.block_size, llm.blocks.num_blocks)
        self.items: list[Item] = []
        self.calls: list[Call] = []  # of this step, still to come
        self.done: list[tuple[Call, dict[str, Tensor]]] = []  # with their outputs
        self.sequences: dict[int, Any] = {}
        session: Any = llm.session
        self.schedule, self.run_step = llm.scheduler.schedule, session.step
        llm.scheduler.schedule = self._planned  # type: ignore[method-assign]
        session.step = self._stepped
        if llm.manifest.form == "padded":
            self.run_model = session._run
            session._run = self._ran_padded
        else:
            for name in ("model", "decode"):
                setattr(session, name, _Loader(getattr(session, name), self._ran_ragged))

    def step(self) -> set[int]:
        """One step of the engine; the requests that ended with it."""
        try:
            deltas = self.llm.step()
        except Mismatch as found:
            raise Found(self._culprit(found)) from None
        except (KeyboardInterrupt, MemoryError):
            raise
        except Exception as error:  # over something that the ledger has nothing against
            fell = Mismatch("step", -1, f"raises {type(error).__name__}: {error}")
            raise Found(self._culprit(fell)) from error
        self.trace.steps += 1
        return {delta.request_id for delta in deltas if delta.finish_reason is not None}

    def _planned(self) -> Any:
        planned = self.schedule()
        self.ledger.forget({sequence.id for sequence in self.llm.scheduler.running})
        self.items, self.done = [], []
        for entry in planned:
            sequence, start = entry.sequence, entry.sequence.num_computed
            self.sequences[sequence.id] = sequence
            tokens = list(sequence.token_ids[start : start + entry.num_tokens])
            table = list(self.llm.blocks.table(sequence.id))
            final = entry.num_tokens == sequence.num_pending
            self.items.append(Item(sequence.id, start, tokens, table, final))
        self.ledger.check(self.items)
        self.calls = expected_calls(self.items, self.llm.manifest.form, self.ledger.block_size)
        return planned

    def _stepped(self, chunks: Any, last: Tensor | None = None) -> Tensor:
        logits: Tensor = self.run_step(chunks, last)
        if self.calls:
            raise Mismatch("calls", -1, f"{len(self.calls)} of the engine are missing", LAYOUT)
        for call, outputs in self.done:
            self.ledger.check_written(call, self.llm.session.pools, outputs)  # type: ignore[attr-defined]
        sampled = [item for item in self.items if item.final]
        if len(logits) != len(sampled):
            told = f"{len(logits)} rows for {len(sampled)} sequences that sample"
            raise Mismatch("logits", -1, told, LAYOUT)
        for item, row in zip(sampled, logits.float().cpu(), strict=True):
            self.trace.logits[item.sequence, item.end - 1] = row.clone()
        self.ledger.written(self.items)
        return logits

    def _ran_ragged(self, run: Callable[[Any], Any], inputs: list[Tensor]) -> Any:
        names = [spec.name for spec in self.llm.manifest.inputs]
        self._compare(dict(zip(names, inputs, strict=True)))
        return run(inputs)

    def _ran_padded(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        call = self._compare(given)
        outputs: dict[str, Tensor] = self.run_model(given)
        self.done.append((call, outputs))
        return outputs

    def _compare(self, given: dict[str, Tensor]) -> Call:
        if not self.calls:
            raise Mismatch("calls", -1, "one more of the engine than the step needs", LAYOUT)
        call = self.calls.pop(0)
        for name in call.inputs:
            self.ledger.compare(call, name, given[name].cpu())
            self.trace.tensors += 1
        return call

    def _culprit(self, found: Mismatch) -> Culprit:
        where = f" of sequence {found.sequence}" if found.sequence >= 0 else ""
        return Culprit(
            step="runtime",
            node=found.tensor,
            operator="runtime",
            layer=None,
            module="",
            source=found.source,
            error=float("inf"),
            limit=0.0,
            detail=f"step {self.trace.steps}: {found.tensor}{where}: {found.detail}",
            tensors=found.tensors,
        )


class _Loader:
    """In place of a compiled package: shows its inputs to `watch` first."""

    def __init__(self, loader: Any, watch: Callable[..., Any]) -> None:
        self.loader, self.watch = loader, watch

    def run(self, inputs: list[Tensor]) -> Any:
        return self.watch(self.loader.run, inputs)
