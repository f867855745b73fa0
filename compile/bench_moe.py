"""Rows of the kernel benchmark: the mixture of experts, from router logits to the combined sum.

DeepSeek-V2-Lite's layer without its shared expert: 64 experts, 6 a token, hidden 2,048,
intermediate 1,408. A call is `moe_route` and the experts' operator. Calls rotate over tokens, and
with them over the experts hit; the bytes of a row are those of the experts hit, on average.
"""

from __future__ import annotations

import functools
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
from seekforge.kernels.int4 import Int4, dequantise, pack
from seekforge.kernels.int4_moe_experts import int4_moe_experts_triton
from seekforge.kernels.moe_config import Config, FewConfig, GemmConfig, GemvConfig
from seekforge.kernels.moe_experts import moe_experts_triton
from seekforge.kernels.moe_route import moe_route_triton
from seekforge.kernels.swiglu import swiglu_reference

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, GROUP = 64, 6, 2048, 1408, 128
TUNED: Mapping[str, Any] = {"seekforge": None}


@functools.cache
def experts() -> tuple[list[tuple[Tensor, Tensor]], list[Int4], list[Tensor]]:
    """gate_up and down: integers [experts, n, k] with scales, packed, and in bf16."""
    raw, packed, wide = [], [], []
    for n, k in ((2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)):
        q = torch.randint(0, 16, (EXPERTS, n, k), device="cuda", dtype=torch.uint8)
        scales = torch.rand(EXPERTS, n, k // GROUP, device="cuda") * 0.005 + 0.003
        raw.append((q, scales.to(torch.bfloat16)))
        packed.append(Int4(pack(q), raw[-1][1]))
        wide.append(
            torch.stack([dequantise(Int4(pack(q[e]), raw[-1][1][e])) for e in range(EXPERTS)])
        )
    return raw, packed, wide


def expected(x: Tensor, logits: Tensor) -> Tensor:
    """The block in fp32, with the decoded weights."""
    weights, indices = torch.softmax(logits, -1).topk(TOP_K, -1)
    y = torch.zeros_like(x, dtype=torch.float32)
    gate_up, down = experts()[2]
    for e in range(EXPERTS):
        token, slot = (indices == e).nonzero(as_tuple=True)
        if len(token):
            inner = swiglu_reference(x[token].float() @ gate_up[e].float().T)
            y.index_add_(0, token, inner @ down[e].float().T * weights[token, slot, None])
    return y


def moe_row(
    tokens: int, int4: bool, floor: Floors, quoted: float | None,
    peers: ModuleType | None = None, configs: Mapping[str, Any] = TUNED,
) -> Row:  # fmt: skip
    raw, packed, wide = experts()
    per_weight = 0.5 + 2 / GROUP if int4 else 2.0
    weights = 3.0 * HIDDEN * INTERMEDIATE
    least = min(EXPERTS, tokens * TOP_K) * weights * per_weight
    given = [
        (
            torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16),
            torch.randn(tokens, EXPERTS, device="cuda"),
        )
        for _ in range(max(4, copies(least)))
    ]
    hit = [len(set(logits.topk(TOP_K, -1).indices.flatten().tolist())) for _, logits in given]
    nbytes = sum(hit) / len(hit) * weights * per_weight + 4 * tokens * HIDDEN
    parts: list[Any] = [part for w in packed for part in (w.qweight, w.scales, None)]

    def ours(config: Config | None, x: Tensor, logits: Tensor) -> Tensor:
        chosen = moe_route_triton(logits, None, TOP_K, "softmax", 1, 1, "max", False, 1.0)
        if int4:
            y: Tensor = run_int4(x, *chosen, *parts, GROUP, config)
            return y
        return moe_experts_triton(x, *chosen, wide[0], wide[1], config)

    run_int4: Any = int4_moe_experts_triton  # called with a list of tensors
    notes: dict[str, str] = {}

    def candidates() -> Iterator[Candidate]:
        for name, config in configs.items():
            yield Candidate(
                name, partial(ours, config, *given[0]), [partial(ours, config, *g) for g in given]
            )
        name = "marlin-moe" if int4 else "grouped-mm"
        if peers is None or name not in getattr(peers, "MOE", {}):
            return
        present, why = peers.available(name)
        if not present:
            notes[name] = f"absent: {why[:60]}"
            return
        adapter = peers.MOE[name]
        state = adapter.prepare(*(raw if int4 else wide), TOP_K)
        yield Candidate(
            name, partial(adapter.run, *given[0], state),
            [partial(adapter.run, *g, state) for g in given],
        )  # fmt: skip

    return Row(
        row_name(tokens, int4), expected(*given[0]), nbytes, 2.0 * tokens * TOP_K * weights, floor,
        quoted, candidates, notes,
    )  # fmt: skip


def row_name(tokens: int, int4: bool) -> str:
    return f"MoE V2-Lite {'int4' if int4 else 'bf16'} T{tokens}"


def moe_rows(peers: ModuleType | None) -> Iterator[Callable[[], Row]]:
    """Quoted: torch's grouped product and Marlin's experts on an H200."""
    for tokens, share, quoted in ((1, 0.55, 119.0), (8, 0.75, 318.0), (32, 0.85, 493.0)):
        yield partial(moe_row, tokens, False, Floor(share, "roof"), quoted, peers)
    for tokens, quoted in ((1, 49.2), (8, 87.2), (32, 143.0)):
        own = (Floor(2.0, row_name(1, False)),) if tokens == 1 else ()
        yield partial(moe_row, tokens, True, (Floor(1.2), *own), quoted, peers)
    for tokens, int4 in product((512, 4096), (False, True)):
        yield partial(moe_row, tokens, int4, None, None, peers)


def _gemms(m: int, shapes: list[tuple[int, int, int, int]]) -> list[GemmConfig]:
    return [GemmConfig(m, *shape, *shape) for shape in shapes]


def _few(m: int, first: list[tuple[int, ...]], second: list[tuple[int, ...]]) -> list[FewConfig]:
    return [FewConfig(m, *a, *b) for a, b in product(first, second)]


ONE_TOKEN = [
    GemvConfig(*a, *b)
    for a, b in product(
        [(8, 512, 4), (4, 512, 4), (2, 2048, 4)], [(4, 512, 4), (2, 1024, 4), (4, 1024, 4)]
    )
]
FEW = [(64, 64, 4, 4), (64, 64, 4, 6), (64, 128, 4, 3), (128, 64, 4, 4), (32, 128, 4, 4)]
MANY = [(64, 64, 4, 4), (128, 64, 8, 4), (128, 64, 8, 3)]
INT4_FEW = [(64, 64, 2, 6, 128, 64, 4, 3), (32, 64, 2, 4, 128, 64, 4, 3), (64, 64, 4, 3) * 2]
INT4_MANY = [(128, 64, 8, 3, 256, 64, 8, 2), (128, 64, 8, 3) * 2, (128, 64, 8, 4) * 2]
# INT4 or not, tokens of the row, the key's tokens and load, configurations
SPACES: list[tuple[bool, int, int | None, float | None, list[Any]]] = [
    (False, 1, 1, None, ONE_TOKEN),
    (False, 32, None, 8.0, _gemms(16, FEW)),
    (False, 512, None, 96.0, _gemms(64, MANY)),
    (False, 4096, None, None, _gemms(128, MANY)),
    (True, 1, 2, None, _few(
        0, [(16, 1, 4, 2), (16, 1, 4, 4), (16, 1, 8, 2)],
        [(16, 1, 8, 9), (16, 1, 16, 2), (16, 1, 16, 3)],
    )),
    (True, 32, None, 4.0, _few(
        8, [(64, 4, 1, 4), (16, 1, 2, 4), (16, 1, 4, 4)],
        [(64, 4, 1, 6), (32, 1, 2, 3), (32, 1, 4, 3)],
    )),
    (True, 64, None, 8.0, [GemmConfig(16, *values) for values in INT4_FEW]),
    (True, 4096, None, None, [GemmConfig(m, *values) for m in (32, 64) for values in INT4_MANY]),
]  # fmt: skip
TUNERS = [
    Tuner(
        "int4_moe_experts" if int4 else "moe_experts",
        {"tokens": limit, "load": load},
        partial(moe_row, tokens, int4, None, None, None),
        space,
    )
    for int4, tokens, limit, load, space in SPACES
]
