"""The steps of a build: progress while they run, seconds and peak memory when they are done.

The expected time of a step is what it took in the last build of a model of that shape, kept in the
cache folder.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from seekforge.models.default import user_cache


class Steps:
    """Runs named steps. `done` is the manifest's list of {"name", "seconds", "peak_bytes"}, with
    "reused" in those that were not done again: where their result came from."""

    def __init__(self, subject: str, console: Console | None = None) -> None:
        """subject: what durations are remembered for, such as "llama 30x576 float32"."""
        self.subject = subject
        self.console = console or Console(stderr=True)
        self.done: list[dict[str, Any]] = []
        self.running = "start"  # the step that runs, or the last that ran

    @contextmanager
    def step(self, name: str, detail: str = "") -> Iterator[None]:
        """Shows `name`, elapsed and expected seconds while the body runs, then one line."""
        self.running = name
        expected = durations(self.subject).get(name)
        hint = f" (expected {expected:.0f} s)" if expected and expected >= 1 else ""
        _reset_peak()
        children = _children_peak()
        start = time.perf_counter()
        with Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        ) as bar:
            bar.add_task(f"{name}{hint}", total=None)
            yield
        seconds, peak = time.perf_counter() - start, peak_bytes()
        if _children_peak() != children:  # a process of this step was the largest so far
            peak = max(peak, _children_peak())
        self.done.append({"name": name, "seconds": round(seconds, 3), "peak_bytes": peak})
        _remember(self.subject, name, seconds)
        self.console.print(
            f"  {name:<34} {seconds:7.1f} s   peak {peak / 2**30:5.2f} GiB   {detail}".rstrip(),
            highlight=False,
        )

    def reused(self, name: str, detail: str) -> None:
        """Shows and keeps that a step was not done again; what it takes stays as it is known."""
        self.done.append(
            {"name": name, "seconds": 0.0, "peak_bytes": peak_bytes(), "reused": detail}
        )
        self.console.print(f"  {name:<34}   reused   {detail}", highlight=False)


def peak_bytes() -> int:
    """Peak resident memory of this process since the step began (since its start where the OS can't
    tell)."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _children_peak() -> int:
    """Peak resident memory of the largest child process that has ended."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def _reset_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: resets VmHWM
    except OSError:
        return


def _durations_file() -> Path:
    return user_cache() / "durations.json"


def durations(subject: str) -> dict[str, float]:
    """Seconds that each step took in the last build of `subject`; empty where none is known."""
    try:
        known = json.loads(_durations_file().read_text())[subject]
        return {name: float(seconds) for name, seconds in known.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _remember(subject: str, name: str, seconds: float) -> None:
    path = _durations_file()
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        known = {}
    known.setdefault(subject, {})[name] = round(seconds, 2)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{time.monotonic_ns()}")
        temporary.write_text(json.dumps(known, indent=1, sort_keys=True))
        temporary.replace(path)
    except OSError:
        return  # a read-only cache costs the next build its estimate, nothing else
