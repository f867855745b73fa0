"""Rows of the kernel benchmark: paged attention, latent attention, prefill.

Each function makes a row's random inputs, its reference (fp32, over the first sequences) and its
candidates: our kernel, with the tuned configuration or with each of `configs`, and the peers
present. What is timed is attention alone, as peers' kernels do; the write of the new token is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from seekforge.compile.bench_floors import Floor, Floors
from seekforge.compile.bench_kernels import Candidate, Row, copies
from seekforge.compile.bench_pools import pages, present, random, store, value_bytes
from seekforge.compile.bench_tune import Tuner
from seekforge.kernels.paged_decode import paged_decode_triton
from seekforge.kernels.paged_mla_decode import paged_mla_decode, paged_mla_decode_triton
from seekforge.kernels.paged_prefill import paged_prefill, paged_prefill_triton
from seekforge.kernels.tuning import decode_config, mla_config, multiprocessors, prefill_config

DIM, RANK, ROPE = 128, 512, 64
Given = Mapping[str, Any] | None  # a row of h200.json, or the one in use
Configs = Mapping[str, Given]
TUNED: Configs = {"seekforge": None}


def named(row: str, kind: str) -> str:
    return row if kind == "bfloat16" else f"{row} {kind}"


def decode_row(
    batch: int, length: int, page: int, heads: int, kv_heads: int, floor: Floors,
    quoted: float | None, peers: ModuleType | None = None, kind: str = "bfloat16",
    configs: Configs = TUNED,
) -> Row:  # fmt: skip
    """Paged decode. kind: "bfloat16", "int8" or "fp8" pools; peers serve the first only."""
    table, lens, starts = pages(batch, length, page)
    q, few = random(batch, heads, DIM), min(batch, 4)
    nbytes = batch * (2 * length * kv_heads * value_bytes(kind, DIM) + 4 * heads * DIM)
    made = (store(random(table.numel(), page, kv_heads, DIM), kind) for _ in range(2))
    pools, scales, wide = map(list, zip(*made, strict=True))
    keys, values = (p[table[:few]].view(few, -1, kv_heads, DIM)[:, :length].float() for p in wide)
    grouped = q[:few].float().view(few, kv_heads, -1, DIM)
    weights = torch.softmax(torch.einsum("bkgd,bskd->bkgs", grouped, keys) * DIM**-0.5, -1)
    reference = torch.einsum("bkgs,bskd->bkgd", weights, values).reshape(few, heads, DIM)
    del keys, values, weights, wide
    count = copies(nbytes)
    notes: dict[str, str] = {}
    y = torch.empty_like(q)

    def ours(chosen: Given, given: list[Tensor]) -> Tensor:
        config = None if chosen is None else decode_config(
            kind, tiles=batch * kv_heads, context=table.shape[1] * page, block_size=page, dim=DIM,
            processors=multiprocessors(q.device), given=chosen,
        )  # fmt: skip
        k_pool, v_pool = given
        index = table, lens, starts
        paged_decode_triton(
            q, k_pool, v_pool, *index, DIM**-0.5, y, True, scales[0], scales[1], config
        )
        return y

    def candidates() -> Iterator[Candidate]:
        sets = [pools, *([p.clone() for p in pools] for _ in range(count - 1))]
        for name, config in configs.items():

            def check(config: Given = config) -> Tensor:
                y.fill_(torch.nan)
                return ours(config, pools)[:few].clone()

            yield Candidate(name, check, [partial(ours, config, given) for given in sets])
        small = table.to(torch.int32), lens.to(torch.int32)
        if kind == "bfloat16":
            yield from present(
                peers, "DECODE", lambda a: a.prepare(q, *pools, *small), q, few, count, notes,
                ("paged-v1", "paged-v2"),
            )  # fmt: skip

    return Row(
        named(f"paged decode B{batch} S{length} {heads}/{kv_heads} block {page}", kind), reference,
        nbytes, 4.0 * batch * length * heads * DIM, floor, quoted, candidates, notes,
    )  # fmt: skip


def mla_row(
    batch: int, length: int, heads: int, floor: Floors, quoted: float | None,
    peers: ModuleType | None = None, kind: str = "bfloat16", configs: Configs = TUNED,
    page: int = 64,
) -> Row:  # fmt: skip
    """Absorbed latent decode, rank 512 + 64. With configurations of the Triton kernel, that one."""
    table, lens, starts = pages(batch, length, page)
    q = random(batch, heads, RANK + ROPE)
    scale, few = 192**-0.5, min(batch, 4)
    parts = random(table.numel(), page, 1, RANK), random(table.numel(), page, 1, ROPE)
    stored, scales, wide = zip(*(store(x, kind) for x in parts), strict=True)
    pool = torch.cat([x[:, :, 0].view(torch.uint8) for x in stored], -1).view(stored[0].dtype)
    cached = torch.cat([x[table[:few], :, 0] for x in wide], -1).flatten(1, 2)[:, :length].float()
    weights = torch.softmax(q[:few].float() @ cached.transpose(1, 2) * scale, -1)
    reference = weights @ cached[..., :RANK]
    cached_bytes = length * (value_bytes(kind, RANK) + value_bytes(kind, ROPE))
    nbytes = batch * (cached_bytes + 2 * heads * (2 * RANK + ROPE))
    count = copies(nbytes)
    notes: dict[str, str] = {}
    y = q.new_empty(batch, heads, RANK)

    def ours(chosen: Given, given: Tensor) -> Tensor:
        config = None if chosen is None else mla_config(
            kind, tokens=batch, sequences=batch, heads=heads, context=table.shape[1] * page,
            processors=multiprocessors(q.device), given=chosen,
        )  # fmt: skip
        inputs = q[..., :RANK], q[..., RANK:], given, table, lens, starts, scale, y
        if kind == "bfloat16" and configs is TUNED:
            paged_mla_decode(*inputs)
        else:
            paged_mla_decode_triton(*inputs, config, scales[0], scales[1])
        return y

    def candidates() -> Iterator[Candidate]:
        sets = [pool, *(pool.clone() for _ in range(count - 1))]
        for name, config in configs.items():

            def check(config: Given = config) -> Tensor:
                y.fill_(torch.nan)
                return ours(config, pool)[:few].clone()

            yield Candidate(name, check, [partial(ours, config, given) for given in sets])
        small = table.to(torch.int32), lens.to(torch.int32)
        if page == 64 and kind == "bfloat16":
            yield from present(
                peers, "MLA", lambda a: a.prepare(q, pool, *small, scale), q, few, count, notes,
                ("flashinfer-mla-fa2",),
            )  # fmt: skip

    flops = 2.0 * batch * length * heads * (2 * RANK + ROPE)
    return Row(
        named(f"MLA decode B{batch} S{length} H{heads}", kind), reference, nbytes, flops, floor,
        quoted, candidates, notes,
    )  # fmt: skip


def prefill_row(
    length: int, heads: int, kv_heads: int, floor: Floors, quoted: float | None,
    peers: ModuleType | None = None, kind: str = "bfloat16", configs: Configs = TUNED,
    page: int = 64,
) -> Row:  # fmt: skip
    """One causal prefill from nothing; ours reads the pool, peers plain tensors. With
    configurations of the Triton kernel, that one."""
    table, lens, _ = pages(1, length, page)
    starts = torch.tensor([0, length], device="cuda")
    k, v = (random(1, length, kv_heads, DIM) for _ in range(2))
    q = random(1, length, heads, DIM)
    place = table[0].argsort()  # of each block, the part of the sequence in it
    made = (store(x.view(-1, page, kv_heads, DIM)[place], kind) for x in (k, v))
    pools, scales, meant = zip(*made, strict=True)
    few = 256
    rows = (x[table[0]].flatten(0, 1).float() for x in meant)
    wide = [x.repeat_interleave(heads // kv_heads, 1).transpose(0, 1) for x in rows]
    scores = q[0, -few:].float().transpose(0, 1) @ wide[0].transpose(1, 2) * DIM**-0.5
    scores += torch.full((few, length), float("-inf"), device="cuda").triu(length - few + 1)
    reference = (torch.softmax(scores, -1) @ wide[1]).transpose(0, 1)
    notes: dict[str, str] = {}
    y = torch.empty_like(q[0])

    def ours(chosen: Given) -> Tensor:
        config = None if chosen is None else prefill_config(kind, DIM, tiles=True, given=chosen)
        inputs = q[0], pools[0], pools[1], table, lens, starts, DIM**-0.5, y, 1
        if kind == "bfloat16" and configs is TUNED:
            paged_prefill(*inputs)
        else:
            paged_prefill_triton(*inputs, config, scales[0], scales[1])
        return y

    def candidates() -> Iterator[Candidate]:
        for name, config in configs.items():

            def check(config: Given = config) -> Tensor:
                y.fill_(torch.nan)
                done = ours(config).clone()
                assert done.isfinite().all(), "rows left unwritten"
                return done[-few:]

            yield Candidate(name, check, [partial(ours, config)])
        if peers is None or kind != "bfloat16":
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
        named(f"prefill {length} causal {heads}/{kv_heads}", kind), reference, 0.0,
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
    for kind in ("int8", "fp8"):
        for heads in (16, 128):
            yield partial(mla_row, 32, 8192, heads, None, None, None, kind)
        yield partial(prefill_row, 4096, 32, 8, None, None, None, kind)


def _space(**choices: Sequence[Any]) -> list[dict[str, Any]]:
    """All combinations."""
    return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


def _tuners() -> Iterator[Tuner]:
    """One for each row of h200.json that is worth measuring: fp32's are not."""
    space = _space(block_n=(32, 64, 128), waves=(1.0, 2.0), warps=(4, 8), stages=(2, 3, 4))
    decodes = [("bfloat16", 0.5, 1, (1, 4096, 16)), ("bfloat16", 1.2, 64, (32, 4096, 64)),
               ("bfloat16", 1.2, 1, (32, 4096, 16)), ("bfloat16", None, 1, (64, 8192, 16)),
               ("int8", None, 1, (32, 8192, 16)), ("fp8", None, 1, (32, 8192, 16))]  # fmt: skip
    for kind, load, size, shape in decodes:
        groups = (28, 4) if load == 1.2 else (32, 8)
        row = partial(decode_row, *shape, *groups, None, None, None, kind)
        yield Tuner("paged_decode", {"kind": kind, "load": load, "block_size": size}, row, space)
    for kind in ("bfloat16", "int8", "fp8"):
        for many, heads in ((False, 16), (True, 128)):
            space = _space(
                block_m=(64,) if many else (16,), block_n=(32, 64, 128), waves=(1.0, 2.0),
                warps=(4, 8), stages=(1, 2, 3),
            )  # fmt: skip
            row = partial(mla_row, 32, 8192, heads, None, None, None, kind)
            yield Tuner("paged_mla_decode", {"kind": kind, "many": many}, row, space)
        for tiles in (True, False) if kind == "bfloat16" else (False,):
            space = _space(block_m=(64, 128), block_n=(32, 64, 128), warps=(4, 8),
                           stages=(2, 3, 4))  # fmt: skip
            row = partial(
                prefill_row, 4096, 32, 8, None, None, None, kind, page=128 if tiles else 16
            )
            yield Tuner("paged_prefill", {"kind": kind, "tiles": tiles}, row, space)


TUNERS = list(_tuners())
