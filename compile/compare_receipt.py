"""A comparison's receipt in the manifest of every engine that took part.

The build's own receipt keeps its fields; the last comparison stands beside them as "compared".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from seekforge.compile.compare_result import Comparison, EngineResult
from seekforge.runtime.manifest import read_manifest, write_manifest


def write_receipts(comparison: Comparison, directories: Sequence[Path]) -> list[str]:
    """directories: the engines', in the order of the comparison's. Returns a warning for each whose
    manifest can't be written: the comparison holds all the same."""
    warnings = []
    for row, directory in zip(comparison.engines, directories, strict=True):
        manifest = read_manifest(directory, check_files=False)
        receipt = dict(manifest.receipt or {}) | {"compared": _receipt(comparison, row)}
        try:
            write_manifest(directory, dataclasses.replace(manifest, receipt=receipt))
        except OSError as error:
            warnings.append(f"{directory}: no receipt written ({error.strerror})")
    return warnings


def _receipt(comparison: Comparison, row: EngineResult) -> dict[str, Any]:
    whole = comparison.to_dict()
    shared = ("checkpoint", "judge", "device", "prompts", "positions", "text_tokens")
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        **{key: whole[key] for key in shared},
        "judge_perplexity": whole["perplexity"],
        **row.to_dict(),
        "passed": row.passed and comparison.perplexity_passed(row),
    }
