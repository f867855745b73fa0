"""Decode steps through captured graphs, on the CPU: a capture that runs its step again at each
replay, on a graph that torch runs node by node. What a replay reads must lie where it lay at the
capture; what it computes must equal plain steps; rows without a sequence must touch nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_runtime_llm import manifest_for
from torch import Tensor
from transformers import AutoTokenizer

from seekforge.compile.execute import materialise
from seekforge.passes.pipeline import run_pipeline
from seekforge.runtime import inductor
from seekforge.runtime.decode_inputs import DecodeInputs, is_decode
from seekforge.runtime.graphs import Captured, Graphs, ladder
from seekforge.runtime.inductor import InductorSession
from seekforge.runtime.llm import LLM
from seekforge.runtime.manifest import KVLayout, Limits
from seekforge.runtime.sampling import SamplingParams
from seekforge.runtime.session import Chunk, ragged_inputs

BLOCK, MAX_LEN, MAX_BATCH = 4, 64, 6
Served = tuple[dict[int, list[int]], set[int]]  # tokens by request, and which were aborted


class Again:
    """Captures by running the step again, into the memory of the first output."""

    def __init__(self) -> None:
        self.captured = 0

    def __call__(self, step: Callable[[], Tensor]) -> Captured:
        self.captured += 1
        output = step().clone()
        return Captured(lambda: output.copy_(step()), output)  # type: ignore[arg-type, return-value]


class Package:
    """A compiled package's loader, run by torch. A package reads addresses: it would take other
    strides or dtypes for garbage (B47, B49)."""

    def __init__(self, graph: Callable[..., Any]) -> None:
        self.graph = graph

    def run(self, inputs: list[Tensor]) -> tuple[Tensor]:
        assert all(tensor.is_contiguous() for tensor in inputs)
        assert all(tensor.dtype == torch.int64 for tensor in inputs[:7])
        with torch.no_grad():
            return tuple(self.graph(*inputs))  # type: ignore[return-value]


@pytest.fixture
def open_tiny(
    exported: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., InductorSession]:
    """Factory `(family, capture=None) -> session` of a tiny engine without its compiler."""

    def make(family: str, capture: Any = None) -> InductorSession:
        program, module = exported(family)
        run_pipeline(program, "ragged", MAX_LEN, None)
        weights = dict(module.named_parameters())
        package = Package(materialise(program, lambda name: weights[name]))
        monkeypatch.setattr(InductorSession, "_load", lambda self, path: package)
        monkeypatch.setattr(inductor, "load_weights", lambda path, device: {})
        kv = KVLayout(2, BLOCK, {"k": (2, 8), "v": (2, 8)}, "float32", True)
        limits = Limits(MAX_LEN, MAX_BATCH, 16)
        manifest = manifest_for(293, eos=(1,), kv=kv, limits=limits)
        return InductorSession(Path("none"), manifest, capture=capture)

    return make


def test_ladder() -> None:
    assert ladder(1) == (1,)
    assert ladder(6) == (1, 2, 4, 6)
    assert ladder(32) == (1, 2, 4, 8, 16, 24, 32)
    assert ladder(100) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100)
    graphs = Graphs(lambda size: torch.zeros(size, 1), Again(), ladder(32))
    assert [graphs.size_for(n) for n in (1, 3, 8, 9, 32)] == [1, 4, 8, 16, 32]
    assert graphs.size_for(33) is None


def test_captured_once_each_and_largest_first() -> None:
    steps: list[int] = []

    def step(size: int) -> Tensor:
        steps.append(size)
        return torch.full((size, 1), float(len(steps)))

    capture = Again()
    graphs = Graphs(step, capture, (1, 2, 4))
    assert graphs.run(2).shape == (2, 1) and steps == [2, 2], "captured, then replayed"
    graphs.capture_all()
    assert steps == [2, 2, 4, 1] and capture.captured == 3
    first, again = graphs.run(4), graphs.run(4)
    assert first is again and capture.captured == 3, "a replay writes where the capture wrote"


def test_failed_capture_is_said_once_and_runs_plainly() -> None:
    def fail(step: Callable[[], Tensor]) -> Captured:
        raise MemoryError("its step takes 900 MiB, and 20 MiB are free")

    graphs = Graphs(lambda size: torch.full((size, 1), 7.0), fail, (1, 2))
    with pytest.warns(UserWarning, match="1 sequences could not be captured.*900 MiB") as said:
        assert graphs.run(1).tolist() == [[7.0]]
        assert graphs.run(1).tolist() == [[7.0]] and graphs.run(2).tolist() == [[7.0], [7.0]]
    assert len(said) == 1


def decode(token: int, start: int, *blocks: int) -> Chunk:
    return Chunk([token], start, list(blocks), [0])


def test_inputs_equal_those_of_a_plain_step() -> None:
    """B49, B65: int64 throughout, and the same memory however the batch changes."""
    inputs = DecodeInputs(8, 16, BLOCK, 99, torch.device("cpu"))
    addresses = [tensor.data_ptr() for tensor in inputs.tensors(4)]
    batches = [
        [decode(5, 3, 7)],
        [decode(6, 4, 7, 2), decode(8, 0, 3), decode(1, 9, 4, 6, 5)],
        [decode(9, 1, 3), decode(2, 10, 4, 6, 5)],
    ]
    for chunks in batches:
        inputs.write(chunks, 4)
        given, plain = inputs.tensors(4), ragged_inputs(chunks, BLOCK)
        assert [tensor.data_ptr() for tensor in given] == addresses
        assert all(tensor.dtype == torch.int64 and tensor.is_contiguous() for tensor in given)
        live = len(chunks)
        tokens, positions, slots, tables, contexts, starts, rows = given
        assert torch.equal(tokens[:live], plain.token_ids)
        assert torch.equal(positions[:live], plain.positions)
        assert torch.equal(slots[:live], plain.slot_mapping)
        assert torch.equal(contexts[:live], plain.context_lens)
        assert torch.equal(starts[: live + 1], plain.query_start)
        assert torch.equal(rows[:live], plain.logits_rows)
        for row, chunk in enumerate(chunks):
            held = len(chunk.block_table)
            assert tables[row, :held].tolist() == chunk.block_table
            assert (tables[row, held:] == 99).all()
        assert (slots[live:] == -1).all() and (tables[live:] == 99).all(), "B63"
        assert (contexts[live:] == 1).all() and (tokens[live:] == 0).all()


def test_only_single_tokens_with_logits_are_decodes() -> None:
    one, two = Chunk([5], 3, [7], [0]), Chunk([5, 6], 3, [7, 8], [1])
    assert is_decode([one, one]) and not is_decode([one, two])
    assert not is_decode([Chunk([5], 3, [7], [])]), "a chunk of a long prompt"


@pytest.mark.parametrize("live", [3, 5])
def test_rows_without_a_sequence_touch_nothing(
    open_tiny: Callable[..., InductorSession], live: int
) -> None:
    """B63: no value outside the live slots changes, in any block, the spare one included."""
    plain, session = open_tiny("qwen2"), open_tiny("qwen2", Again())
    for each in (plain, session):
        each.allocate(12, BLOCK)
        torch.manual_seed(1)
        for pool in each.pools:
            pool[:12] = torch.randn(12, *pool.shape[1:])
    assert session.pools[0].shape[0] == 13 and not session.pools[0][12].any()
    chunks = [Chunk([20 + i], 2 * i + 1, [2 * i, 2 * i + 1, 11 - i], [0]) for i in range(live)]
    before = [pool.clone() for pool in session.pools]
    found, expected = session.step(chunks), plain.step(chunks)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    slots = ragged_inputs(chunks, BLOCK).slot_mapping
    for old, pool, right in zip(before, session.pools, plain.pools, strict=True):
        changed = (old != pool).flatten(0, 1).any(-1).any(-1).nonzero().flatten()
        assert changed.tolist() == sorted(slots.tolist())
        assert torch.allclose(pool[:12], right, rtol=1e-5, atol=1e-5)


def serve(llm: LLM, steps: int, between: Callable[[], None] = lambda: None) -> Served:
    """Requests that come and are aborted at random, the same each time. between: called before
    each step."""
    draw, tokens, aborted = random.Random(5), dict[int, list[int]](), set[int]()
    left = steps
    while left or llm.scheduler.running or llm.scheduler.waiting:
        left = max(0, left - 1)
        if left and draw.random() < 0.25:
            prompt = [draw.randrange(3, 280) for _ in range(draw.randrange(1, 30))]
            params = SamplingParams(
                max_tokens=draw.randrange(2, 30), ignore_eos=True, seed=left,
                temperature=draw.choice([0.0, 0.9]),
            )  # fmt: skip
            tokens[llm.add_request(prompt, params)] = []
        if left and draw.random() < 0.05 and tokens:
            request = draw.choice(list(tokens))
            aborted.add(request)
            llm.abort(request)
        between()
        for delta in llm.step():
            tokens[delta.request_id] += delta.token_ids
    assert llm.step() == [] and llm.blocks.num_used == 0
    assert len(tokens) > 20 and len(aborted) > 2
    return tokens, aborted


def assert_same(found: Served, expected: Served) -> None:
    """An abort may come a token earlier or later; all others are equal."""
    (ours, aborted), (theirs, _) = found, expected
    for request, right in theirs.items():
        tokens = ours[request]
        length = min(len(tokens), len(right)) if request in aborted else len(right)
        assert tokens[:length] == right[:length], f"{request=}"
        assert request in aborted or len(tokens) == length


@pytest.mark.parametrize("overlap", [False, True])
def test_mixed_steps_with_graphs_equal_those_without(
    open_tiny: Callable[..., InductorSession],
    tiny_checkpoint: Callable[..., Path],
    overlap: bool,
) -> None:
    """B65: prefills, batches that grow and shrink, preemptions and aborts, 130 steps and more."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint("llama"))
    capture = Again()
    llms = [
        LLM("", session=open_tiny("llama", each), tokenizer=tokenizer, num_blocks=30, overlap=ahead)
        for each, ahead in ((None, False), (capture, overlap))
    ]
    plain, graphed = (serve(llm, 130) for llm in llms)
    assert_same(graphed, plain)
    assert llms[1].scheduler.num_preemptions > 0 and capture.captured >= 3


def test_overlap_reads_a_step_when_the_next_is_on_its_way(
    open_tiny: Callable[..., InductorSession], tiny_checkpoint: Callable[..., Path]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint("llama"))
    llm = LLM("", session=open_tiny("llama", Again()), tokenizer=tokenizer, overlap=True)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    llm.add_request([5, 6, 7], params)
    assert [len(llm.step()) for _ in range(5)] == [0, 1, 1, 1, 0]
    assert llm.blocks.num_used == 0
