"""Digests of seekforge's own source files: a result is only as good as the code that made it.

A comment counts like code. That costs a build whose heavy steps are found in the cache (their keys
look at the graph and at their own sources), and never hands out what older code made.
"""

from __future__ import annotations

import hashlib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIGITS = 12
# What only looks at engines, or reports, or runs them: it decides nothing in an engine directory.
ASIDE = (
    "compile/account*", "compile/bench*", "compile/bisect*", "compile/build_cache*",
    "compile/check*", "compile/cli.py", "compile/compare*", "compile/execute.py",
    "compile/export_report.py", "compile/failures*", "compile/inspect.py", "compile/prompts.py",
    "compile/quality.py", "compile/reference.py", "compile/report*", "compile/run_graph*",
    "compile/steps.py", "compile/verbs.py", "compile/verify*", "runtime/blocks.py",
    "runtime/detokenizer.py", "runtime/flight.py", "runtime/llm.py", "runtime/prompt.py",
    "runtime/scheduler.py", "runtime/sequence.py",
)  # fmt: skip
ALL = ("kernels/*", "models/*", "passes/*", "compile/*", "runtime/*")
# What decides the bytes of a weights file, beside the graph: reading, rounding and writing.
WEIGHTS = (
    "compile/weights.py", "kernels/int4*.py", "models/checkpoint.py", "models/fp8.py",
    "models/quantized*.py",
)  # fmt: skip


def source_digests(patterns: tuple[str, ...] = ALL) -> dict[str, str]:
    """{"passes/swiglu.py": the first digits of its sha256} for all files of the patterns that
    decide something."""
    files = sorted({file for pattern in patterns for file in ROOT.glob(pattern) if file.is_file()})
    names = {file.relative_to(ROOT).as_posix(): file for file in files}
    return {
        name: hashlib.sha256(file.read_bytes()).hexdigest()[:DIGITS]
        for name, file in names.items()
        if not any(fnmatch(name, aside) for aside in ASIDE)
    }


def sources_digest(patterns: tuple[str, ...]) -> str:
    """One digest of all files of the patterns."""
    lines = "\n".join(f"{name} {digest}" for name, digest in source_digests(patterns).items())
    return hashlib.sha256(lines.encode()).hexdigest()
