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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from seekforge.compile.bench_floors import Floors, bound, table
from seekforge.kernels.errors import InputError

ROTATE_BYTES = 240e6  # four times the L2 of an H200
WRONG = 3e-2  # relative error above which a result is not timed
ROUNDS, WARM_UP, REPLAYS = 3, 10, 20
FAMILIES = (
    "linear",
    "int4",
    "attention",
    "moe",
    "elementwise",
    "sampling",
)  # bench_<name>.py, in order

Calls = Sequence[Callable[[], Any]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """check: one call's result, compared with the row's reference; calls: one for each copy."""

    name: str
    check: Callable[[], Tensor]
    calls: Calls


@dataclass(frozen=True, slots=True)
class Row:
    """nbytes, flops: of one call. quoted: us measured elsewhere, for where peers are absent: the
    best peer's, or by peers' names. floor: see bench_floors.py; a number is the multiple of the
    best peer's speed demanded."""

    name: str
    reference: Tensor
    nbytes: float
    flops: float
    floor: Floors
    quoted: float | Mapping[str, float] | None
    candidates: Callable[[], Iterator[Candidate]]
    notes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Timed:
    """Of a row's candidates by name: us of one call, errors, and why the others were not timed."""

    taken: dict[str, float]
    errors: dict[str, float]
    notes: dict[str, str]


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


def time_row(row: Row) -> Timed:
    """Times a row's candidates, those that are right."""
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
    return Timed(time_graphs(graphs), errors, notes | row.notes)


def run_row(
    row: Row, ceilings: Ceilings, earlier: Mapping[str, float | None] | None = None
) -> dict[str, Any]:
    """Times a row: our candidate is `seekforge`, the others are peers. earlier: us by row."""
    return result(row, ceilings, time_row(row), earlier or {})


def result(
    row: Row, ceilings: Ceilings, timed: Timed, earlier: Mapping[str, float | None]
) -> dict[str, Any]:
    """The object of one row, of what was measured."""
    taken = dict(timed.taken)
    roof = 1e6 * max(row.nbytes / ceilings.copy, row.flops / ceilings.matmul)
    ours = taken.pop("seekforge", None)
    quoted = row.quoted if isinstance(row.quoted, Mapping) else {"quoted": row.quoted}
    peers = taken or {name: us for name, us in quoted.items() if us}
    best = min(peers, key=lambda name: peers[name], default=None)
    peer = peers[best] if best else None
    name = f"{best} (quoted)" if best not in (None, "quoted", *taken) else best
    floor, missing = bound(row.floor, {**earlier, **quoted, **taken, "peer": peer, "roof": roof})
    return {
        "row": row.name,
        "value": None if ours is None else round(ours, 2),
        "unit": "us",
        "floor": None if floor is None else round(floor, 2),
        "better": "lower",
        "peer": None if peer is None else round(peer, 2),
        "peer_name": name or "none",
        "roof": round(roof, 2),
        "of_roof": None if ours is None else round(100 * roof / ours, 1),
        "error": timed.errors.get("seekforge"),
        "peers": {name: round(us, 2) for name, us in taken.items()},
        "notes": timed.notes | missing,
    }


def start(peers: Path | None, show: Callable[[str], None]) -> Ceilings:
    """Measures the ceilings and says so. Raises InputError without a CUDA GPU."""
    if not torch.cuda.is_available():
        raise InputError("no CUDA GPU here: the kernels' benchmark needs one")
    ceilings = measure_ceilings()
    show(
        f"{torch.cuda.get_device_name()}: copy {ceilings.copy / 1e12:.2f} TB/s, "
        f"bf16 matmul {ceilings.matmul / 1e12:.0f} TFLOP/s; "
        f"peers: {'none given' if peers is None else peers}"
    )
    return ceilings


def family(name: str) -> ModuleType:
    """One of FAMILIES: it has <name>_rows(peers), and TUNERS (see bench_tune.py)."""
    return importlib.import_module(f"seekforge.compile.bench_{name}")


def bench_kernels(
    peers: Path | None = None,
    only: str = "",
    show: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Runs the rows whose name contains `only`, and returns one dict for each.

    Raises InputError without a CUDA GPU, or where `peers` holds no adapters.
    """
    module = load_peers(peers)
    ceilings = start(peers, show)
    results: list[dict[str, Any]] = []
    for name in FAMILIES:
        for make in getattr(family(name), f"{name}_rows")(module):
            row = make()
            if only in row.name:
                earlier = {r["row"]: r["value"] for r in results}
                results.append(run_row(row, ceilings, earlier))
                show(table(results[-1:]).split("\n")[1])
            del row
            torch.cuda.empty_cache()
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", type=Path, help="folder with peers.py, adapters to peers")
    parser.add_argument("--json", type=Path, help="write the rows there, a list of objects")
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    parser.add_argument("--tune", action="store_true", help="refresh kernels/h200.json instead")
    options = parser.parse_args(arguments)
    try:
        if options.tune:
            from seekforge.compile.bench_tune import tune_kernels

            results = tune_kernels(options.rows)
        else:
            results = bench_kernels(options.peers, options.rows)
            print(table(results))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0
