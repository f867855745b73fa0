"""Lowering, or what an earlier lowering of the same graph left in the cache.

The key of a lowering is all that reaches the backend: the graph (build_cache_graph.py), what is
asked of it, what the weights hold where the backend builds them in, versions, the machine, and our
own sources from here on. What came before, such as the passes, shows in the graph alone: an edit
there that leaves the graph as it is costs no compilation.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from seekforge.compile.build_cache import Entry, file_entries, put, take
from seekforge.compile.build_cache_graph import graph_digest
from seekforge.compile.build_cache_request import machine, versions
from seekforge.compile.build_cache_sources import sources_digest
from seekforge.compile.lower import Lowering, lower
from seekforge.compile.weights import WEIGHTS_NAME
from seekforge.passes.kv_cache import TRACE_SIZES
from seekforge.runtime.manifest import Manifest
from seekforge.runtime.schema import decode

TENSORRT = (
    "compile/lower.py", "compile/onnx*.py", "compile/profiles.py", "compile/tensorrt*.py",
    "runtime/profiles.py", "runtime/tensorrt*.py",
)  # fmt: skip
# Backends worth keeping, with the sources that lower a graph for them. An ONNX model takes 0.1 s.
SOURCES = {
    "inductor": (
        "compile/inductor*.py", "compile/liveness.py", "compile/lower.py", "kernels/*",
    ),
    "tensorrt": TENSORRT,
    "tensorrt-rtx": TENSORRT,
}  # fmt: skip
ELSEWHERE = ("program", "inputs", "folder", "logs", "steps")  # fields the key has in another form
# Fields that a package for the CPU does not depend on: it takes any step, and its dtype is the
# graph's.
NOT_PACKAGED = ("limits", "kv", "dtype", "tensorrt")


def lower_or_reuse(
    job: Lowering, recipe: str, weights: Callable[[], None], model: str, cache: bool
) -> dict[str, Any]:
    """`lower(job)`, from the cache where it holds the result; puts it there where it does not.

    weights: puts the weights file that `recipe` stands for into the job's folder; not called where
    the cache has an engine with its own. model: whom an entry is said to be of. cache: False:
    neither looks there nor writes.
    """
    if not cache or job.backend not in SOURCES:
        weights()
        return lower(job)
    key = lowering_key(job, recipe)
    entry = take(key, job.folder)
    if entry is not None:
        if entry.weights:
            weights()
        else:
            (job.folder / WEIGHTS_NAME).unlink(missing_ok=True)  # of a killed build
        for name in entry.steps:
            job.steps.reused(name, f"from the cache ({entry.seconds:.0f} s when it was made)")
        return _decoded(entry.facts)
    weights()
    first = len(job.steps.done)
    facts = lower(job)
    done = job.steps.done[first:]
    names = sorted(_names(job.folder))
    put(
        Entry(
            key=key,
            model=model,
            backend=job.backend,
            seconds=round(sum(step["seconds"] for step in done), 1),
            steps=[step["name"] for step in done],
            weights=(job.folder / WEIGHTS_NAME).exists(),
            facts=json.loads(json.dumps(facts, default=dataclasses.asdict)),
            files=file_entries(job.folder, names),
        ),
        job.folder,
    )
    return facts


def lowering_key(job: Lowering, recipe: str) -> str:
    """sha256 of what `job` gives the backend. recipe: of the weights file."""
    package = job.backend == "inductor" and job.device == "cpu"
    without = ELSEWHERE + (NOT_PACKAGED if package else ())
    names = [field.name for field in dataclasses.fields(job) if field.name not in without]
    asked = {name: repr(getattr(job, name)) for name in names}
    parts = {
        "graph": graph_digest(job.program, job.inputs),
        "asked": asked,
        "trace": TRACE_SIZES,
        # AOTInductor's packages hold code alone.
        "weights": None if job.backend == "inductor" else recipe,
        "versions": versions(job.backend, job.device),
        "machine": machine(job.backend, job.device),
        "sources": sources_digest(SOURCES[job.backend]),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _names(folder: Path) -> list[str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [f.relative_to(folder).as_posix() for f in files if f != folder / WEIGHTS_NAME]


def _decoded(facts: dict[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(Manifest)
    return {name: decode(hints[name], value, name) for name, value in facts.items()}
