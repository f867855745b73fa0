"""Demands on a row of the kernel benchmark, and the table of results. Knows nothing about GPUs.

A floor is a multiple of a known speed: of the best peer, of the roof, of one peer by name, or of an
earlier row (INT8 against bf16). As a time it is that time divided by `times`; a row with several
floors must be below the smallest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Floor:
    """times: how many times the speed of `of`, which is "peer" (the best one), "roof" (there
    `times` is a share, as 0.9), the name of a peer, or the name of a row that was run before."""

    times: float
    of: str = "peer"


Floors = float | Floor | tuple[Floor, ...] | None


def as_floors(floors: Floors) -> tuple[Floor, ...]:
    """A plain number is a multiple of the best peer; None demands nothing."""
    if floors is None:
        return ()
    if isinstance(floors, Floor):
        return (floors,)
    return floors if isinstance(floors, tuple) else (Floor(floors),)


def bound(floors: Floors, known: Mapping[str, float | None]) -> tuple[float | None, dict[str, str]]:
    """The largest time allowed, and a note for each floor that can't be judged here.

    known: times by what a floor may be a multiple `of`; None or missing: not measured.
    """
    times, notes = [], {}
    for floor in as_floors(floors):
        other = known.get(floor.of)
        if other is None:
            notes[f"floor {floor.times:g} x {floor.of}"] = "not measured here"
        else:
            times.append(other / floor.times)
    return min(times, default=None), notes


def met(result: Mapping[str, Any]) -> bool | None:
    """Whether a result reaches its floor; None where it has none, False without a value."""
    if result["floor"] is None:
        return None
    if result["value"] is None:
        return False
    return bool(
        result["value"] <= result["floor"]
        if result["better"] == "lower"
        else result["value"] >= result["floor"]
    )


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """One line a row, for people."""
    lines = [
        f"{'row':44s} {'us':>8s} {'roof':>8s} {'% roof':>7s} {'peer':>8s} {'x peer':>7s} "
        f"{'floor':>8s}      error"
    ]
    for r in results:
        value, peer = r["value"], r["peer"]
        ratio = peer / value if peer and value else None
        notes = " ".join(f"{k}: {v};" for k, v in r["notes"].items())
        lines.append(
            f"{r['row']:44s} {_number(value, 8, 2)} {_number(r['roof'], 8, 2)} "
            f"{_number(r['of_roof'], 7, 1)} {_number(peer, 8, 1)} {_number(ratio, 7, 2)} "
            f"{_number(r['floor'], 8, 2)} { ({None: '', True: 'met', False: 'NO'}[met(r)]):3s} "
            f"{'-' if r['error'] is None else format(r['error'], '.1e')} {r['peer_name']} {notes}"
        )
    return "\n".join(lines)


def _number(value: float | None, width: int, places: int) -> str:
    return f"{'-':>{width}s}" if value is None else f"{value:{width}.{places}f}"
