"""Rows of the kernel benchmark: linear layers with plain bf16 weights, for few tokens.

The shapes are the fused projections of Qwen2-7B, Llama-8B and DeepSeek-V2-Lite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import linear as torch_linear

from seekforge.compile.bench_floors import Floor
from seekforge.compile.bench_kernels import Candidate, Row, copies
from seekforge.compile.bench_tune import Tuner
from seekforge.kernels.linear import linear
from seekforge.kernels.linear_few import FewRows, few_rows
from seekforge.kernels.linear_one import One, one_row

Config = One | FewRows
Configs = Mapping[str, Config | None]
TUNED: Configs = {"seekforge": None}


def linear_row(rows: int, in_features: int, out_features: int, configs: Configs = TUNED) -> Row:
    draw = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    x, weight = draw(rows, in_features), draw(out_features, in_features) / in_features**0.5
    nbytes = 2.0 * (out_features * in_features + rows * (in_features + out_features))

    def candidates() -> Iterator[Candidate]:
        weights = [weight, *(weight.clone() for _ in range(copies(nbytes) - 1))]
        runs: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            name: partial(_given, x, config) if config else partial(_chosen, x)
            for name, config in configs.items()
        }
        if configs is TUNED:
            runs["cublas"] = partial(torch_linear, x)
        for name, run in runs.items():
            yield Candidate(name, partial(run, weight), [partial(run, w) for w in weights])

    reference = torch.cat([x.double() @ w.double().T for w in weight.split(4096)], -1)
    name = f"bf16 M{rows} {in_features}->{out_features}"
    flops = 2.0 * rows * out_features * in_features
    return Row(name, reference, nbytes, flops, Floor(1.0), None, candidates)


def _chosen(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = linear(x, weight, None)
    return y


def _given(x: torch.Tensor, config: Config, weight: torch.Tensor) -> torch.Tensor:
    if config == CUBLAS:
        return torch_linear(x, weight)
    y = x.new_empty(x.shape[0], weight.shape[0])
    if isinstance(config, One):
        one_row(x, weight, None, y, config)
    else:
        few_rows(x, weight, None, y, config)
    return y


SHAPES = [
    (3584, 4608), (3584, 3584), (3584, 37888), (18944, 3584), (3584, 152064),
    (4096, 6144), (4096, 28672), (14336, 4096),
    (2048, 3648), (2048, 2048), (2048, 5632), (2816, 2048), (2048, 102400),
]  # fmt: skip
ROWS = [*((1, *shape) for shape in SHAPES), *((32, *shape) for shape in SHAPES[:4])]


def linear_rows(peers: ModuleType | None) -> Iterator[Callable[[], Row]]:
    for rows, in_features, out_features in ROWS:
        yield partial(linear_row, rows, in_features, out_features)


TUNED_ROWS = 32
CUBLAS = FewRows(0, 0, 0, 0, 0)  # a row without a tile; else a larger layer's would be taken
SPACE_ONE = [
    One(n, k, depth, warps)
    for n, k, depth, warps in product((1, 2, 4, 8), (256, 512, 1024), (1, 2, 4), (2, 4, 8))
    # 16-byte loads of a thread that are under way, and at least one for each thread
    if 2 <= n * k * depth // (8 * 32 * warps) <= 8 and n * k >= 256 * warps
]
SPACE_FEW = [CUBLAS] + [
    FewRows(n, k, stages, 4, splits)
    for n, k, stages, splits in product((32, 64, 128), (64, 128), (3, 4, 6), (1, 2, 3, 4, 6, 8))
    if 40_000 < 2 * stages * k * (n + TUNED_ROWS) < 200_000
]


def _tuners() -> Iterator[Tuner]:
    for rows, op, space in ((1, "linear_one", SPACE_ONE), (TUNED_ROWS, "linear_few", SPACE_FEW)):
        for in_features, out_features in sorted(SHAPES, reverse=True):
            key: dict[str, Any] = {"in_features": in_features, "out_features": out_features}

            def row(
                configs: Configs, rows: int = rows, k: int = in_features, n: int = out_features
            ) -> Row:
                return linear_row(rows, k, n, configs)

            yield Tuner(op, key if rows == 1 else {"rows": rows, **key}, row, space)


TUNERS = list(_tuners())
