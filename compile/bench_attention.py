"""Rows of the kernel benchmark: paged attention, latent attention, prefill.

Each function makes a row's random inputs, its reference (fp32, over the first sequences) and its
candidates: our kernel, with the tuned configuration or with each of `configs`, and the peers
present. What is timed is attention alone, as peers' kernels do; the write of the new token is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from seekforge.compile.bench_floors import Floor, Floors
from seekforge.compile.bench_kernels import Candidate, Row, copies
from seekforge.kernels.paged_decode import paged_decode_triton
from seekforge.kernels.paged_mla_decode import paged_mla_decode
from seekforge.kernels.paged_prefill import paged_prefill
from seekforge.kernels.quantised_paged_attention import quantise_heads
from seekforge.kernels.tuning import Config

DIM, RANK, ROPE = 128, 512, 64
Configs = Mapping[str, Config | None]
TUNED: Configs = {"seekforge": None}


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _pages(batch: int, length: int, page: int) -> tuple[Tensor, Tensor, Tensor]:
    """Shuffled block tables, context lengths and query starts of a batch of decodes."""
    count = -(-length // page)
    table = torch.randperm(batch * count, device="cuda").view(batch, count)
    lens = torch.full((batch,), length, device="cuda")
    return table, lens, torch.arange(batch + 1, device="cuda")


def _peers(
    peers: ModuleType | None, table: str, prepare: Callable[[Any], Any], q: Tensor, few: int,
    count: int, notes: dict[str, str], skip: tuple[str, ...] = (),
) -> Iterator[Candidate]:  # fmt: skip
    """Candidates of the adapters in one of the peers' tables."""
    for name, adapter in getattr(peers, table, {}).items() if peers else ():
        if name in skip:
            continue
        present, why = peers.available(name)  # type: ignore[union-attr]
        if not present:
            notes[name] = f"absent: {why[:60]}"
            continue
        try:
            state = prepare(adapter)
        except Exception as failure:
            notes[name] = f"{type(failure).__name__}: {str(failure)[:60]}"
            continue
        clone = peers.clone  # type: ignore[union-attr]
        states = [state, *(clone(state) for _ in range(count - 1))]
        yield Candidate(
            name,
            lambda a=adapter, s=state: a.run(q, s)[:few],  # type: ignore[misc]
            [partial(adapter.run, q, s) for s in states],
        )


def decode_row(
    batch: int, length: int, page: int, heads: int, kv_heads: int, floor: Floors,
    quoted: float | None, peers: ModuleType | None = None, kind: str = "bfloat16",
    configs: Configs = TUNED,
) -> Row:  # fmt: skip
    """Paged decode. kind: "bfloat16", "int8" or "fp8" pools; peers serve the first only."""
    table, lens, starts = _pages(batch, length, page)
    pools = [_random(table.numel(), page, kv_heads, DIM) for _ in range(2)]
    q, few = _random(batch, heads, DIM), min(batch, 4)
    nbytes = batch * (4.0 * length * kv_heads * DIM + 4 * heads * DIM)
    scales: list[Tensor | None] = [None, None]
    wide = pools
    if kind != "bfloat16":
        dtype = torch.int8 if kind == "int8" else torch.float8_e4m3fn
        nbytes = batch * (2.0 * length * kv_heads * (DIM + 4 * (kind == "int8")) + 4 * heads * DIM)
        given = torch.full((kv_heads,), 0.02, device="cuda")
        for i, pool in enumerate(pools):
            stored, scale = quantise_heads(pool.flatten(0, 1), dtype, given)
            pools[i] = stored.view(pool.shape)
            scales[i] = scale.view(pool.shape[:3]) if kind == "int8" else scale
        unit = [s[..., None] if s is not None else s for s in scales]
        wide = [p.float() * u for p, u in zip(pools, unit, strict=True)]  # type: ignore[operator]
    keys, values = (p[table[:few]].view(few, -1, kv_heads, DIM)[:, :length].float() for p in wide)
    grouped = q[:few].float().view(few, kv_heads, -1, DIM)
    weights = torch.softmax(torch.einsum("bkgd,bskd->bkgs", grouped, keys) * DIM**-0.5, -1)
    reference = torch.einsum("bkgs,bskd->bkgd", weights, values).reshape(few, heads, DIM)
    del keys, values, weights, wide
    count = copies(nbytes)
    notes: dict[str, str] = {}
    y = torch.empty_like(q)

    def ours(config: Config | None, given: list[Tensor]) -> Tensor:
        k_pool, v_pool = given
        paged_decode_triton(
            q, k_pool, v_pool, table, lens, starts, DIM**-0.5, y, True, scales[0], scales[1], config
        )
        return y

    def candidates() -> Iterator[Candidate]:
        sets = [pools, *([p.clone() for p in pools] for _ in range(count - 1))]
        for name, config in configs.items():

            def check(config: Config | None = config) -> Tensor:
                y.fill_(torch.nan)
                return ours(config, pools)[:few].clone()

            yield Candidate(name, check, [partial(ours, config, given) for given in sets])
        small = table.to(torch.int32), lens.to(torch.int32)
        if kind == "bfloat16":
            yield from _peers(
                peers, "DECODE", lambda a: a.prepare(q, *pools, *small), q, few, count, notes,
                ("paged-v1", "paged-v2"),
            )  # fmt: skip

    suffix = "" if kind == "bfloat16" else f" {kind}"
    return Row(
        f"paged decode B{batch} S{length} {heads}/{kv_heads} block {page}{suffix}", reference,
        nbytes, 4.0 * batch * length * heads * DIM, floor, quoted, candidates, notes,
    )  # fmt: skip


def mla_row(
    batch: int, length: int, heads: int, floor: float, quoted: float,
    peers: ModuleType | None = None, configs: Configs = TUNED, page: int = 64,
) -> Row:  # fmt: skip
    """Absorbed latent decode, rank 512 + 64."""
    table, lens, starts = _pages(batch, length, page)
    pool, q = _random(table.numel(), page, RANK + ROPE), _random(batch, heads, RANK + ROPE)
    scale, few = 192**-0.5, min(batch, 4)
    cached = pool[table[:few]].view(few, -1, RANK + ROPE)[:, :length].float()
    weights = torch.softmax(q[:few].float() @ cached.transpose(1, 2) * scale, -1)
    reference = weights @ cached[..., :RANK]
    nbytes = batch * (2.0 * length * (RANK + ROPE) + 2 * heads * (2 * RANK + ROPE))
    count = copies(nbytes)
    notes: dict[str, str] = {}
    y = q.new_empty(batch, heads, RANK)
    parts = q[..., :RANK], q[..., RANK:]

    def ours(config: Config | None, given: Tensor) -> Tensor:
        paged_mla_decode(*parts, given, table, lens, starts, scale, y, config)
        return y

    def candidates() -> Iterator[Candidate]:
        sets = [pool, *(pool.clone() for _ in range(count - 1))]
        for name, config in configs.items():

            def check(config: Config | None = config) -> Tensor:
                y.fill_(torch.nan)
                return ours(config, pool)[:few].clone()

            yield Candidate(name, check, [partial(ours, config, given) for given in sets])
        small = table.to(torch.int32), lens.to(torch.int32)
        if page == 64:
            yield from _peers(
                peers, "MLA", lambda a: a.prepare(q, pool, *small, scale), q, few, count, notes,
                ("flashinfer-mla-fa2",),
            )  # fmt: skip

    flops = 2.0 * batch * length * heads * (2 * RANK + ROPE)
    return Row(
        f"MLA decode B{batch} S{length} H{heads}", reference, nbytes, flops, floor, quoted,
        candidates, notes,
    )  # fmt: skip


def prefill_row(
    length: int, heads: int, kv_heads: int, floor: float, quoted: float,
    peers: ModuleType | None = None, configs: Configs = TUNED, page: int = 64,
) -> Row:  # fmt: skip
    """One causal prefill from nothing; ours reads the pool, peers plain tensors."""
    table, lens, _ = _pages(1, length, page)
    starts = torch.tensor([0, length], device="cuda")
    k, v = (_random(1, length, kv_heads, DIM) for _ in range(2))
    q = _random(1, length, heads, DIM)
    pools = [_random(table.numel(), page, kv_heads, DIM) for _ in range(2)]
    for pool, new in zip(pools, (k, v), strict=True):
        pool[table[0]] = new.view(-1, page, kv_heads, DIM)
    few = 256
    wide = [x[0].float().repeat_interleave(heads // kv_heads, 1).transpose(0, 1) for x in (k, v)]
    scores = q[0, -few:].float().transpose(0, 1) @ wide[0].transpose(1, 2) * DIM**-0.5
    scores += torch.full((few, length), float("-inf"), device="cuda").triu(length - few + 1)
    reference = (torch.softmax(scores, -1) @ wide[1]).transpose(0, 1)
    notes: dict[str, str] = {}
    y = torch.empty_like(q[0])

    def ours(config: Config | None) -> Tensor:
        paged_prefill(q[0], pools[0], pools[1], table, lens, starts, DIM**-0.5, y, 1, config)
        return y

    def candidates() -> Iterator[Candidate]:
        for name, config in configs.items():

            def check(config: Config | None = config) -> Tensor:
                y.fill_(torch.nan)
                done = ours(config).clone()
                assert done.isfinite().all(), "rows left unwritten"
                return done[-few:]

            yield Candidate(name, check, [partial(ours, config)])
        if peers is None:
            return
        for name, run in (("fa3", peers.fa3_prefill), ("sdpa-cudnn", peers.sdpa_prefill)):
            present, why = peers.available(name)
            if present:
                yield Candidate(
                    name,
                    lambda r=run: r(q, k, v)[0, -few:],  # type: ignore[misc]
                    [partial(run, q, k, v)],
                )
            else:
                notes[name] = f"absent: {why[:60]}"

    return Row(
        f"prefill {length} causal {heads}/{kv_heads}", reference, 0.0,
        2.0 * length**2 * heads * DIM, floor, quoted, candidates, notes,
    )  # fmt: skip


def attention_rows(peers: ModuleType | None) -> Iterator[Callable[[], Row]]:
    """The rows in their order; made one by one, since their inputs fill gigabytes. The quoted
    figures are the best public kernels' on an H200 (FlashInfer 0.6.12, FlashAttention-3)."""
    large = [(32, 4096, 32, 8, 127.0), (32, 4096, 28, 4, 71.4), (64, 8192, 32, 8, 480.0),
             (64, 8192, 28, 4, 242.0)]  # fmt: skip
    for page in (16, 64):
        for *shape, quoted in large:
            b, s, h, k = map(int, shape)
            yield partial(decode_row, b, s, page, h, k, 0.98, quoted, peers)
    for length, quoted in ((1024, 9.2), (2048, 10.2), (4096, 13.2), (8192, 18.4)):
        yield partial(decode_row, 1, length, 16, 32, 8, 1.15, quoted, peers)
    yield partial(decode_row, 32, 8192, 16, 32, 8, None, None, None)
    own = Floor(1.75, "paged decode B32 S8192 32/8 block 16")
    for kind in ("int8", "fp8"):
        yield partial(decode_row, 32, 8192, 16, 32, 8, own, None, None, kind)
    for b, s, quoted in ((32, 2048, 30.1), (32, 8192, 80.8), (64, 2048, 47.0), (64, 8192, 147.0)):
        yield partial(mla_row, b, s, 16, 1.0, quoted, peers)
    for b, s, quoted in ((32, 8192, 138.0), (128, 4096, 252.0)):
        yield partial(mla_row, b, s, 128, 0.85, quoted, peers)
    yield partial(prefill_row, 4096, 32, 8, 0.8, 222.0, peers)
