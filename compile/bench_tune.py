"""Finds the fastest configuration of each shape class, and keeps it in kernels/h200.json.

A tuner is a row of the benchmark with a space of configurations. All of them are checked and timed
as the row's candidates are (bench_kernels.py), beside the configuration in use; those that fail or
are wrong drop out. Only a gain above the noise of a run replaces a row of the file.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seekforge.compile.bench_kernels import FAMILIES, Row, Timed, family, start, time_row
from seekforge.kernels import tuning
from seekforge.kernels.errors import InputError

NOISE = 0.01  # a share of the time by which another configuration must be faster


@dataclass(frozen=True, slots=True)
class Tuner:
    """op, key: the operator's name in the file, and the values that name the shape class there.

    space: configurations, flat dicts or dataclasses of the values a row of the file has beside
    its key. row: the benchmark's row with a candidate for each named configuration and no peers;
    None is the one in use.
    """

    op: str
    key: Mapping[str, Any]
    row: Callable[[Mapping[str, Any]], Row]
    space: Sequence[Any]


def tune(
    tuners: Iterable[Tuner],
    only: str = "",
    show: Callable[[str], None] = print,
    path: Path = tuning.PATH,
    time: Callable[[Row], Timed] = time_row,
) -> list[dict[str, Any]]:
    """Times the rows whose name contains `only`; returns one dict for each and writes the file."""
    results = []
    for tuner in tuners:
        named = {str(i): config for i, config in enumerate(tuner.space)}
        row = tuner.row({"now": None, **named})
        if only not in row.name:
            continue
        timed = time(row)
        now = timed.taken.get("now")
        found = min(named, key=lambda name: timed.taken.get(name, math.inf), default="")
        best = timed.taken.get(found, math.inf)
        better = best < math.inf if now is None else best < now * (1 - NOISE)
        if better:
            content = json.loads(path.read_text(encoding="utf-8"))
            put(content, tuner.op, tuner.key, as_values(named[found]))
            path.write_text(dump(content), encoding="utf-8")
        results.append(
            {
                "row": row.name,
                "op": tuner.op,
                "key": dict(tuner.key),
                "old": now,
                "new": best if better else now,
                "config": as_values(named[found]) if better else None,
                "tried": len(named),
                "failed": {n: timed.notes.get(n) for n in named if n not in timed.taken},
            }
        )
        show(line(results[-1]))
    return results


def tune_kernels(only: str = "", show: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """All tuners of the benchmark's families, on this GPU.

    Raises InputError without a CUDA GPU, or where the file can't be written.
    """
    if not os.access(tuning.PATH, os.W_OK):
        raise InputError(f"{tuning.PATH} can't be written; tune in a checkout of the repository")
    start(None, show)
    return tune((t for name in FAMILIES for t in getattr(family(name), "TUNERS", ())), only, show)


def line(result: Mapping[str, Any]) -> str:
    """One line for people: old and new time, and the configuration that was written."""
    old, new = (f"{us:8.2f}" if us else f"{'-':>8s}" for us in (result["old"], result["new"]))
    kept = json.dumps(result["config"]) if result["config"] else "kept"
    failed = f", {len(result['failed'])} of {result['tried']} failed" if result["failed"] else ""
    return f"{result['row']:44s} {old} -> {new} us  {kept}{failed}"


def as_values(config: Any) -> dict[str, Any]:
    """A configuration as the flat object it is in the file."""
    return dataclasses.asdict(config) if dataclasses.is_dataclass(config) else dict(config)  # type: ignore[arg-type]


def put(
    content: dict[str, list[dict[str, Any]]],
    op: str,
    key: Mapping[str, Any],
    values: Mapping[str, Any],
) -> None:
    """Replaces the row of this key, or puts one at the front: a table's last row is its default."""
    rows = content.setdefault(op, [])
    made = {**key, **values}
    for i, row in enumerate(rows):
        if all(row.get(name) == value for name, value in key.items()):
            rows[i] = {**row, **made}
            return
    rows.insert(0, made)


def dump(content: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """JSON with one line for each row."""
    tables = (
        f" {json.dumps(op)}: [\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]"
        for op, rows in content.items()
    )
    return "{\n" + ",\n".join(tables) + "\n}\n"
