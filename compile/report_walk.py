"""The walk through the lowering: what report.js fills, and the same as tables, without script."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from seekforge.compile.report_html import Html, section, table, tag

EMPTY = "This engine has no record of its graphs: it was built before reports were written."


def walk(graphs: Mapping[str, Any]) -> Html:
    """graphs: the data of `Recorder`; empty where there is none."""
    if not graphs.get("kinds"):
        return section("lowering", "Lowering", tag("p", EMPTY))
    return section(
        "lowering", "Lowering",
        tag("p", "From transformers' source lines through every pass to what the backend runs. "
            "Layers that went through the same are shown once. Arrow keys: ← → passes, ↑ ↓ "
            "layers; in the graph, nodes.", class_="note"),
        _skeleton(),
        tag("details", tag("summary", "The same as tables"),
            *(_as_table(kind, graphs) for kind in graphs["kinds"]), id="walk-tables", open=True),
    )  # fmt: skip


def _skeleton() -> Html:
    def key(state: str, mark: str, word: str) -> Html:
        return tag("span", tag("span", mark, class_=f"key {state}", aria_hidden="true"), f" {word}")

    strip = tag(
        "div",
        tag("button", "‹", type="button", id="previous", aria_label="Previous pass"),
        tag("div", id="steps", role="tablist", aria_label="Passes"),
        tag("button", "›", type="button", id="next", aria_label="Next pass"),
        class_="strip",
    )
    legend = tag(
        "div",
        tag("span", id="what", role="status", aria_live="polite"),
        key("gone", "−", "gone"), key("came", "+", "new"), key("changed", "~", "reads another"),
        tag("button", "Show unchanged nodes", type="button", id="unfold", aria_pressed="false"),
        class_="legend",
    )  # fmt: skip
    columns = tag(
        "div",
        tag("h3", id="before-title"), tag("h3", id="after-title"),
        tag("ol", id="before", aria_labelledby="before-title"),
        tag("svg", id="lines", aria_hidden="true", preserveAspectRatio="none"),
        tag("ol", id="after", aria_labelledby="after-title"),
        id="columns", role="tabpanel", aria_label="Graph before and after",
    )  # fmt: skip
    return tag(
        "div",
        tag("div", id="kinds", role="tablist", aria_label="Layers", aria_orientation="vertical"),
        tag("div", strip, legend, columns, class_="panel"),
        tag("div", id="detail", role="region", aria_label="Chosen node"),
        id="walk", hidden=True,
    )  # fmt: skip


def _as_table(kind: Mapping[str, Any], graphs: Mapping[str, Any]) -> Html:
    title = f"Layers {kind['layers']}" if kind["count"] > 1 else f"Layer {kind['layers']}"
    rows: list[tuple[str, ...]] = []
    before: list[int] = []
    for step in kind["steps"]:
        nodes = step.get("nodes", before)
        gone, came = _names(before, graphs), _names(nodes, graphs)
        left = [gone[name] for name in gone if name not in came] if rows else []
        new = [came[name] for name in came if name not in gone] if rows else []
        rows.append((step["name"], _counted(left), _counted(new), f"{len(nodes):,}"))
        before = nodes
    for lowered in kind["lowered"]:
        items = [what for _, what in lowered["items"]]
        rows.append((lowered["title"], "", _counted(items), f"{len(items):,}"))
    head = ["pass", "operators gone", "operators new", "nodes"]
    return table(title if kind["layers"] else "Outside the layers", head, rows, left=3)


def _names(nodes: list[int], graphs: Mapping[str, Any]) -> dict[str, str]:
    return {graphs["nodes"][at][0]: graphs["nodes"][at][1] for at in nodes}


def _counted(operators: list[str]) -> str:
    counts = Counter(operators).most_common()
    return ", ".join(name if count == 1 else f"{name} × {count}" for name, count in counts)
