"""The GPU's sampler against the CPU's: the same choices where no random number decides, else the
same sets. Without a GPU its kernels run in Triton's interpreter."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from seekforge.runtime.device_sampling import DeviceSampler
from seekforge.runtime.sampling import Sampler, SamplingParams, make_generator, make_key

V = 97


@dataclass(eq=False)
class Row:
    """What samplers see of a sequence."""

    params: SamplingParams
    token_ids: list[int]
    num_prompt: int
    seed: int = 0
    num_unread: int = 0
    generator: torch.Generator = field(init=False)
    key: int = field(init=False)

    def __post_init__(self) -> None:
        self.generator, self.key = make_generator(self.seed, 0), make_key(self.seed, 0)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) + self.num_unread - self.num_prompt


def row(prompt: list[int], seed: int = 0, **params: float) -> Row:
    return Row(SamplingParams(**params), list(prompt), len(prompt), seed)  # type: ignore[arg-type]


def logits_of(step: int, rows: int) -> Tensor:
    return 4 * torch.randn(rows, V, generator=torch.Generator().manual_seed(step))


def serve(sampler: Sampler | DeviceSampler, device: str, rows: list[Row], steps: int) -> list[Row]:
    for step in range(steps):
        tokens = sampler.draw(logits_of(step, len(rows)).to(device), rows)
        assert tokens.dtype == torch.int64 and tokens.device.type == device
        for each, token in zip(rows, tokens.tolist(), strict=True):
            each.token_ids.append(token)
    return rows


def known(count: int = 90) -> range:
    return range(count)


def test_columns_lie_at_multiples_of_16() -> None:
    """Triton compiles a kernel anew for a pointer that is not one."""
    sampler = DeviceSampler(V, known(), 8, torch.device("cpu"))
    for count in (1, 3, 4, 7):
        rows = [row([5], temperature=0.1 * (i + 1), top_p=0.5, top_k=i) for i in range(count)]
        for columns in sampler._parameters(rows):
            assert all(column.data_ptr() % 16 == 0 for column in columns)
        real, whole = sampler._parameters(rows)
        assert real[0].tolist() == torch.tensor([0.1 * (i + 1) for i in range(count)]).tolist()
        assert real[1].tolist() == [0.5] * count and whole[0].tolist() == list(range(count))
        assert whole[1].tolist() == [each.key for each in rows]


def penalised_rows() -> list[Row]:
    return [
        row([3, 4, 5, 5]),
        row([7, 8], repetition_penalty=1.8),
        row([9] * 6, frequency_penalty=1.5, repetition_penalty=0.7),
        row([1], presence_penalty=-3.0),
    ]


def test_greedy_with_and_without_penalties_equals_the_cpu(kernel_device: str) -> None:
    for make in (penalised_rows, lambda: [row([3]), row([5, 6])]):
        device = DeviceSampler(V, known(), 4, torch.device(kernel_device))
        found = serve(device, kernel_device, make(), 12)
        expected = serve(Sampler(V, known()), "cpu", make(), 12)
        for ours, right in zip(found, expected, strict=True):
            assert ours.token_ids == right.token_ids, right.params
            assert max(ours.token_ids) < 90, "an id the tokenizer does not know"


def test_penalties_by_hand() -> None:
    """x = 2, -2, 1, 0.5; the prompt has 0 and 1, the output 2 twice and 1."""
    each = row([0, 1], repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5)
    each.token_ids += [2, 2, 1]
    seen: list[Tensor] = []

    class Seen(Sampler):
        def sample(self, logits: Tensor, *rest: object) -> list[int | None]:
            seen.append(logits)
            return [0]

    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5]])
    Seen(4).draw(logits, [each])
    assert seen[0].tolist() == [[1.0, -4.75, -0.75, 0.5]]
    assert logits.tolist() == [[2.0, -2.0, 1.0, 0.5]], "the engine's logits are not written"


def test_draws_stay_in_the_set_and_follow_the_seed(kernel_device: str) -> None:
    params = {"temperature": 1.3, "top_k": 12, "top_p": 0.8, "min_p": 0.02}
    logits = logits_of(50, 1).to(kernel_device)
    cpu = Sampler(V, known())
    hot = SamplingParams(**params)  # type: ignore[arg-type]
    allowed = {cpu.sample(logits.cpu(), [hot], [make_generator(seed, 0)])[0] for seed in range(400)}

    def draws(rows: list[Row], steps: int) -> list[list[int]]:
        sampler = DeviceSampler(V, known(), 4, torch.device(kernel_device))
        for _ in range(steps):
            tokens = sampler.draw(logits.expand(len(rows), V), rows)
            for each, token in zip(rows, tokens.tolist(), strict=True):
                each.token_ids.append(token)
        return [each.token_ids[each.num_prompt :] for each in rows]

    alone = draws([row([3], seed=5, **params)], 20)[0]
    assert set(alone) <= allowed and len(set(alone)) > 2
    beside = [row([8, 9]), row([3], seed=5, **params), row([4], seed=6, **params)]
    batch = draws(beside, 20)
    assert batch[1] == alone and batch[2] != alone and len(set(batch[0])) == 1


def test_an_unread_token_counts_as_drawn(kernel_device: str) -> None:
    """A step launched ahead draws with the next random number, as it would have later."""
    sampler = DeviceSampler(V, known(), 2, torch.device(kernel_device))
    logits = torch.zeros(1, V, device=kernel_device)
    ahead, later = row([3], temperature=1.0), row([3], temperature=1.0)
    ahead.num_unread = 1
    later.token_ids.append(40)
    first = sampler.draw(logits, [row([3], temperature=1.0)]).tolist()
    assert sampler.draw(logits, [ahead]).tolist() == sampler.draw(logits, [later]).tolist() != first


def test_broken_rows_are_minus_one(kernel_device: str) -> None:
    logits = logits_of(1, 4).to(kernel_device)
    logits[0, 5] = math.nan
    logits[1, 6] = math.inf
    for params in ({}, {"temperature": 1.0}):
        rows = [row([3], seed=i, **params) for i in range(4)]
        tokens = DeviceSampler(V, known(), 4, torch.device(kernel_device)).draw(logits, rows)
        assert tokens[:2].tolist() == [-1, -1] and (tokens[2:] >= 0).all()


def test_slots_of_counts_go_from_one_sequence_to_the_next(kernel_device: str) -> None:
    """Two slots, four sequences one after the other: none sees the counts of another."""
    device = DeviceSampler(V, known(), 2, torch.device(kernel_device))
    for first in range(4):
        rows = [row([first, 20 + first], frequency_penalty=2.0, seed=first)]
        copies = [row([first, 20 + first], frequency_penalty=2.0, seed=first)]
        serve(device, kernel_device, rows, 5)
        serve(Sampler(V, known()), "cpu", copies, 5)
        assert rows[0].token_ids == copies[0].token_ids
