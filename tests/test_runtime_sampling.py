"""The sampler: extreme parameters, independence of rows, ids that must not come out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from seekforge.kernels.errors import InputError
from seekforge.runtime.sampling import Sampler, SamplingParams, make_generator

V = 64


def draws(
    logits: torch.Tensor, count: int, sampler: Sampler | None = None, **params: Any
) -> set[int | None]:
    wanted = SamplingParams(**params)
    generator = make_generator(params.get("seed", 0), 0)
    sampler = sampler or Sampler(logits.shape[-1])
    return {sampler.sample(logits[None], [wanted], [generator])[0] for _ in range(count)}


@pytest.mark.parametrize("top_p", [0, 1e-8, 1e-4, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tiny_top_p_is_argmax(top_p: float, dtype: torch.dtype) -> None:  # B69
    logits = torch.randn(V, generator=torch.Generator().manual_seed(0)).to(dtype).float()
    assert draws(logits, 200, temperature=1.0, top_p=top_p) == {int(logits.argmax())}


@pytest.mark.parametrize("top_k", [-1, 0, 10**9])
def test_top_k_off_or_beyond_the_vocabulary(top_k: int) -> None:  # B69
    assert draws(torch.zeros(4), 200, temperature=1.0, top_k=top_k) == {0, 1, 2, 3}


def test_filters_keep_what_they_should() -> None:
    logits = torch.tensor([0.1, 0.4, 0.3, 0.2]).log()
    assert draws(logits, 300, temperature=1.0, top_k=2) == {1, 2}
    assert draws(logits, 300, temperature=1.0, top_p=0.69) == {1, 2}
    assert draws(logits, 300, temperature=1.0, top_p=0.71) == {1, 2, 3}
    assert draws(logits, 300, temperature=1.0, min_p=0.45) == {1, 2, 3}
    # In order: after top_k 2 the likeliest has 4/7, so top_p 0.5 leaves it alone.
    assert draws(logits, 300, temperature=1.0, top_k=2, top_p=0.5) == {1}
    # A tie at the cut: two of the three equal ones, never all.
    assert len(draws(torch.tensor([1.0, 1.0, 1.0, 0.0]), 300, temperature=1.0, top_k=2)) == 2


def test_draws_follow_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.25, 0.125, 0.125])
    sampler, count = Sampler(4), 4000
    generators = [make_generator(7, i) for i in range(count)]
    params = [SamplingParams(temperature=0.5)] * count  # squares the ratios below
    ids = sampler.sample((probs.log() / 2).expand(count, 4), params, generators)
    frequency = torch.bincount(torch.tensor(ids), minlength=4) / count
    assert (frequency - probs).abs().max() < 0.03, frequency


@pytest.mark.parametrize("temperature", [0, 1e-320, 1e-12, 1e-6, 1e-5, 1e-4, 1e-3])
def test_small_temperatures_are_argmax(temperature: float) -> None:  # B70
    logits = torch.tensor([-2.45, 11.0625, 2.95], dtype=torch.float16).float()
    assert draws(logits, 50, temperature=temperature) == {1}


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": "1"},
        {"top_p": -0.1},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"min_p": 2},
        {"top_k": 1.5},
        {"repetition_penalty": 0},
        {"presence_penalty": math.nan},
        {"frequency_penalty": "1"},
        {"n": 0},
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"seed": "a"},
        {"stop": [""]},
        {"stop": [5]},
        {"stop_token_ids": [-1]},
    ],
    ids=str,
)
def test_bad_parameters_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(bad))) as caught:
        SamplingParams(**bad)
    assert caught.value.exit_code == 2


def test_a_seeded_row_does_not_depend_on_its_neighbours() -> None:  # B72
    logits = torch.randn(5, V, generator=torch.Generator().manual_seed(1))
    a, other = SamplingParams(temperature=0.8, seed=42), SamplingParams(temperature=0.8)
    seeded = SamplingParams(temperature=0.8, seed=43, top_p=0.9)

    def row_of_a(batch: list[SamplingParams]) -> list[int | None]:
        sampler, row = Sampler(V), batch.index(a)
        generators = [make_generator(params.seed, 0) for params in batch]
        rows = [sampler.sample(step.expand(len(batch), V), batch, generators) for step in logits]
        return [ids[row] for ids in rows]

    alone = row_of_a([a])
    for batch in ([a, other], [a, seeded], [seeded, a], [other, SamplingParams(), a]):
        assert row_of_a(batch) == alone


def test_seeds_choices_and_no_seed_differ() -> None:  # B72
    def first(seed: int | None, choice: int) -> float:
        return float(torch.rand((), generator=make_generator(seed, choice), dtype=torch.float64))

    assert first(1, 0) == first(1, 0)
    values = [first(1, 0), first(1, 1), first(1, 2), first(2, 0), first(None, 0), first(None, 0)]
    assert len(set(values)) == len(values)
    for seed in (-1, 0, 2**64, -(2**70)):
        make_generator(seed, 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_ids_the_tokenizer_knows(temperature: float) -> None:  # B19
    known = [*range(100), 120, 500]  # an id beyond the logits is harmless
    sampler = Sampler(128, known)
    logits = torch.zeros(128)
    logits[110] = 50.0
    logits[120] = 25.0
    assert draws(logits, 50, sampler, temperature=temperature) == {120}
    logits[110] = math.nan  # nor does what the unknown ones hold matter
    assert draws(logits, 50, sampler, temperature=temperature) == {120}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_no_distribution_gives_none(temperature: float, value: float) -> None:
    logits = torch.zeros(3, 8)
    logits[:, 3] = 1.0
    logits[1] = value
    params = [SamplingParams(temperature=temperature, top_k=1)] * 3
    ids = Sampler(8).sample(logits, params, [make_generator(0, i) for i in range(3)])
    assert ids == [3, None, 3]
    logits[1, :] = 0.0
    logits[1, 5] = math.nan
    assert Sampler(8).sample(logits, params, [make_generator(0, i) for i in range(3)])[1] is None


def test_masked_logits_are_fine() -> None:
    logits = torch.full((8,), -math.inf)
    logits[[2, 5]] = 0.0
    assert draws(logits, 100, temperature=1.0) == {2, 5}
    assert draws(logits, 100, temperature=1.0, top_p=0.99) == {2, 5}
