"""A program and its weights file to the files of one backend, and the manifest's facts of them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from seekforge.compile import inductor, liveness, onnx, profiles, tensorrt
from seekforge.compile.onnx_nodes import OnnxNodes
from seekforge.compile.steps import Steps
from seekforge.compile.tensorrt_config import TIMING_CACHE
from seekforge.compile.tensorrt_options import TensorRTOptions
from seekforge.compile.tensorrt_plan import keep_plan, plan_digest
from seekforge.compile.tensorrt_table import layer_table
from seekforge.compile.weights import WEIGHTS_NAME
from seekforge.passes.kv_cache import GraphInput
from seekforge.passes.program import Program
from seekforge.runtime.manifest import KVLayout, Limits
from seekforge.runtime.profiles import Profile, profile_to_json

MODEL_NAME = "model.onnx"
ENGINE_NAME = "model.engine"


@dataclass(frozen=True, slots=True)
class Lowering:
    """One engine to be made. folder: holds the weights file, and gets the backend's files.

    logs: folder for the backend's own log.
    """

    backend: str
    program: Program
    inputs: list[GraphInput]
    folder: Path
    dtype: str
    device: str
    limits: Limits
    kv: KVLayout
    tensorrt: TensorRTOptions
    logs: Path
    steps: Steps


def lower(job: Lowering) -> dict[str, Any]:
    """Writes the backend's files; returns fields of the manifest. Raises BuildError."""
    if job.backend == "inductor":
        return _inductor(job)
    if job.backend == "onnxruntime":
        return _onnxruntime(job)
    return _tensorrt(job)


def _inductor(job: Lowering) -> dict[str, Any]:
    with job.steps.step("compile"):
        inductor.lower_inductor(job.program, job.inputs, job.device, job.folder)
    capability, memory = None, None
    if job.device == "cuda":
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        memory = liveness.step_bytes(job.program, job.inputs, job.limits)
    return {
        "backend_version": torch.__version__,
        "device": job.device,
        "compute_capability": capability,
        "memory": memory,
    }


def _write_onnx(job: Lowering) -> Any:
    with job.steps.step("ONNX"):
        return onnx.write_onnx(
            job.program, job.inputs, job.folder / WEIGHTS_NAME, job.folder / MODEL_NAME,
            job.backend,
        )  # fmt: skip


def _onnxruntime(job: Lowering) -> dict[str, Any]:
    import onnxruntime

    counts: dict[str, int] = {}
    for node in _write_onnx(job).graph.node:
        counts[node.op_type] = counts.get(node.op_type, 0) + 1
    return {
        "backend_version": onnxruntime.__version__,
        "device": job.device,
        "compute_capability": None,
        "layers": {"onnx": dict(sorted(counts.items(), key=lambda item: -item[1]))},
    }


def _tensorrt(job: Lowering) -> dict[str, Any]:
    _write_onnx(job)
    rtx = job.backend == "tensorrt-rtx"
    options = job.tensorrt if rtx else dataclasses.replace(job.tensorrt, targets=())
    ranges = profiles.make_profiles(job.limits, job.kv)
    digest, facts = None, None
    if options.strip:
        digest = plan_digest(job.folder / MODEL_NAME, job.backend, ranges, options)
        facts = keep_plan(job.logs / job.backend, digest, job.folder / ENGINE_NAME)
    if facts is None:
        facts = _built(job, options, ranges)
    else:
        job.steps.console.print("    plan kept: only weights are new", highlight=False)
    if not options.strip:  # the engine holds its own copy; the ONNX files were only the way there
        (job.folder / MODEL_NAME).unlink()
        (job.folder / WEIGHTS_NAME).unlink()
    kept = {"plan": digest, "stripped": options.strip, "streaming_bytes": options.streaming_bytes}
    return {**facts, "device": "cuda", "tensorrt": kept}


def _built(job: Lowering, options: TensorRTOptions, ranges: list[Profile]) -> dict[str, Any]:
    model = job.folder / MODEL_NAME
    with job.steps.step(f"{job.backend} build"):
        result = tensorrt.build_tensorrt(
            model,
            job.folder / ENGINE_NAME,
            product=job.backend,
            profiles=ranges,
            options=options,
            log_path=job.logs / f"{job.backend}.log",
            timing_path=job.logs / TIMING_CACHE if job.backend == "tensorrt" else None,
            allow_unfused_attention=job.dtype == "float32",
        )
    table = layer_table(result.compiled, OnnxNodes(model), job.program, len(ranges))
    return {
        "backend_version": result.backend_version,
        "compute_capability": ",".join(options.targets) or None,
        "layers": {**result.layers, "table": table},
        "profiles": tuple(profile_to_json(profile) for profile in ranges),
        "inputs": result.inputs,
        "outputs": result.outputs,
    }
