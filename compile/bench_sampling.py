"""Rows of the kernel benchmark: the choice of a token over a vocabulary of 151,936.

The peers are torch's own: argmax, and sampling by sort, softmax and cumulative sum. The roof counts
one reading of the logits. What is drawn is checked against the set of kept tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from seekforge.compile.bench_kernels import Candidate, Row, copies
from seekforge.compile.bench_tune import Tuner
from seekforge.kernels.sampling import kept_tokens, sample_triton
from seekforge.kernels.sampling_greedy import greedy_triton

VOCAB = 151936
Configs = Mapping[str, Mapping[str, Any] | None]
TUNED: Configs = {"seekforge": None}


def _logits(rows: int) -> list[Tensor]:
    """Copies of random logits, with the likeliest tokens well above the others."""
    count = copies(4.0 * rows * VOCAB)
    return [3 * torch.randn(rows, VOCAB, device="cuda") for _ in range(count)]


def greedy_row(rows: int, configs: Configs = TUNED) -> Row:
    sets = _logits(rows)

    def ours(config: Mapping[str, Any] | None, logits: Tensor) -> Tensor:
        chosen = (config["lanes"], config["waves"], config["warps"]) if config else None
        return greedy_triton(logits, None, chosen)

    def candidates() -> Iterator[Candidate]:
        runs: dict[str, Callable[[Tensor], Tensor]] = {
            name: partial(ours, config) for name, config in configs.items()
        }
        for name, run in (runs | {"torch": partial(torch.argmax, dim=1)}).items():
            yield Candidate(name, partial(run, sets[0]), [partial(run, x) for x in sets])

    best = sets[0].max(dim=1).values
    reference = torch.stack([(x == y).nonzero()[0, 0] for x, y in zip(sets[0], best, strict=True)])
    name = f"argmax {rows}x{VOCAB}"
    return Row(name, reference, 4.0 * rows * VOCAB, 0.0, None, None, candidates)


def sort_and_sample(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """As usual in torch; the race of exponentials draws without waiting for the device."""
    ordered, token = (
        logits.topk(top_k, dim=1) if top_k else torch.sort(logits, dim=1, descending=True)
    )
    shares = torch.softmax(ordered, 1)
    shares[shares.cumsum(1) - shares >= top_p] = 0.0
    race = shares / torch.empty_like(shares).exponential_(1)
    return token.gather(1, race.argmax(1, keepdim=True))[:, 0]


def sample_row(rows: int, top_k: int, top_p: float, configs: Configs = TUNED) -> Row:
    sets = _logits(rows)
    kept = torch.stack([kept_tokens(x, 1.0, top_k, top_p, 0.0)[1] for x in sets[0].cpu()]).cuda()

    def column(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device="cuda")

    rules = (
        column(1.0), column(top_k, torch.int32) if top_k else None, column(top_p), column(0.0),
        torch.randint(2**60, (rows,), device="cuda"), column(5, torch.int64),
    )  # fmt: skip

    def ours(config: Mapping[str, Any] | None, logits: Tensor) -> Tensor:
        chosen = (config["lanes"], config["warps"]) if config else None
        return sample_triton(logits, *rules, config=chosen)

    def inside(run: Callable[[Tensor], Tensor]) -> Tensor:
        return kept.gather(1, run(sets[0])[:, None]).float()

    def candidates() -> Iterator[Candidate]:
        runs: dict[str, Callable[[Tensor], Tensor]] = {
            name: partial(ours, config) for name, config in configs.items()
        }
        runs |= {"torch": lambda x: sort_and_sample(x, top_k, top_p)} if configs is TUNED else {}
        for name, run in runs.items():
            yield Candidate(name, partial(inside, run), [partial(run, x) for x in sets])

    name = f"sample {rows}x{VOCAB} top_k {top_k} top_p {top_p}"
    reference = torch.ones(rows, 1, device="cuda")
    return Row(name, reference, 4.0 * rows * VOCAB, 0.0, None, None, candidates)


def sampling_rows(peers: ModuleType | None) -> Iterator[Callable[[], Row]]:
    for rows in (1, 32):
        yield partial(greedy_row, rows)
        yield partial(sample_row, rows, 0, 0.9)
        yield partial(sample_row, rows, 50, 0.9)


def _tuners() -> Iterator[Tuner]:
    greedy = [
        {"lanes": n, "waves": w, "warps": p}
        for n in (1024, 2048, 4096) for w in (1.0, 2.0, 4.0) for p in (2, 4, 8)
    ]  # fmt: skip
    sample = [{"lanes": n, "warps": w} for n in (2048, 4096, 8192) for w in (4, 8, 16)]
    for rows, most in ((1, 4), (32, None)):
        yield Tuner("greedy", {"rows": most}, partial(greedy_row, rows), greedy)
        yield Tuner("sample", {"rows": most}, partial(sample_row, rows, 50, 0.9), sample)


TUNERS = list(_tuners())
