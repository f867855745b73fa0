"""Rows of the kernel benchmark: norms, SwiGLU, and RoPE with the write into the cache.

Llama 3 8B's widths at 1, 32 and 8192 tokens. Up to some hundred rows the inputs stay in the L2
whatever is rotated; those rows are held against the peers, the largest against the roof. Ours and
the peers of these rows write new tensors, but vLLM's norm and rotation, which work in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from seekforge.compile.bench_floors import Floor, Floors
from seekforge.compile.bench_kernels import Candidate, Row, copies
from seekforge.compile.bench_tune import Tuner
from seekforge.kernels.add_rms_norm import add_rms_norm_triton
from seekforge.kernels.rms_norm import norm_tile, rms_norm_reference, rms_norm_triton
from seekforge.kernels.rope import rope_reference, token_warps
from seekforge.kernels.rope_append import rope_append_triton
from seekforge.kernels.swiglu import Tile, swiglu_triton

EPS = 1e-6
Configs = Mapping[str, Mapping[str, int] | None]
TUNED: Configs = {"seekforge": None}
Run = Callable[..., Any]


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _candidate(name: str, run: Run, sets: Sequence[Sequence[Tensor]], result: Run) -> Candidate:
    """result: of a call's return value, or of a call's arguments where that is None; one tensor."""

    def check() -> Tensor:
        torch.use_deterministic_algorithms(True, warn_only=True)  # fresh memory holds NaN
        try:
            given = [x.clone() for x in sets[0]]
            done = run(*given)
            return result(given if done is None else done)  # type: ignore[no-any-return]
        finally:
            torch.use_deterministic_algorithms(False)

    return Candidate(name, check, [partial(run, *given) for given in sets])


def _present(
    peers: ModuleType | None, given: Mapping[str, tuple[Run, Sequence[Sequence[Tensor]], Run]],
    notes: dict[str, str],
) -> Iterator[Candidate]:  # fmt: skip
    """Candidates of the peers (run, sets of arguments, result); absent ones are noted."""
    for name, (run, sets, result) in given.items() if peers else ():
        present, why = peers.available(name)  # type: ignore[union-attr]
        if present:
            yield _candidate(name, run, sets, result)
        else:
            notes[name] = f"absent: {why[:60]}"


def _both(done: Sequence[Tensor]) -> Tensor:
    return torch.stack([done[0], done[1]])


def add_norm_row(
    rows: int, hidden: int, floor: Floors, quoted: float | None, peers: ModuleType | None = None,
    configs: Configs = TUNED,
) -> Row:  # fmt: skip
    nbytes, weight = 8.0 * rows * hidden, _random(hidden)
    sets = [(_random(rows, hidden), _random(rows, hidden)) for _ in range(copies(nbytes))]
    total = sets[0][0].float() + sets[0][1].float()
    reference = _both([rms_norm_reference(total, weight.float(), EPS), total])
    notes: dict[str, str] = {}

    def ours(config: Mapping[str, int] | None, x: Tensor, residual: Tensor) -> Any:
        tile = norm_tile("add_rms_norm", rows, hidden, config) if config else None
        return add_rms_norm_triton(x, residual, weight, EPS, tile)

    def candidates() -> Iterator[Candidate]:
        for name, config in configs.items():
            yield _candidate(name, partial(ours, config), sets, _both)
        p: Any = peers
        yield from _present(peers, {
            "vllm-ew": (lambda *a: p.vllm_add_rms_norm(*a, weight), p and p.clone(sets), _both),
            "liger": (lambda *a: p.liger_add_rms_norm(*a, weight), sets, _both),
            "inductor": (lambda *a: p.inductor("add_rms")(*a, weight), sets, _both),
        }, notes)  # fmt: skip

    name = f"add+RMSNorm {rows}x{hidden}"
    return Row(name, reference, nbytes, 0.0, floor, quoted, candidates, notes)


def norm_row(
    rows: int, hidden: int, peers: ModuleType | None = None, configs: Configs = TUNED
) -> Row:
    nbytes, weight = 4.0 * rows * hidden, _random(hidden)
    sets = [(_random(rows, hidden),) for _ in range(copies(nbytes))]
    reference = rms_norm_reference(sets[0][0].float(), weight.float(), EPS)
    notes: dict[str, str] = {}

    def ours(config: Mapping[str, int] | None, x: Tensor) -> Tensor:
        tile = norm_tile("rms_norm", rows, hidden, config) if config else None
        return rms_norm_triton(x, weight, EPS, tile)

    def candidates() -> Iterator[Candidate]:
        for name, config in configs.items():
            yield _candidate(name, partial(ours, config), sets, Tensor.clone)
        p: Any = peers
        vllm = (lambda x: p.vllm_rms_norm(x, weight), sets, Tensor.clone)
        yield from _present(peers, {"vllm-ew": vllm}, notes)

    return Row(
        f"RMSNorm {rows}x{hidden}", reference, nbytes, 0.0, None, None, candidates, notes
    )  # fmt: skip


def swiglu_row(
    rows: int, width: int, floor: Floors, quoted: float | None, peers: ModuleType | None = None,
    configs: Configs = TUNED,
) -> Row:  # fmt: skip
    nbytes = 6.0 * rows * width
    sets = [(_random(rows, 2 * width),) for _ in range(copies(nbytes))]
    gate, up = sets[0][0].float().chunk(2, -1)
    reference = torch.nn.functional.silu(gate) * up
    del gate, up
    notes: dict[str, str] = {}

    def ours(config: Mapping[str, int] | None, x: Tensor) -> Tensor:
        return swiglu_triton(x, Tile(**config) if config else None)

    def candidates() -> Iterator[Candidate]:
        for name, config in configs.items():
            yield _candidate(name, partial(ours, config), sets, Tensor.clone)
        p: Any = peers
        yield from _present(peers, {
            "vllm-ew": (lambda x: p.vllm_silu_mul(x), sets, Tensor.clone),
            "inductor": (lambda x: p.inductor("silu_mul")(x), sets, Tensor.clone),
        }, notes)  # fmt: skip

    name = f"SwiGLU {rows}x{width}"
    return Row(name, reference, nbytes, 0.0, floor, quoted, candidates, notes)


def rope_row(
    tokens: int, heads: int, kv_heads: int, floor: Floors, quoted: float | None,
    peers: ModuleType | None = None, configs: Configs = TUNED, dim: int = 128, page: int = 16,
) -> Row:  # fmt: skip
    """Of the slices of one fused projection; the peer's q, k and v lie alone, rotated in place."""
    nbytes = 4.0 * tokens * dim * (heads + 2 * kv_heads)
    widths = [heads * dim, kv_heads * dim, kv_heads * dim]
    count, blocks = copies(nbytes), -(-tokens // page) + 1
    fused = [_random(tokens, sum(widths)) for _ in range(count)]
    pools = [
        tuple(torch.full((blocks, page, kv_heads, dim), torch.nan, device="cuda").bfloat16()
              for _ in range(2))
        for _ in range(count)
    ]  # fmt: skip
    positions = torch.randperm(8192, device="cuda")[:tokens]
    slots = torch.arange(tokens, device="cuda")
    turns = torch.arange(8192, device="cuda")[:, None] * 1e4 ** (
        -torch.arange(0, dim, 2, device="cuda") / dim
    )
    cos, sin = turns.cos(), turns.sin()

    def parts(x: Tensor) -> list[Tensor]:
        return [part.view(tokens, -1, dim) for part in torch.split(x, widths, 1)]

    def written(k_pool: Tensor, v_pool: Tensor, q: Tensor) -> Tensor:
        stored = [pool.flatten(0, 1)[:tokens].flatten() for pool in (k_pool, v_pool)]
        return torch.cat([q.flatten(), *stored])

    q, k, v = (part.float() for part in parts(fused[0]))
    turned = rope_reference(q[None], k[None], cos, sin, positions[None], False)
    reference = torch.cat([x.flatten() for x in (*turned, v)])
    del q, k, v, turned
    notes: dict[str, str] = {}

    def ours(config: Mapping[str, int] | None, x: Tensor, k_pool: Tensor, v_pool: Tensor) -> Any:
        warps = token_warps(tokens, heads, dim, config) if config else None
        q, k, v = parts(x)
        y = rope_append_triton(
            q, k, v, cos, sin, positions, k_pool, v_pool, slots, False, warps=warps
        )
        return k_pool, v_pool, y

    def candidates() -> Iterator[Candidate]:
        sets = [(x, *pair) for x, pair in zip(fused, pools, strict=True)]
        for name, config in configs.items():
            yield _candidate(name, partial(ours, config), sets, lambda done: written(*done))
        table = torch.cat((cos, sin), -1).bfloat16()
        apart = [
            (*(part.contiguous() for part in torch.split(x, widths, 1)), *pair)
            for x, pair in zip(fused, pools, strict=True)
        ]

        def vllm(q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor) -> Any:
            p: Any = peers
            p.vllm_rope_append(q, k, v, positions, table, k_pool, v_pool, slots)
            return k_pool, v_pool, q

        given = {"vllm-ew": (vllm, apart, lambda done: written(*done))}
        yield from _present(peers, given, notes)

    return Row(
        f"RoPE+append {tokens} tokens {heads}/{kv_heads}", reference, nbytes, 0.0, floor, quoted,
        candidates, notes,
    )  # fmt: skip


def elementwise_rows(peers: ModuleType | None) -> Iterator[Callable[[], Row]]:
    """The quoted figures are the best public kernels' on an H200 (vLLM 0.24, Liger, Inductor)."""
    near = Floor(0.9, "roof")
    for rows, norm, glu, rope in ((1, 2.0, 1.3, 5.1), (32, 2.1, 2.7, 5.5), (8192, 67.6, 162, 152)):
        floor = near if rows == 8192 else 1.0
        yield partial(add_norm_row, rows, 4096, floor, norm, peers)
        yield partial(swiglu_row, rows, 14336, floor, glu, peers)
        yield partial(rope_row, rows, 32, 8, floor, rope, peers)
        yield partial(norm_row, rows, 4096, peers)


def _tuners() -> Iterator[Tuner]:
    norms = [{"per_thread": n, "block": b} for n in (4, 8, 16, 32, 64) for b in (1024, 8192)]
    glus = [{"block": b, "warps": w} for b in (512, 1024, 2048, 4096, 8192) for w in (1, 2, 4, 8)]
    ropes = [{"per_thread": n} for n in (8, 16, 32, 64, 128)]
    for rows, most in ((1, 8), (32, 256), (8192, None)):
        limit = None if most is None else most * 14336
        row: Callable[[Configs], Row] = partial(add_norm_row, rows, 4096, None, None, None)
        yield Tuner("add_rms_norm", {"rows": most}, row, norms)
        yield Tuner("rms_norm", {"rows": most}, partial(norm_row, rows, 4096, None), norms)
        row = partial(swiglu_row, rows, 14336, None, None, None)
        yield Tuner("swiglu", {"values": limit}, row, glus)
        row = partial(rope_row, rows, 32, 8, None, None, None)
        yield Tuner("rope", {"tokens": most}, row, ropes)


TUNERS = list(_tuners())
