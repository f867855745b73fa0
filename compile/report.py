"""report.html of an engine directory: what was built, how, and how well, on one page.

In: an engine directory, and what `Recorder` saw of its graphs. Out: one file without links to
others: style, script and data are inside; it opens without network. It is not listed in the
manifest: an engine loads without it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from seekforge.compile.check_outcomes import outcomes
from seekforge.compile.report_accuracy import accuracy
from seekforge.compile.report_costs import costs
from seekforge.compile.report_graphs import Recorder
from seekforge.compile.report_html import Html, tag
from seekforge.compile.report_lowered import lowered_items
from seekforge.compile.report_quantisation import quantisation
from seekforge.compile.report_sections import (
    backend,
    files,
    head,
    limits,
    passes,
    verdict,
)
from seekforge.compile.report_walk import walk
from seekforge.passes.program import Program
from seekforge.runtime.manifest import Manifest, read_manifest

REPORT_NAME = "report.html"
HERE = Path(__file__).parent
SCRIPTS = ("report_theme.js", "report_rows.js", "report_walk.js")
# Nothing is fetched: neither by us nor by anything that a name in the data might smuggle in.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_GRAPHS = re.compile(r'<script type="application/json" id="graphs">(.*?)</script>', re.S)


def write_report(folder: Path, recorder: Recorder, program: Program, console: Console) -> None:
    """Writes the page of an engine that is finished but for it; program: its last graph."""
    try:
        manifest = read_manifest(folder, check_files=False)
        recorder.lowered = lowered_items(folder, manifest, program)
        _write(folder, recorder.data())
    except Exception as error:
        # Nobody loses an engine that took an hour and is proven for a page about it.
        console.print(f"    no {REPORT_NAME}: {type(error).__name__}: {error}", style="yellow",
                      highlight=False, markup=False)  # fmt: skip


def rewrite_report(folder: Path) -> Path:
    """The same again, of an engine that was built earlier; the graphs come from its old page.
    Raises EngineError where `folder` is no engine."""
    page = folder / REPORT_NAME
    found = _GRAPHS.search(page.read_text(encoding="utf-8")) if page.is_file() else None
    return _write(folder, json.loads(found[1]) if found else {})


def _write(folder: Path, graphs: Mapping[str, Any]) -> Path:
    manifest = read_manifest(folder, check_files=False)
    predicted = outcomes(folder) if manifest.predicted is not None else []
    path = folder / REPORT_NAME
    path.write_text(page(manifest, graphs, predicted), encoding="utf-8")
    return path


def page(manifest: Manifest, graphs: Mapping[str, Any], predicted: list[dict[str, Any]]) -> str:
    """The whole text. predicted: rows of `outcomes`."""
    name = Path(manifest.model.get("checkpoint", manifest.model["model_type"])).name
    sections = [
        verdict(manifest), walk(graphs), passes(manifest), accuracy(manifest),
        quantisation(manifest), costs(manifest, predicted), backend(manifest), limits(manifest),
        files(manifest),
    ]  # fmt: skip
    shown = [part for part in sections if part is not None]
    # "<" can't stand in it: a name with "</script>" would end the element.
    data = json.dumps(graphs, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    body = tag(
        "body",
        tag("a", "Skip to the content", href="#main", class_="skip"),
        tag("header", head(manifest, name),
            tag("button", "Dark", type="button", id="theme", hidden=True)),
        tag("nav", tag("ul", *map(_entry, shown)), aria_label="Sections"),
        tag("main", *shown, id="main"),
        tag("footer", f"Written by seekforge {manifest.seekforge_version} from the engine's "
            "manifest and the graphs that its build recorded."),
        tag("script", Html(data), type="application/json", id="graphs"),
        tag("script", Html("\n".join(map(_own, SCRIPTS)))),
    )  # fmt: skip
    top = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("title", f"{name}, {manifest.backend}: engine report"),
        tag("style", Html(_own("report.css"))),
    )
    return f"<!doctype html>\n{tag('html', top, body, lang='en')}\n"


def _own(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _entry(part: Html) -> Html:
    """The link to a section, from its first id and heading."""
    found = re.search(r'<h2 id="(.*?)-title">(.*?)</h2>', part)
    assert found, part[:80]
    return tag("li", tag("a", Html(found[2]), href=f"#{found[1]}"))
