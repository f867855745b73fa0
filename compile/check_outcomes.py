"""Predictions against what then happened, from the manifests of finished builds.

In: a folder with engines. Out: one row for each step and size: predicted, found, their ratio.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from seekforge.compile.check_text import gigabytes
from seekforge.kernels.errors import InputError
from seekforge.runtime.manifest import MANIFEST_NAME, Manifest, read_manifest

WITHIN = 0.15  # of what was predicted: the promise for memory


def outcomes(folder: Path) -> list[dict[str, Any]]:
    """{"engine", "what", "kind": "memory" | "seconds" | "size", "predicted", "found", "error"} for
    all engines below `folder`. Raises InputError where none of them has predictions."""
    rows: list[dict[str, Any]] = []
    for file in sorted(folder.rglob(MANIFEST_NAME)):
        manifest = read_manifest(file.parent, check_files=False)
        if manifest.predicted is not None:
            rows += _rows(str(file.parent.relative_to(folder)), manifest)
    if not rows:
        raise InputError(f"{folder}: no engine with predictions below it; build one there")
    return rows


def _rows(engine: str, manifest: Manifest) -> Iterator[dict[str, Any]]:
    predicted: Any = manifest.predicted
    for step in manifest.steps:
        expected = predicted["steps"].get(step["name"])
        if expected is not None and "reused" not in step:
            peak = expected["settled_bytes"] if _settled(step, manifest) else expected["peak_bytes"]
            yield _row(engine, step["name"], "memory", peak, step["peak_bytes"])
            yield _row(engine, step["name"], "seconds", expected["seconds"], step["seconds"])
    found = sum(entry.size for entry in manifest.files)
    yield _row(engine, "engine on disk", "size", predicted["engine_bytes"], found)
    activation = (manifest.layers or {}).get("activation_bytes")
    if activation and predicted["activation_bytes"]:
        largest = max(activation)
        yield _row(engine, "GPU activations", "memory", predicted["activation_bytes"], largest)


def _settled(step: dict[str, Any], manifest: Manifest) -> bool:
    """Whether it was a verification in which fp64 was asked: what is judged is then not the largest
    error against fp32."""
    receipt = manifest.receipt or {}
    asked = receipt.get("judged") != receipt.get("max_error") and manifest.dtype == "float32"
    return step["name"] == "verify" and asked


def _row(engine: str, what: str, kind: str, predicted: float, found: float) -> dict[str, Any]:
    error = found / predicted - 1 if predicted else 0.0
    return {
        "engine": engine, "what": what, "kind": kind, "predicted": predicted, "found": found,
        "error": round(error, 4),
    }  # fmt: skip


def format_outcomes(rows: list[dict[str, Any]]) -> str:
    """One table an engine, and how much of the memory was within the promise."""
    lines: list[str] = []
    for engine in dict.fromkeys(row["engine"] for row in rows):
        mine = {(row["what"], row["kind"]): row for row in rows if row["engine"] == engine}
        lines += [f"{engine}", f"  {'step':<20}{'predicted':>12}{'found':>12}{'':>8}   seconds"]
        for (what, kind), row in mine.items():
            if kind == "seconds":
                continue
            sizes = f"{gigabytes(row['predicted']):>12}{gigabytes(row['found']):>12}"
            line = f"  {what:<20}{sizes}{row['error']:>+8.1%}"
            if (what, "seconds") in mine:
                took = mine[what, "seconds"]
                line += f"   {took['predicted']:.1f} -> {took['found']:.1f}"
            lines.append(line)
    memory = [row for row in rows if row["kind"] == "memory"]
    good = sum(abs(row["error"]) <= WITHIN for row in memory)
    worst = max(memory, key=lambda row: abs(row["error"]))
    lines.append(
        f"memory within {WITHIN:.0%} in {good} of {len(memory)} predictions; worst "
        f"{worst['error']:+.1%} ({worst['engine']}, {worst['what']})"
    )
    return "\n".join(lines)
