"""Sampling on the GPU: the drawn sets by sorting, the distribution, independence of the batch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from seekforge.kernels import sampling
from seekforge.kernels.sampling import kept_tokens, philox, sample_reference, sample_triton
from seekforge.kernels.sampling_greedy import greedy_reference, greedy_triton
from seekforge.kernels.sampling_penalties import (
    PROMPT,
    count_tokens_reference,
    count_tokens_triton,
    penalise_reference,
    penalise_triton,
)
from seekforge.runtime.sampling import Sampler, SamplingParams, make_generator

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Values = Sequence[float] | float


def draw(
    logits: Tensor, *, temperature: Values = 1.0, top_k: Values = 0, top_p: Values = 1.0,
    min_p: Values = 0.0, seed: int = 0,
) -> list[Tensor]:  # fmt: skip
    """Arguments; values are repeated over the rows."""
    rows, random = logits.shape[0], torch.Generator().manual_seed(seed)

    def column(given: Values, dtype: torch.dtype) -> Tensor:
        listed = [given] if isinstance(given, int | float) else list(given)
        return torch.tensor([listed[i % len(listed)] for i in range(rows)], dtype=dtype)

    made = [
        logits, column(temperature, torch.float32), column(top_k, torch.int32),
        column(top_p, torch.float32), column(min_p, torch.float32),
        torch.randint(-(2**62), 2**62, (rows,), generator=random),
        torch.randint(0, 9999, (rows,), generator=random),
    ]  # fmt: skip
    return [x.to(logits.device) for x in made]


def sample(given: list[Tensor], banned: Tensor | None = None, lanes: int = 256) -> Tensor:
    """With small parts, so that small vocabularies have several; the interpreter is slow."""
    return sample_triton(*given, banned, config=(lanes, 1), rounds=2)


def normal(rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> Tensor:
    random = torch.Generator().manual_seed(vocab)
    return (3 * torch.randn(rows, vocab, generator=random)).to(dtype)


CASES = {
    "all": {},
    "temperatures": {"temperature": [0.7, 0.0, 1.3, 1e-12]},
    "top_k": {"top_k": [1, 5, 50, 1000, 10**6]},
    "top_p": {"top_p": [0.1, 0.5, 0.9, 0.99, 0.0], "temperature": [1.0, 2.0, 0.5]},
    "min_p": {"min_p": [0.0, 0.05, 0.5, 1.0]},
    "together": {"top_k": [3, 100, 1000], "top_p": [0.5, 0.9], "min_p": [0.0, 0.1, 0.02]},
}


def test_philox_is_the_published_one() -> None:
    """Random123's known answer for a counter and a key of zeros."""
    assert philox(0, 0, 0) == 0x6627E8D5E169C58D
    assert len({philox(s, p, d) for s in (0, 1, -1, 2**40) for p in (0, 1) for d in (0, 1)}) == 16


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_draws_what_the_reference_draws(
    kernel_device: str, poisoned: None, dtype: torch.dtype, case: dict[str, Values]
) -> None:
    """16-bit logits have many ties."""
    given = draw(normal(5, 1111, dtype).to(kernel_device), **case)
    banned = torch.zeros(1111, dtype=torch.bool, device=kernel_device)
    banned[given[0][0].argmax()] = True
    assert torch.equal(sample(given, banned), sample_reference(*given, banned))


@pytest.mark.parametrize(("config", "rounds"), [(None, 3), ((64, 4), 1), ((512, 1), 3)])
def test_any_configuration_draws_the_same(
    kernel_device: str, poisoned: None, config: tuple[int, int] | None, rounds: int
) -> None:
    """Rows of even likelihoods and a small share need up to four draws."""
    logits = normal(4, 1000)
    logits[1:] /= 30
    given = draw(logits.to(kernel_device), top_k=[0, 400, 0, 30], top_p=[0.3, 0.05, 0.02, 0.5])
    drawn = sample_triton(*given, config=config, rounds=rounds)
    assert torch.equal(drawn, sample_reference(*given))


def test_without_top_k(kernel_device: str, poisoned: None) -> None:
    given = draw(normal(2, 300).to(kernel_device), top_p=0.5)
    expected = sample(given)
    given[2] = None  # type: ignore[call-overload]
    assert torch.equal(sample(given), expected)


def test_any_strides(kernel_device: str) -> None:
    logits = normal(4, 90).to(kernel_device)
    expected = sample_reference(*draw(logits))
    for laid in (logits.t().contiguous().t(), torch.nn.functional.pad(logits, (3, 2))[:, 3:-2]):
        assert torch.equal(sample(draw(laid)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [-1.5, 0.0, 3.0])
def test_top_k_of_equal_logits(kernel_device: str, dtype: torch.dtype, value: float) -> None:
    """Keeps the lowest ids: 3 of 200, in parts of 64."""
    logits = torch.full((4, 200), value, dtype=dtype, device=kernel_device)
    given = draw(logits, top_k=3)
    drawn = sample(given, lanes=64)
    assert torch.equal(drawn, sample_reference(*given)) and int(drawn.max()) < 3


HALVES = [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]  # in base 2: 32, 16, 8, 4, 2, 1 of 63
TIES = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("logits", "case", "expected"),
    [
        (TIES, {"top_k": 3}, {0, 2, 3}),
        (TIES, {"top_p": 0.3}, {0, 2}),  # 2 of 10 each, and 1 of 10
        (TIES, {"top_k": 5, "top_p": 0.99}, {0, 1, 2, 3, 5}),
        (HALVES, {"top_p": 0.5}, {0}),
        (HALVES, {"top_p": 0.52}, {0, 1}),
        (HALVES, {"top_p": 0.76}, {0, 1}),
        (HALVES, {"top_p": 0.77}, {0, 1, 2}),
        (HALVES, {"top_k": 2, "top_p": 0.66}, {0}),  # of what top_k left
        (HALVES, {"top_k": 2, "top_p": 0.67}, {0, 1}),
        (HALVES, {"min_p": 0.24}, {0, 1, 2}),
        (HALVES[::-1], {"min_p": 0.24}, {3, 4, 5}),
        (HALVES, {"min_p": 1.0}, {0}),
        (HALVES, {"top_p": 0.0}, {0}),
        (HALVES, {"top_p": 0.97, "min_p": 0.1}, {0, 1, 2, 3}),  # top_p counts those below min_p
        ([-0.0, 0.0, -1.0, -torch.inf], {"top_k": 2}, {0, 1}),
        ([1.0, -torch.inf, 1.0, -torch.inf], {"top_k": 3}, {0, 2}),
    ],
)
def test_sets(
    kernel_device: str, logits: list[float], case: dict[str, Values], expected: set[int]
) -> None:
    """What is drawn is in the set; on a GPU all of it shows up in 256 draws."""
    rows = 256 if kernel_device == "cuda" else 12
    given = draw(
        torch.tensor(logits, device=kernel_device).repeat(rows, 1),
        temperature=sampling.LOG2_E, **case,
    )  # fmt: skip
    drawn = sample(given)
    assert torch.equal(drawn, sample_reference(*given))
    assert set(drawn.tolist()) <= expected
    assert kernel_device == "cpu" or set(drawn.tolist()) == expected
    k, p, m = (float(x[0]) for x in given[2:5])
    _, kept = kept_tokens(given[0][0].cpu(), sampling.LOG2_E, int(k), p, m)
    assert {i for i in kept.nonzero().flatten().tolist() if logits[i] > -torch.inf} == expected


def test_distribution_is_that_of_the_cpu() -> None:
    """4,000 draws of the reference, and of the CPU's sampler, against the exact shares."""
    n, logits = 4000, normal(1, 40)[0] / 2
    params = SamplingParams(temperature=1.5, top_k=20, top_p=0.9, min_p=0.05)
    wide = torch.softmax(logits.double() / 1.5, 0).sort(descending=True)
    shares = wide.values[:20] / wide.values[:20].sum()
    shares = torch.where(shares.cumsum(0) - shares < 0.9, shares, 0.0)
    shares = torch.where(shares >= 0.05 * shares[0], shares, 0.0) / shares.sum()
    expected = torch.zeros(40, dtype=torch.float64)
    expected[wide.indices[:20]] = n * shares / shares.sum()
    kept = expected > 0
    assert 5 < int(kept.sum()) < 20
    rows = draw(logits.repeat(n, 1), temperature=1.5, top_k=20, top_p=0.9, min_p=0.05)
    cpu = Sampler(40).sample(rows[0], [params] * n, [make_generator(i, 0) for i in range(n)])
    for name, tokens in (("reference", sample_reference(*rows)), ("CPU", torch.tensor(cpu))):
        counts = torch.bincount(tokens, minlength=40).double()
        assert not counts[~kept].any(), name
        square = float(((counts - expected)[kept] ** 2 / expected[kept]).sum())
        freedom = int(kept.sum()) - 1
        assert square < freedom + 4 * (2 * freedom) ** 0.5, f"{name}: {square=} {freedom=}"


def test_a_row_does_not_depend_on_the_others(kernel_device: str) -> None:
    """Alone, with the rows in another order, and among rows that need more draws."""
    given = draw(normal(5, 300).to(kernel_device), top_p=[0.2, 1.0, 0.6], temperature=[3.0, 1.0])
    together = sample(given)
    back = sample([x.flip(0) for x in given]).flip(0)
    alone = torch.cat([sample([x[i : i + 1] for x in given]) for i in range(5)])
    assert torch.equal(together, back) and torch.equal(together, alone)
    other = [*given[:5], given[5] + 1, given[6]]
    later = [*given[:6], given[6] + 1]
    assert not torch.equal(together, sample(other))
    assert not torch.equal(together, sample(later))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_rows(kernel_device: str, poisoned: None, temperature: float) -> None:
    logits = normal(5, 70)
    logits[0, 3], logits[1, 69], logits[2, :], logits[3, 1:] = (
        torch.nan, torch.inf, -torch.inf, -torch.inf,
    )  # fmt: skip
    given = draw(logits.to(kernel_device), temperature=temperature, top_p=0.9)
    drawn = sample(given, lanes=32).tolist()
    assert drawn == sample_reference(*given).tolist()
    assert drawn[:4] == [-1, -1, -1, 0] and drawn[4] >= 0
    greedy = greedy_triton(given[0]).tolist()
    assert greedy == greedy_reference(given[0]).tolist() and greedy[:4] == drawn[:4]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", [(64, 1.0, 1), (64, 16.0, 1), (4096, 2.0, 4)])
def test_greedy_is_argmax(
    kernel_device: str, poisoned: None, dtype: torch.dtype, config: tuple[int, float, int]
) -> None:
    """Parts of one and of several loads; 16-bit logits have ties, whose lowest id wins."""
    logits = normal(3, 1000, dtype)
    logits[1] = 0.0
    logits[2, 999] = 50.0
    expected = torch.stack([(row == row.max()).nonzero()[0, 0] for row in logits])
    assert torch.equal(greedy_triton(logits.to(kernel_device), None, config).cpu(), expected)
    as_rule = draw(logits.to(kernel_device), temperature=0.0)
    assert torch.equal(sample(as_rule).cpu(), expected)
    banned = torch.zeros(1000, dtype=torch.bool, device=kernel_device)
    banned[999] = banned[0] = True
    given = logits.to(kernel_device)
    assert torch.equal(greedy_triton(given, banned, config), greedy_reference(given, banned))


@pytest.mark.parametrize("dtype", DTYPES)
def test_penalties(kernel_device: str, poisoned: None, dtype: torch.dtype) -> None:
    rows, vocab = 4, 2100
    logits = normal(rows, vocab, dtype)
    slots = torch.tensor([2, -1, 0, 2])
    values = [torch.tensor([1.0, 2.0, 1.3, 0.5]), torch.tensor([0.0, 1.0, 0.7, -1.0]),
              torch.tensor([0.5, 1.0, 0.0, 2.0])]  # fmt: skip
    counts = torch.zeros(3, vocab, dtype=torch.int32)
    seen = torch.tensor([7, 7, 2099, 0, 5, -1, 9]), torch.tensor([2, 2, 2, 0, 0, 0, -3])
    given = [x.clone().to(kernel_device) for x in (logits, counts, slots, *values)]
    for prompt in (False, True, True):  # a second time changes nothing for the prompt's
        count_tokens_reference(counts, seen[1], seen[0] - int(prompt), prompt)
        tokens = (x.to(kernel_device) for x in (seen[1], seen[0] - int(prompt)))
        count_tokens_triton(given[1], *tokens, prompt)
    assert torch.equal(given[1].cpu(), counts)
    assert counts[2, 7] == 2 and counts[2, 6] == PROMPT and counts[0, 5] == 1
    y = penalise_triton(*given)
    assert torch.equal(y, penalise_reference(*given))
    x = logits.float()
    assert torch.equal(y[1].cpu(), x[1])
    assert y[0, 7].item() == x[0, 7].item() - 0.5 * 2
    assert y[2, 5].item() == pytest.approx(
        (x[2, 5] / 1.3 if x[2, 5] > 0 else x[2, 5] * 1.3).item() - 0.7, rel=1e-6
    )
    assert y[3, 2098].item() == x[3, 2098] * (2.0 if x[3, 2098] > 0 else 0.5)
