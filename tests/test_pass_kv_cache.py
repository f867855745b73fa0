"""Whole tiny models in both cached forms: every position's logits are transformers'.

`Served` feeds a graph as a runtime would, with its own block tables; nothing of runtime/ is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from seekforge.compile.execute import materialise
from seekforge.kernels.errors import BuildError
from seekforge.kernels.gathered_attention import gathered_attention
from seekforge.kernels.paged_attention import paged_attention
from seekforge.kernels.tolerance import assert_close
from seekforge.passes.cleanup import cleanup
from seekforge.passes.kv_cache import PADDED, RAGGED, example_inputs, insert_kv_cache
from seekforge.passes.pipeline import run_fusions
from seekforge.passes.program import Program

FORMS = ["ragged", "padded"]
VOCAB = 293


class Served:
    """A graph with its pools. Sequences have fixed, shuffled block tables for up to 64 tokens."""

    def __init__(
        self, program: Program, module: nn.Module, block_size: int, sequences: int
    ) -> None:
        self.form, self.block_size = program.form, block_size
        self.graph = materialise(program, module.get_parameter)
        blocks = -(-64 // block_size)
        order = torch.randperm(sequences * blocks + 2, generator=torch.Generator().manual_seed(1))
        self.tables = order[: sequences * blocks].view(sequences, blocks)
        self.pools: list[Tensor] = []
        for node in program.graph.find_nodes(op="placeholder"):
            if "pool" in str(node.target):
                value = node.meta["val"]
                shape = len(order), block_size, *map(int, value.shape[-2:])
                self.pools.append(torch.randn(shape).to(value.dtype))  # slots not written are junk
        self.held = [0] * sequences

    def slots(self, sequence: int, count: int) -> Tensor:
        at = torch.arange(self.held[sequence], self.held[sequence] + count)
        blocks = self.tables[sequence][at // self.block_size]
        return blocks * self.block_size + at % self.block_size

    @torch.no_grad()
    def step(self, chunks: dict[int, Tensor]) -> list[Tensor]:
        """Feeds each sequence its next tokens; returns its logits [new tokens, vocab]."""
        rows = list(chunks)
        counts = [len(chunks[i]) for i in rows]
        past = torch.tensor([self.held[i] for i in rows])
        slots = [self.slots(i, len(chunks[i])) for i in rows]
        positions = [torch.arange(self.held[i], self.held[i] + len(chunks[i])) for i in rows]
        used = -(-int((past + torch.tensor(counts)).max()) // self.block_size)
        tables = self.tables[rows][:, :used]
        if self.form == "ragged":
            start = torch.tensor([0, *counts]).cumsum(0)
            (logits,) = self.graph(
                torch.cat(list(chunks.values())), torch.cat(positions), torch.cat(slots), tables,
                past + torch.tensor(counts), start, torch.arange(sum(counts)), *self.pools,
            )  # fmt: skip
        else:
            # Right padding: any token, any position, any K and V of it.
            wide = max(counts)
            ids, at = (
                torch.stack(
                    [torch.nn.functional.pad(x, (0, wide - len(x)), value=9) for x in rows_of]
                )
                for rows_of in (list(chunks.values()), positions)
            )
            real = torch.cat([i * wide + torch.arange(count) for i, count in enumerate(counts)])
            logits, *new = self.graph(ids, at, tables, past, real, *self.pools)
            for pool, values in zip(self.pools, new, strict=True):
                pool.flatten(0, 1)[torch.cat(slots)] = values.flatten(0, 1)[real]
        for i in rows:
            self.held[i] += len(chunks[i])
        return list(logits.split(counts))


@pytest.fixture(scope="module")
def served(exported: Callable[..., Any]) -> Callable[..., tuple[Served, nn.Module]]:
    """Factory `(form, family, dtype=float32, block_size=4) -> (Served, eager module)`."""
    made: dict[Any, tuple[Program, nn.Module]] = {}

    def make(
        form: str, family: str, dtype: torch.dtype = torch.float32, block_size: int = 4
    ) -> tuple[Served, nn.Module]:
        if (form, family, dtype) not in made:
            program, module = exported(family, dtype)
            run_fusions(program, 64)
            results, _ = insert_kv_cache(program, form)
            assert [(r.name, r.fired) for r in results] == [("kv_cache", 2), ("logits_rows", 1)]
            made[form, family, dtype] = program, module
        program, module = made[form, family, dtype]
        return Served(program, module, block_size, 3), module

    return make


def eager(module: nn.Module, ids: Tensor) -> Tensor:
    """Logits [tokens, vocab] of one sequence from position 0."""
    return module(input_ids=ids[None], use_cache=False).logits[0]


PROMPTS = [
    torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)) for n in (29, 9, 18)
]
PLAN = [  # tokens of each sequence in each step: prefills, chunks and decodes mixed
    {0: 12, 1: 1},
    {1: 5, 0: 1, 2: 16},
    {0: 3, 1: 1, 2: 1},
    {0: 1, 1: 1, 2: 1},
    {2: 0, 0: 12, 1: 1},
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("block_size", [4, 16])
def test_every_position_of_mixed_steps(
    served: Callable[..., Any], family: str, form: str, block_size: int
) -> None:
    engine, module = served(form, family, block_size=block_size)
    given: list[list[Tensor]] = [[], [], []]
    for counts in PLAN:
        chunks = {
            i: PROMPTS[i][engine.held[i] : engine.held[i] + n] for i, n in counts.items() if n
        }
        for i, logits in zip(chunks, engine.step(chunks), strict=True):
            given[i].append(logits)
    assert engine.held == [len(prompt) for prompt in PROMPTS]
    for prompt, logits in zip(PROMPTS, given, strict=True):
        assert_close(torch.cat(logits), eager(module, prompt), f"{len(prompt)} tokens")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")  # `cache` since 5.2x
def test_equals_transformers_with_its_cache(
    served: Callable[..., Any], tiny_model: Callable[..., nn.Module], form: str
) -> None:
    """B54: past 0 + 12, 12 + 1, 13 + 3 against transformers' own attention and cache."""
    engine, _ = served(form, "llama")
    oracle, cache = tiny_model("llama"), DynamicCache()
    for count in (12, 1, 3):
        ids = PROMPTS[0][engine.held[0] : engine.held[0] + count]
        right = oracle(input_ids=ids[None], past_key_values=cache, use_cache=True).logits[0]
        assert_close(engine.step({0: ids})[0], right, f"{count} after {engine.held[0]}")


@pytest.mark.parametrize("form", FORMS)
def test_later_tokens_do_not_change_earlier_logits(served: Callable[..., Any], form: str) -> None:
    changed = PROMPTS[0].clone()
    changed[7] = 3
    logits = [served(form, "llama")[0].step({1: ids})[0] for ids in (PROMPTS[0], changed)]
    assert torch.equal(logits[0][:7], logits[1][:7])
    assert (logits[0][7:] != logits[1][7:]).any(-1).all()


def test_padding_does_not_change_real_rows(served: Callable[..., Any]) -> None:
    """A short chunk beside a long one, and alone."""
    together, alone = (served("padded", "qwen3")[0] for _ in range(2))
    short = together.step({0: PROMPTS[0], 1: PROMPTS[1][:2]})[1]
    assert_close(short, alone.step({1: PROMPTS[1][:2]})[0], "beside a longer row")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_half_precision_is_as_near_as_eager(
    exported: Callable[..., Any], served: Callable[..., Any], form: str, dtype: torch.dtype
) -> None:
    """Judged by fp32: the error is at most 1.1 times that of transformers in the same dtype."""
    engine, module = served(form, "llama", dtype)
    _, judge = exported("llama")
    right = torch.cat([eager(judge, prompt) for prompt in PROMPTS])
    ours = torch.cat(engine.step(dict(enumerate(PROMPTS)))).float()
    theirs = torch.cat([eager(module, prompt) for prompt in PROMPTS]).float()
    assert engine.pools[0].dtype == dtype
    assert (ours - right).norm() <= 1.1 * (theirs - right).norm()


@pytest.mark.parametrize(("form", "dims"), [("ragged", RAGGED), ("padded", PADDED)])
def test_inputs_and_outputs(exported: Callable[..., Any], form: str, dims: dict[str, Any]) -> None:
    program, _ = exported("qwen3")
    run_fusions(program, 64)
    _, inputs = insert_kv_cache(program, form)
    pools = [f"{kind}_pool_{i}" for i in range(2) for kind in "kv"]
    names = [*dims, *pools]
    assert [entry.name for entry in inputs] == names == program.inputs
    placeholders = program.graph.find_nodes(op="placeholder")
    assert [node.target for node in placeholders] == names
    assert all(entry.dtype == torch.int64 for entry in inputs[: len(dims)])
    assert {entry.dims for entry in inputs[len(dims) :]} == {("blocks", "block_size", 1, 16)}
    for node, entry in zip(placeholders, inputs, strict=True):
        dynamic = [isinstance(size, torch.SymInt) for size in node.meta["val"].shape]
        assert dynamic == [isinstance(size, str) for size in entry.dims], entry.name
    new = [f"new_{kind}_{i}" for i in range(2) for kind in "kv"] if form == "padded" else []
    assert program.outputs == ["logits", *new]
    values = [node.meta["val"] for node in program.graph.output_node().args[0]]
    assert len(values) == len(program.outputs)
    assert all(value.shape[2:] == (1, 16) for value in values[1:])
    op = paged_attention if form == "ragged" else gathered_attention
    assert len(program.nodes(op)) == 2
    assert [tuple(x.shape) for x in example_inputs(inputs)][-1] == (19, 16, 1, 16)


@pytest.mark.parametrize("form", FORMS)
def test_residual_stream_is_flat(exported: Callable[..., Any], form: str) -> None:
    """[tokens, hidden] in both forms: TensorRT otherwise keeps most weights twice."""
    program, _ = exported("llama")
    run_fusions(program, 64)
    insert_kv_cache(program, form)
    linears = program.nodes(torch.ops.aten.linear.default)
    assert {node.meta["val"].dim() for node in linears} == {2}


def test_without_fusions(exported: Callable[..., Any]) -> None:
    """The cache does not depend on what was fused before."""
    for form in FORMS:
        program, module = exported("qwen2")
        cleanup(program)
        insert_kv_cache(program, form)
        engine = Served(program, module, 4, 3)
        logits = torch.cat(
            [engine.step({0: PROMPTS[1][:5]})[0], engine.step({0: PROMPTS[1][5:]})[0]]
        )
        assert_close(logits, eager(module, PROMPTS[1]), form)


def test_a_missing_layer_is_an_error(exported: Callable[..., Any]) -> None:
    program, _ = exported("llama")
    cleanup(program)
    first = program.nodes(torch.ops.seekforge.attention.default)[0]
    first.args = (*first.args[:4], 5)
    with pytest.raises(BuildError, match=r"numbered \[1, 5\], expected 0\.\.1"):
        insert_kv_cache(program, "ragged")


def test_other_uses_of_the_attention_are_an_error(exported: Callable[..., Any]) -> None:
    program, _ = exported("llama")
    cleanup(program)
    node = program.nodes(torch.ops.seekforge.attention.default)[0]
    (view,) = node.users
    view.args = (node, [-1, 32])
    view.meta["val"] = view.meta["val"].flatten(0, 1)
    with pytest.raises(BuildError, match=r"expected a view as \[batch, seq, 32\]"):
        insert_kv_cache(program, "ragged")
