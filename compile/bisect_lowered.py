"""The compiled model of an engine against the final graph: operator by operator where the backend's
file can be taken apart, then as it was built.

In: the final graph with its values in every paged step, eager's logits. Out: the worst error, or
the culprit. TensorRT engines need their GPU: without it their ONNX translation is judged by ONNX
Runtime, and TensorRT itself is not.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from seekforge.compile.bisect_engine import Allowed, engine_outputs, fresh_pools
from seekforge.compile.bisect_graphs import Values
from seekforge.compile.bisect_inductor import layer_culprit
from seekforge.compile.bisect_literal import judge_literally
from seekforge.compile.bisect_onnx import CutModel
from seekforge.compile.bisect_result import Culprit, Found
from seekforge.compile.onnx import write_onnx
from seekforge.compile.run_graph import output_nodes
from seekforge.compile.run_graph_weights import GraphWeights
from seekforge.compile.weights import WEIGHTS_NAME, Source, write_weights
from seekforge.passes.kv_cache import GraphInput
from seekforge.passes.program import Program, source_line
from seekforge.runtime.fit import unfit_reason
from seekforge.runtime.manifest import Manifest
from seekforge.runtime.session import open_session

MODEL_NAME = "model.onnx"


@dataclass(frozen=True, slots=True)
class Lowered:
    """One engine and all that its compiled model is judged by. eager, exact: logits of eager in the
    engine's dtype and in float32, [tokens, V]. routed: the model has experts."""

    directory: Path
    manifest: Manifest
    program: Program
    inputs: Sequence[GraphInput]
    source: Source
    weights: GraphWeights
    runs: Sequence[Values]
    eager: Tensor
    exact: Tensor
    routed: bool


def check_lowered(job: Lowered) -> tuple[float | None, str]:
    """(the worst share of its limit of anything judged, None where nothing could be; a note).
    Raises Found."""
    worst: float | None = None
    notes = []
    backend, reason = job.manifest.backend, unfit_reason(job.manifest)
    if job.manifest.form == "padded" and job.manifest.dtype == "bfloat16":
        notes.append("its ONNX is not judged (ONNX Runtime's CPU kernels have no bfloat16)")
    elif backend == "onnxruntime":
        worst = _operators(job, job.directory)
        notes.append("every operator by itself")
    elif job.manifest.form == "padded":
        with tempfile.TemporaryDirectory(prefix="seekforge-") as folder:
            weights = Path(folder) / WEIGHTS_NAME
            write_weights(job.program, job.source, weights)
            write_onnx(job.program, job.inputs, weights, Path(folder) / MODEL_NAME, backend)
            worst = _operators(job, Path(folder))
        notes.append("its ONNX, by ONNX Runtime")
    if reason is not None:
        return worst, "; ".join([*notes, f"the engine is not executed: {reason}"])
    whole = _whole(job)
    worst = whole if worst is None else max(worst, whole)
    return worst, ", ".join([*notes, "the engine as built"])


def _operators(job: Lowered, folder: Path) -> float:
    model, weights = folder / MODEL_NAME, folder / WEIGHTS_NAME
    cut = CutModel(job.program, model, weights, job.manifest.backend, job.runs[0].values)
    worst = max(cut.judge(run.inputs, run.values) for run in job.runs)
    if job.manifest.dtype == "float16":
        worst = max(worst, judge_literally(cut, job.runs[0].inputs, job.runs[0].values))
    return worst


def _whole(job: Lowered) -> float:
    """The engine's own logits in every step, one after the other on one cache."""
    session = open_session(job.directory)
    steps = [run.step for run in job.runs if run.step is not None]
    fresh_pools(steps)
    allowed = Allowed.by(job.eager, job.exact, job.routed)
    worst = 0.0
    for run, step in zip(job.runs, steps, strict=True):
        logits = engine_outputs(session, step)["logits"]
        expected = job.eager[step.rows]
        share = allowed.part(logits, job.exact[step.rows])
        worst = max(worst, share)
        if not share <= 1:
            if job.manifest.backend == "inductor":
                found = layer_culprit(job.program, job.weights, run, job.manifest.device)
                if found is not None:
                    raise Found(found)
            raise Found(_engine_culprit(job, step.name, share, expected, logits))
    return worst


def _engine_culprit(
    job: Lowered, step: str, share: float, expected: Tensor, found: Tensor
) -> Culprit:
    node, *_ = output_nodes(job.program)
    why: dict[str, Any] = {
        "onnxruntime": "every operator by itself is right: what ONNX Runtime's optimiser makes of "
        "them together is not",
        "inductor": "no layer compiled by itself is wrong: what Inductor makes of all together is",
    }
    return Culprit(
        step="lowered",
        node=node.name,
        operator=job.manifest.backend,
        layer=None,
        module="",
        source=source_line(node),
        error=share,
        limit=1.0,
        detail=f"the engine's logits in the step '{step}'; "
        + why.get(job.manifest.backend, "the engine itself is wrong"),
        tensors={"reference": expected, "found": found},
    )
