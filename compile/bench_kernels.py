"""Times operators beside their peers on one GPU: correct first, then CUDA-graph replays.

A row has candidates; each is checked against a reference in higher precision, and what is wrong is
not timed. Calls rotate over copies of the large inputs that together exceed the L2, and are
captured in one CUDA graph; candidates take turns in three rounds of 20 replays, and the median is
the figure. `roof` is max(bytes / copy bandwidth, operations / matmul rate), both measured in the
same process.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from seekforge.kernels.errors import InputError

ROTATE_BYTES = 240e6  # four times the L2 of an H200
WRONG = 3e-2  # relative error above which a result is not timed
ROUNDS, WARM_UP, REPLAYS = 3, 10, 20

Calls = Sequence[Callable[[], Any]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """check: one call's result, compared with the row's reference; calls: one for each copy."""

    name: str
    check: Callable[[], Tensor]
    calls: Calls


@dataclass(frozen=True, slots=True)
class Row:
    """nbytes, flops: of one call. quoted: the best peer's us elsewhere, for where none is present.
    floor: value or `peer / value` demanded, as a multiple of the best peer's speed."""

    name: str
    reference: Tensor
    nbytes: float
    flops: float
    floor: float
    quoted: float | None
    candidates: Callable[[], Iterator[Candidate]]
    notes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """copy: bytes/s, read and written ones counted; matmul: bf16 operations/s."""

    copy: float
    matmul: float


def copies(nbytes: float) -> int:
    """How many copies of a row's inputs to rotate over."""
    return max(1, min(32, math.ceil(ROTATE_BYTES / nbytes)))


def load_peers(folder: Path | None) -> ModuleType | None:
    """The module `peers` in a folder: adapters to other libraries' kernels."""
    if folder is None:
        return None
    if not (folder / "peers.py").is_file():
        raise InputError(f"{folder}: no peers.py there; give the folder of the peers' adapters")
    sys.path.insert(0, str(folder))
    return importlib.import_module("peers")


def capture(calls: Calls) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:3]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def time_graphs(
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]], rounds: int = ROUNDS
) -> dict[str, float]:
    """Microseconds of one call, of graphs of so many calls each, in turns."""
    taken: dict[str, list[float]] = {name: [] for name in graphs}
    busy = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(4):  # raises the clocks from idle; many more would lower them again
        busy @ busy
    for _ in range(rounds):
        for name, (graph, calls) in graphs.items():
            for _ in range(WARM_UP):
                graph.replay()
            events = [
                torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                for _ in range(REPLAYS + 1)
            ]
            events[0].record()
            for event in events[1:]:
                graph.replay()
                event.record()
            torch.cuda.synchronize()
            taken[name] += [1e3 * a.elapsed_time(b) / calls for a, b in pairwise(events)]
    return {name: statistics.median(times) for name, times in taken.items()}


def measure_ceilings() -> Ceilings:
    n = 1 << 30
    source, target = torch.randn(n, device="cuda"), torch.empty(n, device="cuda")
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    copy: Calls = [lambda: torch.neg(source, out=target)]  # a kernel; copy_ becomes a slower DMA
    taken = time_graphs({"copy": (capture(copy), 1), "matmul": (capture([lambda: a @ b]), 1)})
    return Ceilings(8 * n / taken["copy"] * 1e6, 2 * 8192**3 / taken["matmul"] * 1e6)


def relative_error(x: Tensor, reference: Tensor) -> float:
    """|x - reference| / |reference| in float64; infinite for NaN."""
    wide, right = x.double(), reference.double()
    error = float((wide - right).norm() / right.norm())
    return error if math.isfinite(error) else math.inf


def run_row(row: Row, ceilings: Ceilings) -> dict[str, Any]:
    """Times a row's candidates; the first is ours."""
    notes = dict(row.notes)
    graphs, errors, kept = {}, {}, []
    for candidate in row.candidates():
        try:
            error = relative_error(candidate.check(), row.reference)
            torch.cuda.synchronize()
            errors[candidate.name] = error
            if error > WRONG:
                notes[candidate.name] = f"wrong: {error:.1e}"
                continue
            calls = list(candidate.calls)
            calls = calls if len(calls) >= 4 else (calls * 4)[:4]
            graphs[candidate.name] = (capture(calls), len(calls))
            kept.append(calls)  # a graph does not keep its inputs alive
        except Exception as failure:
            if "CUDA error" in str(failure):
                raise
            notes[candidate.name] = f"{type(failure).__name__}: {str(failure)[:80]}"
    taken = time_graphs(graphs)
    roof = 1e6 * max(row.nbytes / ceilings.copy, row.flops / ceilings.matmul)
    ours = taken.pop("seekforge", math.nan)
    best = min(taken, key=lambda name: taken[name], default=None)
    peer = taken[best] if best else row.quoted
    return {
        "row": row.name,
        "value": round(ours, 2),
        "unit": "us",
        "floor": round(peer / row.floor, 2) if peer else None,
        "better": "lower",
        "peer": round(peer, 2) if peer else None,
        "peer_name": best or ("quoted" if row.quoted else "none"),
        "roof": round(roof, 2),
        "of_roof": round(100 * roof / ours, 1),
        "error": errors.get("seekforge"),
        "peers": {name: round(us, 2) for name, us in taken.items()},
        "notes": notes,
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """One line a row, for people."""
    lines = [
        f"{'row':44s} {'us':>8s} {'roof':>8s} {'% roof':>7s} {'peer':>8s} {'x peer':>7s} "
        f"{'floor':>8s}      error"
    ]
    for r in results:
        peer = f"{r['peer']:8.1f} {r['peer'] / r['value']:7.2f}" if r["peer"] else f"{'-':>8s}" * 2
        met = r["floor"] is None or (r["value"] <= r["floor"]) == (r["better"] == "lower")
        floor = f"{r['floor']:8.2f} {'met' if met else 'NO '}" if r["floor"] else f"{'-':>12s}"
        error = f"{r['error']:.1e}" if r["error"] is not None else "-"
        notes = " ".join(f"{k}: {v};" for k, v in r["notes"].items())
        lines.append(
            f"{r['row']:44s} {r['value']:8.2f} {r['roof']:8.2f} {r['of_roof']:7.1f} {peer} "
            f"{floor} {error} {r['peer_name']} {notes}"
        )
    return "\n".join(lines)


def bench_kernels(
    peers: Path | None = None,
    only: str = "",
    show: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Runs the rows whose name contains `only`, and returns one dict for each.

    Raises InputError without a CUDA GPU, or where `peers` holds no adapters.
    """
    from seekforge.compile.bench_attention import attention_rows

    if not torch.cuda.is_available():
        raise InputError("no CUDA GPU here: the kernels' benchmark needs one")
    module = load_peers(peers)
    ceilings = measure_ceilings()
    show(
        f"{torch.cuda.get_device_name()}: copy {ceilings.copy / 1e12:.2f} TB/s, "
        f"bf16 matmul {ceilings.matmul / 1e12:.0f} TFLOP/s; "
        f"peers: {'none given' if peers is None else peers}"
    )
    results = []
    for make in attention_rows(module):
        row = make()
        if only in row.name:
            results.append(run_row(row, ceilings))
            show(table(results[-1:]).split("\n")[1])
        del row
        torch.cuda.empty_cache()
    compare_quantised(results)
    return results


def compare_quantised(results: list[dict[str, Any]]) -> None:
    """Turns rows over INT8 and FP8 pools into speed-ups over the same row in bf16."""
    plain = {r["row"]: r["value"] for r in results}
    for r in results:
        base, _, kind = r["row"].rpartition(" ")
        if kind in ("int8", "fp8") and base in plain:
            r |= {
                "us": r["value"],
                "value": round(plain[base] / r["value"], 3),
                "unit": "x own bf16",
                "floor": 1.75,
                "better": "higher",
                "peer": None,
                "peer_name": f"own bf16 {plain[base]} us",
            }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", type=Path, help="folder with peers.py, adapters to peers")
    parser.add_argument("--json", type=Path, help="write the rows there, a list of objects")
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    options = parser.parse_args(arguments)
    try:
        results = bench_kernels(options.peers, options.rows)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0
