"""The report's section on memory and time: what was predicted beside what was found."""

from __future__ import annotations

from typing import Any

from seekforge.compile.report_html import Html, meter, section, table, tag
from seekforge.compile.report_text import size_text
from seekforge.runtime.manifest import Manifest
from seekforge.runtime.memory import Budget

WITHIN = 0.15  # the promise for memory
GPUS = {"of an H200": 150_754_820_096, "of 80 GiB": 85_899_345_920}


def costs(manifest: Manifest, outcomes: list[dict[str, Any]]) -> Html:
    """outcomes: rows of `check_outcomes.outcomes`; empty where nothing was predicted."""
    longest = max((step["seconds"] for step in manifest.steps), default=0) or 1
    found = {(row["what"], row["kind"]): row for row in outcomes}
    rows = []
    for step in manifest.steps:
        name = step["name"]
        memory, seconds = found.get((name, "memory")), found.get((name, "seconds"))
        rows.append([
            name, f"{step['seconds']:,.2f}", _predicted(seconds, "{:,.2f}"),
            size_text(step["peak_bytes"]), size_text(memory["predicted"]) if memory else "–",
            _error(memory), meter(step["seconds"] / longest),
        ])  # fmt: skip
    head = ["step", "seconds", "predicted", "peak memory", "predicted", "off by", "time"]
    others = [
        [row["what"], size_text(row["predicted"]), size_text(row["found"]), _error(row)]
        for row in outcomes
        if row["kind"] != "seconds" and row["what"] not in {s["name"] for s in manifest.steps}
    ]
    return section(
        "costs", "Memory and time",
        table("Steps of the build", head, rows),
        table("Sizes", ["what", "predicted", "found", "off by"], others) if others else None,
        _gpu(manifest),
    )  # fmt: skip


def _gpu(manifest: Manifest) -> Html | None:
    """Where a GPU's memory would go, by the sum of runtime/memory.py."""
    if not manifest.memory:
        return None
    weights = sum(entry.size for entry in manifest.files)
    rows = []
    for name, total in GPUS.items():
        plan = Budget.expected(total, weights, manifest.memory, manifest.limits.max_batch)
        parts = (plan.taken, plan.workspace, plan.graphs, plan.slack, max(0, plan.kv))
        tokens = max(0, plan.kv) // manifest.kv.token_bytes
        rows.append((name, *map(size_text, parts), f"{tokens:,}"))
    head = ["GPU memory", "weights, context", "workspace", "graphs", "slack", "KV cache", "tokens"]
    return table("Where a GPU's memory goes", head, rows)


def _predicted(row: dict[str, Any] | None, form: str) -> str:
    return form.format(row["predicted"]) if row else "–"


def _error(row: dict[str, Any] | None) -> str | Html:
    if row is None:
        return "–"
    good = row["kind"] != "memory" or abs(row["error"]) <= WITHIN
    return tag("span", f"{row['error']:+.1%}", class_="good-text" if good else "warn-text")
