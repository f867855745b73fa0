"""`seekforge export`: the graphs before and after the passes as text, and the account of what
fired."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from seekforge.compile.export import DTYPES, export_checkpoint
from seekforge.kernels.errors import InputError
from seekforge.models.checkpoint import open_checkpoint
from seekforge.models.families import expected_fusions
from seekforge.models.spec import check_max_len
from seekforge.passes.pipeline import run_pipeline


def write_graphs(checkpoint_path: Path, out: Path, dtype: str, max_len: int | None) -> None:
    """Writes exported.txt, ragged.txt, padded.txt and report.json (passes by form) into `out`."""
    if dtype not in DTYPES:
        raise InputError(f"--dtype {dtype}: unknown; one of {', '.join(DTYPES)}")
    checkpoint = open_checkpoint(checkpoint_path)
    length = max_len or min(2048, checkpoint.spec.max_position_embeddings)
    check_max_len(checkpoint.config, length)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"-o {out}: cannot be written ({error.strerror}); give another folder"
        ) from None
    report = {}
    for form in ("ragged", "padded"):
        program = export_checkpoint(checkpoint, dtype, length)
        (out / "exported.txt").write_text(str(program.graph))
        results, _ = run_pipeline(program, form, length, expected_fusions(checkpoint.spec))
        (out / f"{form}.txt").write_text(str(program.graph))
        report[form] = [dataclasses.asdict(result) for result in results]
    (out / "report.json").write_text(json.dumps(report, indent=2))
