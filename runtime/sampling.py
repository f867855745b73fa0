"""Logits -> the next token of each sequence, on the CPU; device_sampling.py does it on a GPU.

In: float32 logits [R, V] on the CPU, per row the request's parameters and its own generator.
Out: R token ids. A row's draw depends on its logits and its generator only, never on the rows
beside it. It knows nothing about text or stopping.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from seekforge.kernels.errors import InputError
from seekforge.kernels.sampling_penalties import PROMPT, penalise_reference


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends. The default is greedy, until eos.

    `temperature` 0 is greedy. `top_k` <= 0 is off. `top_p` 1 is off and 0 leaves the likeliest
    token. `min_p` 0 is off; it drops tokens less likely than `min_p` times the likeliest.
    They apply in this order: penalties, temperature, top_k, top_p, min_p. `repetition_penalty`
    (1 is off) divides the logits of tokens that the prompt or the output has, negative ones are
    multiplied; `frequency_penalty` and `presence_penalty` (0 is off) are taken off those of tokens
    of the output, once for each time and once.
    `seed` makes the whole set of the `n` choices repeatable; None draws a new one each time.
    `max_tokens` None: until the engine's limit. A stop string is cut from the text unless
    `include_stop`; a stop token stays in the token ids. `ignore_eos` also ignores the engine's eos.

    Raises `InputError` for a value out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop: bool = False

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _in_range("temperature", self.temperature, 0.0, math.inf)
        _in_range("top_p", self.top_p, 0.0, 1.0)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)
        _in_range("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _in_range("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        _integer("top_k", self.top_k, -math.inf)
        _integer("n", self.n, 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
        if self.seed is not None:
            _integer("seed", self.seed, -math.inf)
        for text in stop:
            if not isinstance(text, str) or not text:
                raise InputError(
                    f"stop: {text!r} is no stop string; non-empty strings are expected"
                )
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0)

    @property
    def penalties(self) -> bool:
        """Whether any penalty is on."""
        given = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return given != (1.0, 0.0, 0.0)


def make_key(seed: int | None, choice: int) -> int:
    """64 bits that all random numbers of one choice of a request come from, below 2^63.

    A digest of seed and choice, so that choices differ, and neighbouring seeds share none.
    """
    entropy = secrets.token_bytes(16) if seed is None else str(seed).encode()
    digest = hashlib.sha256(entropy + b"/" + str(choice).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def make_generator(seed: int | None, choice: int) -> torch.Generator:
    """The random numbers of one choice of a request on the CPU: one for each token, in order."""
    return torch.Generator().manual_seed(make_key(seed, choice))


class Sampled(Protocol):
    """What a sampler needs of a sequence. key, generator: of its random numbers; num_output: its
    tokens so far behind the prompt, also one that the host has not read."""

    params: SamplingParams
    generator: torch.Generator
    key: int
    token_ids: list[int]
    num_prompt: int

    @property
    def num_output(self) -> int: ...


class Sampler:
    """Chooses among the ids the tokenizer knows.

    The logits are often wider than the vocabulary (padded for the GEMM), and the known ids may have
    gaps: `known_ids` is a set, not a length. None: all ids are known.
    """

    def __init__(self, vocab_size: int, known_ids: Iterable[int] | None = None) -> None:
        self._unknown: Tensor | None = None
        if known_ids is not None:
            unknown = torch.ones(vocab_size, dtype=torch.bool)
            unknown[[i for i in known_ids if 0 <= i < vocab_size]] = False
            self._unknown = unknown if bool(unknown.any()) else None

    def draw(self, logits: Tensor, sequences: Sequence[Sampled]) -> Tensor:
        """The next token of each sequence, int64 [R]; -1 where `sample` has None."""
        logits = logits.float()
        if any(sequence.params.penalties for sequence in sequences):
            rows = zip(logits, sequences, strict=True)
            logits = torch.stack(
                [penalised(row, s) if s.params.penalties else row for row, s in rows]
            )
        chosen = self.sample(
            logits, [s.params for s in sequences], [s.generator for s in sequences]
        )
        return torch.tensor([-1 if token is None else token for token in chosen])

    def sample(
        self,
        logits: Tensor,
        params: Sequence[SamplingParams],
        generators: Sequence[torch.Generator],
    ) -> list[int | None]:
        """One id for each row; None where the logits are no distribution (NaN, +inf, all -inf)."""
        assert logits.shape[0] == len(params) == len(generators), f"{logits.shape=} {len(params)=}"
        if self._unknown is not None:
            logits = logits.masked_fill(self._unknown, -math.inf)
        # max is NaN if any value is; argmax would then point at the NaN.
        best, greedy = logits.max(dim=1)
        usable = torch.isfinite(best).tolist()
        chosen: list[int | None] = [
            token if good else None for token, good in zip(greedy.tolist(), usable, strict=True)
        ]
        for row, (wanted, generator) in enumerate(zip(params, generators, strict=True)):
            if wanted.temperature > 0 and chosen[row] is not None:
                chosen[row] = _draw(logits[row], wanted, generator)
        return chosen


def penalised(logits: Tensor, sequence: Sampled) -> Tensor:
    """A row [V] with the sequence's penalties."""
    prompt, output = (
        torch.tensor(ids, dtype=torch.int64)
        for ids in (
            sequence.token_ids[: sequence.num_prompt],
            sequence.token_ids[sequence.num_prompt :],
        )
    )
    counts = torch.bincount(output, minlength=len(logits)).int()
    counts[prompt] |= PROMPT
    params = sequence.params
    given = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    slot = torch.zeros(1, dtype=torch.int64)
    each = (torch.tensor([penalty]) for penalty in given)
    return penalise_reference(logits[None], counts[None], slot, *each)[0]


def _draw(logits: Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    """One token from a row [V] that has a finite maximum."""
    values = logits.double()
    token_ids: Tensor | None = None  # of `values` and `probs`, once they are in another order
    if 0 < params.top_k < len(values):
        values, token_ids = torch.topk(values, params.top_k)
    # Subtracted before the division, and in float64: 11.06 / 1e-4 is inf in float16, and at 1e-12
    # every difference still is a number. The maximum becomes exp(0) = 1 at any temperature.
    probs = torch.softmax((values - values.max()) / params.temperature, dim=0)
    if params.top_p < 1:
        # All tokens below (1 - top_p) / V together weigh less than what top_p cuts off: only the
        # others need sorting, few of V when the distribution is peaked.
        floor = min((1 - params.top_p) / len(probs), float(probs.max()))
        likely = (probs >= floor).nonzero().flatten()
        probs, order = torch.sort(probs[likely], descending=True, stable=True)
        likely = likely[order]
        token_ids = likely if token_ids is None else token_ids[likely]
        before = probs.cumsum(0) - probs  # never 1 - cumsum, which would round a small top_p away
        keep = before < params.top_p
        keep[0] = True
        probs = probs * keep
    if params.min_p > 0:
        probs = probs * (probs >= params.min_p * probs.max())
    # Inverse of the cumulative distribution: one random number a token whatever the filters are.
    total = probs.cumsum(0)
    target = torch.rand((), generator=generator, dtype=torch.float64) * total[-1]
    index = int(torch.searchsorted(total, target, right=True))
    index = min(index, int(probs.nonzero()[-1]))  # the product may round up to the total
    return index if token_ids is None else int(token_ids[index])


def _in_range(name: str, value: float, low: float, high: float) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not (good and low <= value <= high and math.isfinite(value)):
        expected = (
            f"a number >= {low:g}" if math.isinf(high) else f"a number from {low:g} to {high:g}"
        )
        raise InputError(f"{name} is {value!r}; {expected} was expected")


def _integer(name: str, value: int, low: float) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        expected = "an integer" if math.isinf(low) else f"an integer >= {low:g}"
        raise InputError(f"{name} is {value!r}; {expected} was expected")
