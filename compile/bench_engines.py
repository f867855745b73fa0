"""Engines on one GPU, beside transformers eager and torch.compile in the same process.

Decode goes through `LLM`, as serving does: scheduling, sampling and text are in its time. A figure
is the median of alternating rounds in which all take turns, each on `context` cached tokens. The
limit is the bytes of a step (bench_limits.py) over the copy bandwidth measured here. Weights may be
random, never zero: memory and matrix units are faster and cooler with zeros.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from seekforge.compile.bench_floors import Floor, bound
from seekforge.compile.bench_kernels import Ceilings, measure_ceilings
from seekforge.compile.bench_limits import decode_bytes, kind, name, prefill_flops
from seekforge.compile.bench_peers import Peer, prefill
from seekforge.kernels.errors import InputError
from seekforge.models.module import load_eager
from seekforge.runtime.fit import resolve_engine
from seekforge.runtime.inductor import WEIGHTS_NAME
from seekforge.runtime.llm import LLM
from seekforge.runtime.sampling import SamplingParams
from seekforge.runtime.session import Chunk

STEPS, WARM_UP, ROUNDS = 64, 8, 3
EAGER, COMPILED = "transformers eager", "torch.compile, static cache"
HOST_US, HOST_BATCH = 60.0, 32  # of a step beyond the GPU's work, from this batch size on
# Demands by model, kind and batch: times the speed of the limit ("roof"), of a peer or of a row, or
# of one token a second.
FLOORS: dict[tuple[str, str, int], tuple[Floor, ...]] = {
    ("qwen2", "bf16", 1): (Floor(0.82, "roof"), Floor(1.10, COMPILED), Floor(4, EAGER)),
    ("qwen2", "int4", 1): (Floor(0.62, "roof"), Floor(2.3, "bf16")),
    ("llama", "int4", 1): (Floor(0.62, "roof"), Floor(2.3, "bf16")),
    ("deepseek_v2", "bf16", 1): (Floor(0.55, "roof"),),
    ("deepseek_v2", "int4", 1): (Floor(800, "token/s"),),
    ("qwen2", "bf16", 32): (Floor(0.78, "roof"),),
    ("qwen2", "int4", 32): (Floor(1.5, "bf16"),),
    ("deepseek_v2", "bf16", 32): (Floor(0.60, "roof"),),
}
PREFILL_FLOORS: dict[tuple[str, str], tuple[Floor, ...]] = {
    ("qwen2", "bf16"): (Floor(0.75, "roof"),),
    ("qwen2", "int4"): (Floor(1 / 1.08, "bf16"),),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """What is timed. prefill: tokens of the prefill row, 0: none; peers: also transformers, of
    which peer_batches (None: all) are decoded with."""

    batches: Sequence[int] = (1, 32)
    context: int = 2048
    prefill: int = 4096
    peers: bool = True
    rounds: int = ROUNDS
    peer_batches: Sequence[int] | None = None


def bench_engines(
    engines: Sequence[Path],
    checkpoint: Path | None,
    shape: Shape,
    show: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[dict[str, Any]]:
    """One dict a row: row, value, unit, floor, better, peer, roof, and more. Engines of one
    checkpoint, the unquantised first. Raises InputError without a GPU or the checkpoint."""
    if not torch.cuda.is_available():
        raise InputError("no CUDA GPU here: engines for the CPU are timed by `seekforge bench`")
    ceilings = measure_ceilings()
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        show(row)

    most = max(shape.batches)
    room = shape.context + (STEPS + WARM_UP) * (shape.rounds + 1) + 64
    llms = []
    for path in engines:
        directory = resolve_engine(path)
        start = time.perf_counter()
        llm = LLM(directory, max_batch=most, num_blocks=most * -(-room // 16) + 512)
        llm.generate([[7, 8, 9]], SamplingParams(max_tokens=1))
        add(_start_row(llm, time.perf_counter() - start))
        llms.append((llm, directory / WEIGHTS_NAME))
    model: Any = None
    if shape.peers:
        first = llms[0][0].manifest
        source = checkpoint or Path(first.model.get("checkpoint", ""))
        if not (source / "config.json").is_file():
            raise InputError(f"{source}: no checkpoint there; give it with --checkpoint")
        model = load_eager(source, getattr(torch, first.dtype), "sdpa").cuda()
    for batch in shape.batches:
        for row in _decode_rows(llms, model, batch, shape, ceilings):
            add(row)
    if shape.prefill:
        for row in _prefill_rows([llm for llm, _ in llms], model, shape, ceilings):
            add(row)
    return rows


def _decode_rows(
    llms: Sequence[tuple[LLM, Path]], model: Any, batch: int, shape: Shape, ceilings: Ceilings
) -> list[dict[str, Any]]:
    """Tokens/s of each engine, and the host's share of a step."""
    runs: dict[str, Callable[[], float]] = {}
    notes: dict[str, str] = {}
    for index, (llm, _) in enumerate(llms):
        runs[str(index)] = partial(engine_step, llm, batch, shape.context)
    torch.cuda.reset_peak_memory_stats()
    if model is not None and (shape.peer_batches is None or batch in shape.peer_batches):
        room = (STEPS + WARM_UP) * (shape.rounds + 1)
        for label in (EAGER, COMPILED):
            try:
                peer = Peer(model, batch, shape.context, room, compiled=label == COMPILED)
                for _ in range(3):
                    peer.step()
                runs[label] = partial(timed, peer.step)
            except Exception as error:  # a peer that fails is a note, not the end of the run
                notes[label] = f"{type(error).__name__}: {str(error)[:120]}"
    taken = _alternate(runs, shape.rounds)
    speeds = {label: batch / seconds for label, seconds in taken.items()}
    rows: list[dict[str, Any]] = []
    known: dict[str, float | None] = {k: v for k, v in speeds.items() if k in (EAGER, COMPILED)}
    best = max((label for label in known), key=lambda label: speeds[label], default=None)
    for index, (llm, weights) in enumerate(llms):
        nbytes = decode_bytes(llm.manifest, weights, batch, shape.context)
        roof = batch * ceilings.copy / nbytes
        step = taken[str(index)]
        floors = FLOORS.get((llm.manifest.model["model_type"], kind(llm.manifest), batch), ())
        # `bound` speaks of times: a floor of speed is 1 / the time allowed.
        others = known | {"roof": roof, "token/s": 1.0}
        times = {label: 1 / speed for label, speed in others.items() if speed}
        allowed, missing = bound(floors, times)
        graph = graph_seconds(llm, batch, shape.context)
        what = f"{name(llm.manifest)} {kind(llm.manifest)}"
        rows.append(
            {
                "row": f"{what} decode B={batch} S={shape.context}",
                "value": round(batch / step, 1),
                "unit": "tokens/s",
                "floor": None if allowed is None else round(1 / allowed, 1),
                "better": "higher",
                "peer": round(speeds[best], 1) if best else None,
                "peer_name": best or "none",
                "roof": round(roof, 1),
                "of_roof": round(100 * batch / step / roof, 1),
                "gigabytes_per_second": round(nbytes / step / 1e9),
                "step_ms": round(1e3 * step, 3),
                "graph_ms": round(1e3 * graph, 3),
                "host_us": round(1e6 * (step - graph), 1),
                "peak_gigabytes": round(torch.cuda.max_memory_allocated() / 1e9, 2),
                "peers": {label: round(speeds[label], 1) for label in known},
                "notes": notes | missing,
            }
        )
        known[kind(llm.manifest)] = batch / step
        if batch >= HOST_BATCH:
            rows.append(_host_row(f"{what} host time a step B={batch}", step - graph))
    return rows


def _host_row(row: str, seconds: float) -> dict[str, Any]:
    return {
        "row": row, "value": round(1e6 * seconds, 1), "unit": "us", "floor": HOST_US,
        "better": "lower", "peer": None, "peer_name": "none", "roof": None, "notes": {},
    }  # fmt: skip


def _prefill_rows(
    llms: Sequence[LLM], model: Any, shape: Shape, ceilings: Ceilings
) -> list[dict[str, Any]]:
    runs: dict[str, Callable[[], float]] = {}
    tokens = min([shape.prefill, *(llm.manifest.limits.max_chunk for llm in llms)])
    for index, llm in enumerate(llms):
        runs[str(index)] = partial(timed, partial(_prefill, llm, tokens), 3)
    if model is not None:
        runs[EAGER] = partial(timed, prefill(model, tokens), 3)
    taken = _alternate(runs, shape.rounds)
    rows: list[dict[str, Any]] = []
    known: dict[str, float | None] = {EAGER: taken.get(EAGER)}
    for index, llm in enumerate(llms):
        flops = prefill_flops(llm.manifest, tokens)
        roof, seconds = flops / ceilings.matmul, taken[str(index)]
        floors = PREFILL_FLOORS.get((llm.manifest.model["model_type"], kind(llm.manifest)), ())
        allowed, missing = bound(floors, known | {"roof": roof})
        rows.append(
            {
                "row": f"{name(llm.manifest)} {kind(llm.manifest)} prefill {tokens}",
                "value": round(1e3 * seconds, 2),
                "unit": "ms",
                "floor": None if allowed is None else round(1e3 * allowed, 2),
                "better": "lower",
                "peer": round(1e3 * taken[EAGER], 2) if EAGER in taken else None,
                "peer_name": EAGER if EAGER in taken else "none",
                "roof": round(1e3 * roof, 2),
                "of_roof": round(100 * roof / seconds, 1),
                "teraflops": round(flops / seconds / 1e12, 1),
                "notes": missing,
            }
        )
        known[kind(llm.manifest)] = seconds
    return rows


def _start_row(llm: LLM, seconds: float) -> dict[str, Any]:
    return {
        "row": f"{name(llm.manifest)} {kind(llm.manifest)} load and first token",
        "value": round(seconds, 2), "unit": "s", "floor": 5.0, "better": "lower", "peer": None,
        "peer_name": "none", "roof": None, "notes": {},
    }  # fmt: skip


def engine_step(llm: LLM, batch: int, context: int) -> float:
    """Seconds of a decode step of `batch` sequences, behind prompts of `context` tokens."""
    random = torch.Generator().manual_seed(1)
    known = torch.tensor(sorted(i for i in llm.tokenizer.get_vocab().values()))
    known = known[known < llm.manifest.vocab_size]
    picked = torch.randint(0, len(known), (batch, context), generator=random)
    params = SamplingParams(max_tokens=STEPS + WARM_UP + 8, ignore_eos=True)
    requests = [llm.add_request(row, params) for row in known[picked].tolist()]
    running = llm.scheduler.running
    while llm.scheduler.waiting or any(s.num_pending > 1 for s in running):
        llm.step()
    seconds = timed(llm.step)
    assert len(running) == batch, f"{len(running)} of {batch} sequences are left"
    for request in requests:
        llm.abort(request)
    while llm.step():
        pass
    return seconds


def graph_seconds(llm: LLM, batch: int, context: int) -> float:
    """Seconds of the captured step alone, replayed without anything between."""
    session: Any = llm.session
    width = -(-(context + 1) // llm.blocks.block_size)
    table = [list(range(i * width, (i + 1) * width)) for i in range(batch)]
    session.step([Chunk([7], context, row, [0]) for row in table])
    size = session.graphs.size_for(batch)
    return timed(lambda: session.graphs.run(size))


def _prefill(llm: LLM, tokens: int) -> None:
    width = -(-tokens // llm.blocks.block_size)
    llm.session.step([Chunk([7] * tokens, 0, list(range(width)), [tokens - 1])])


def timed(step: Callable[[], Any], steps: int = STEPS) -> float:
    """Seconds of one call, of `steps` of them behind a few that warm up."""
    for _ in range(min(WARM_UP, steps)):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def _alternate(runs: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Median seconds of each; every round runs all of them, and the first is not counted."""
    taken: dict[str, list[float]] = {label: [] for label in runs}
    for index in range(rounds + 1):
        for label, run in runs.items():
            seconds = run()
            if index:
                taken[label].append(seconds)
    return {label: statistics.median(values) for label, values in taken.items()}


def format_row(row: Mapping[str, Any]) -> str:
    """One line for people."""
    met = ""
    if row["floor"] is not None:
        good = (
            row["value"] >= row["floor"]
            if row["better"] == "higher"
            else row["value"] <= row["floor"]
        )
        met = "met" if good else "NO"
    more = {
        k: row[k]
        for k in ("of_roof", "step_ms", "graph_ms", "host_us", "peers", "notes")
        if row.get(k)
    }
    return (
        f"{row['row']:<46}{row['value']:>10} {row['unit']:<9} floor {row['floor']} {met:<4} "
        f"roof {row['roof']} peer {row['peer']} {more}"
    )
