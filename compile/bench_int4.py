"""Rows of the kernel benchmark: linear layers with INT4 weights (W4A16, groups of 128).

The quoted figures are the best public kernels' on an H200: Humming 0.1.20, Marlin and Machete of
vLLM 0.24, torch's tinygemm, and cuBLAS with the weight in bf16. The roof counts the bytes of the
INT4 problem for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from seekforge.compile.bench_floors import Floor, Floors
from seekforge.compile.bench_kernels import Candidate, Row, copies
from seekforge.compile.bench_tune import Tuner
from seekforge.kernels.int4 import Int4, dequantise
from seekforge.kernels.int4_gemm_plan import Plan, as_plan, plan
from seekforge.kernels.int4_linear import int4_linear_planned

GROUP = 128
Configs = Mapping[str, Mapping[str, Any] | None]
TUNED: Configs = {"seekforge": None}
DENSE = "cublas-bf16"


def _weight(out_features: int, in_features: int, symmetric: bool) -> Int4:
    groups = in_features // GROUP
    draw = partial(torch.randint, device="cuda", dtype=torch.uint8)
    scales = (0.005 + 0.01 * torch.rand(out_features, groups, device="cuda")).bfloat16()
    zeros = None if symmetric else draw(4, 12, (out_features, groups))
    return Int4(draw(0, 256, (out_features, in_features // 2)), scales, zeros)


def _reference(x: Tensor, weight: Int4) -> Tensor:
    """In float64, some thousand rows of the weight at a time."""
    parts = []
    for i in range(0, weight.qweight.shape[0], 4096):
        part = slice(i, i + 4096)
        zeros = None if weight.zeros is None else weight.zeros[part]
        w = dequantise(Int4(weight.qweight[part], weight.scales[part], zeros), torch.float32)
        parts.append(x.double() @ w.double().T)
    return torch.cat(parts, -1)


def _clone(weight: Int4) -> Int4:
    zeros = None if weight.zeros is None else weight.zeros.clone()
    return Int4(weight.qweight.clone(), weight.scales.clone(), zeros)


def linear_row(
    rows: int, in_features: int, out_features: int, floor: Floors,
    quoted: Mapping[str, float] | None, peers: ModuleType | None = None, symmetric: bool = True,
    configs: Configs = TUNED,
) -> Row:  # fmt: skip
    x = torch.randn(rows, in_features, device="cuda", dtype=torch.bfloat16)
    weight = _weight(out_features, in_features, symmetric)
    size = out_features * in_features
    nbytes = size * (0.5 + (2 if symmetric else 3) / GROUP) + 2.0 * rows * (
        in_features + out_features
    )
    count = copies(nbytes)
    notes: dict[str, str] = {}

    def ours(config: Plan, given: Int4) -> Tensor:
        return int4_linear_planned(x, given.qweight, given.scales, given.zeros, None, config)

    def candidates() -> Iterator[Candidate]:
        sets = [weight, *(_clone(weight) for _ in range(count - 1))]
        for name, values in configs.items():
            config = as_plan(values) if values else plan(rows, out_features, in_features)
            yield Candidate(
                name, partial(_poisoned, partial(ours, config, weight)),
                [partial(ours, config, given) for given in sets],
            )  # fmt: skip
        if configs is not TUNED:
            return
        if rows >= 16:
            bytes_of_copy = 2 * size
            wide = [dequantise(weight) for _ in range(copies(bytes_of_copy))]
            linear = torch.nn.functional.linear
            yield Candidate(
                DENSE, partial(linear, x, wide[0]), [partial(linear, x, w) for w in wide]
            )
            del wide
        yield from _peers(peers, x, weight, count, notes)

    zero = "" if symmetric else " zeros"
    name = f"W4A16 M{rows} {in_features}->{out_features}{zero}"
    flops = 2.0 * rows * size
    return Row(name, _reference(x, weight), nbytes, flops, floor, quoted, candidates, notes)


def _poisoned(run: Callable[[], Tensor]) -> Tensor:
    torch.use_deterministic_algorithms(True, warn_only=True)  # fresh memory holds NaN
    try:
        return run()
    finally:
        torch.use_deterministic_algorithms(False)


def _peers(
    peers: ModuleType | None, x: Tensor, weight: Int4, count: int, notes: dict[str, str]
) -> Iterator[Candidate]:
    """Candidates of the peers' adapters but the one that the row has itself; absent ones noted."""
    q = torch.stack((weight.qweight & 15, weight.qweight >> 4), -1).flatten(-2)
    for name, adapter in getattr(peers, "W4", {}).items() if peers else ():
        present, why = peers.available(name)  # type: ignore[union-attr]
        if name == DENSE:
            continue
        if not present:
            notes[name] = f"absent: {why[:60]}"
            continue
        try:
            state = adapter.prepare(q, weight.scales, weight.zeros)
        except Exception as failure:
            notes[name] = f"{type(failure).__name__}: {str(failure)[:60]}"
            continue
        clone = peers.clone  # type: ignore[union-attr]
        states = [state, *(clone(state) for _ in range(count - 1))]
        yield Candidate(
            name, partial(adapter.run, x, state), [partial(adapter.run, x, s) for s in states]
        )


# rows, in_features, out_features, floor, quoted us
ROWS: list[tuple[int, int, int, Floors, dict[str, float] | None]] = [
    (1, 4096, 28672, Floor(0.7, "roof"), {"humming": 25.1}),
    (1, 3584, 37888, Floor(0.7, "roof"), {"marlin": 31.8}),
    (1, 4096, 6144, Floor(1.15), {"tinygemm": 9.4}),
    (1, 4096, 4096, Floor(1.15), {"tinygemm": 7.0}),
    (1, 2048, 2816, Floor(1.15), {"tinygemm": 4.0}),
    (16, 4096, 14336, Floor(1.0), {"humming": 17.4, DENSE: 33.4}),
    (16, 14336, 4096, Floor(1.0), {"humming": 20.1, DENSE: 33.0}),
    (16, 18944, 3584, Floor(1.0), {"humming": 21.4, DENSE: 39.0}),
    (64, 4096, 14336, Floor(1.0), {"machete": 22.9, DENSE: 33.4}),
    (128, 4096, 14336, Floor(0.97, DENSE), {"machete": 28.9, DENSE: 33.7}),
    (256, 4096, 14336, Floor(0.97, DENSE), {"machete": 44.3, DENSE: 45.4}),
    (1024, 4096, 14336, Floor(0.97, DENSE), None),
    (4096, 4096, 14336, Floor(0.97, DENSE), None),
]

# in_features, out_features of the fused projections of Qwen2-7B, Llama-8B and DeepSeek-V2-Lite
FUSED = [
    (3584, 4608), (3584, 3584), (3584, 37888), (18944, 3584),
    (4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096),
    (2048, 3648), (2048, 2048), (2048, 5632), (2816, 2048),
]  # fmt: skip


def int4_rows(peers: ModuleType | None) -> Iterator[Callable[[], Row]]:
    for rows, in_features, out_features, floor, quoted in ROWS:
        yield partial(linear_row, rows, in_features, out_features, floor, quoted, peers)
    yield partial(linear_row, 1, 4096, 28672, None, {"marlin": 28.6}, peers, symmetric=False)
    yield partial(linear_row, 16, 4096, 14336, None, {"marlin": 18.4}, peers, symmetric=False)


def _space(rows: int) -> list[dict[str, Any]]:
    """Configurations worth trying for so many rows."""
    few = [
        {"kernel": "few", "block_n": n, "row_warps": r, "k_warps": k, "unroll": u, "prefetch": p}
        | {"splits": s}
        for (n, r), k, u, p, s in product(
            ((16, 1), (32, 1), (64, 1), (64, 2), (128, 2)),
            (4, 8, 16),
            (1, 2),
            (False, True),
            (1, 2, 4, 5, 6),
        )
        if k * r <= 16 and (s == 1 or rows > 1) and not (p and u > 1) and (u == 1 or rows == 1)
    ]
    many = [
        {"kernel": "many", "block_n": n, "block_m": m, "stages": t, "splits": s}
        for n, m, t, s in product(
            (64, 128), (16, 32, 64, 128, 256), (3, 4, 5, 6, 8), (1, 2, 4)
        )
        if rows <= 2 * m and m < 2 * rows and t * (64 * n + 256 * m) <= 225_000
        and (s == 1 or rows <= 64)
    ]  # fmt: skip
    return (few if rows <= 32 else []) + (many if rows > 8 else []) + [{"kernel": "dense"}]


def _tuners() -> Iterator[Tuner]:
    shapes = {(m, k, n) for m, k, n, _, _ in ROWS}
    shapes |= {(m, 4096, 14336) for m in (1, 8, 32)} | {(m, *s) for m in (1, 32) for s in FUSED}
    for rows, in_features, out_features in sorted(shapes):
        key = {"rows": rows, "out_features": out_features, "in_features": in_features}

        def row(
            configs: Configs, rows: int = rows, k: int = in_features, n: int = out_features
        ) -> Row:
            return linear_row(rows, k, n, None, None, configs=configs)

        yield Tuner("int4_linear", key, row, _space(rows))


TUNERS = list(_tuners())
