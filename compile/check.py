"""Pre-flight: will this build succeed here, what will it take, what will the engine hold?

In: a checkpoint or a configuration, and the build's options. Out: plain data for each backend, in
seconds and from metadata alone: what is missing, memory and time of every step, sizes, how many
tokens the KV cache will have room for. Nothing is built and no weights are read.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from seekforge.compile.bundle import tokenizer_missing
from seekforge.compile.check_costs import Plan, activation_bytes, memory_floor, predict
from seekforge.compile.check_machine import (
    Machine,
    Problem,
    free_disk,
    requirements,
    this_machine,
)
from seekforge.compile.check_model import (
    Examined,
    Subject,
    examine,
    open_subject,
    operators_without,
)
from seekforge.compile.check_run import run_memory
from seekforge.compile.check_text import gigabytes
from seekforge.compile.options import FORMS, Options
from seekforge.compile.plan import engine_dtype, int4_options, limits_of, plan_of
from seekforge.compile.profiles import make_profiles
from seekforge.compile.steps import durations
from seekforge.compile.workspace import check_workspace
from seekforge.kernels.errors import BuildError, InputError
from seekforge.models.default import resolve_checkpoint
from seekforge.runtime.manifest import KVLayout
from seekforge.runtime.profiles import profile_to_json


def check(
    path: Path, options: Options, out: Path | None = None, gpu_bytes: int | None = None
) -> dict[str, Any]:
    """{"path", "model", "machine", "engines": {backend: …}, "ok"}.

    out: where engines will be written; gpu_bytes: memory of the GPU they will run on (default: of
    this machine's). Raises InputError for a checkpoint or options that no backend takes.
    """
    floor, machine = memory_floor(options.backends), this_machine()
    subject = open_subject(path)
    limits = limits_of(subject.config, options)
    engines = {}
    for backend in options.backends:
        engines[backend] = _engine(
            subject, options, backend, machine, floor, out or Path(), gpu_bytes
        )
    return {
        "path": str(path),
        "model": {
            "model_type": subject.spec.model_type,
            "layers": subject.spec.num_layers,
            "parameters": subject.spec.parameters,
            "stored_bytes": subject.stored_bytes,
            "weights_read": False,
        },
        "limits": dataclasses.asdict(limits),
        "machine": dataclasses.asdict(machine),
        "engines": engines,
        "ok": all(not engine["problems"] for engine in engines.values()),
    }


def resolve_subject(model: str) -> Path:
    """A config.json or a folder with one is meant as it is; anything else as `build` means it."""
    path = Path(model)
    return path if path.suffix == ".json" else resolve_checkpoint(model)


def _engine(
    subject: Subject,
    options: Options,
    backend: str,
    machine: Machine,
    floor: int,
    out: Path,
    gpu_bytes: int | None,
) -> dict[str, Any]:
    dtype = engine_dtype(subject.config, options, backend)
    device = "cuda" if backend.startswith("tensorrt") else options.device
    data: dict[str, Any] = {"dtype": dtype, "device": device, "quant": options.quant}
    data["runs_here"] = _runs_here(backend, device, options.tensorrt.targets, machine)
    problems = requirements(backend, options.device, dtype, options.target, options.strip)
    plan = plan_of(subject, options, backend)
    try:
        examined = examine(
            subject, FORMS[backend], dtype, plan.limits.max_len,
            int4_options(subject.checkpoint, options), options.device,
        )  # fmt: skip
        problems += _unsupported(subject, examined, plan)
        if subject.checkpoint is not None and options.verify != "none":
            missing = tokenizer_missing(subject.path)
            problems += [Problem(missing, "add it, or build with --no-verify")] if missing else []
        problems += _profiles(plan, subject, options, data)
        _predicted(examined, plan, machine, floor, out, problems, data)
        data["run"] = run_memory(
            examined, plan, options.block_size, gpu_bytes or machine.gpu_bytes, machine.memory,
            data["activation_bytes"],
        )  # fmt: skip
        problems += _room(data["run"], plan)
    except (InputError, BuildError) as error:
        problems.append(Problem(str(error), ""))
    data["problems"] = [dataclasses.asdict(problem) for problem in problems]
    return data


def _runs_here(backend: str, device: str, targets: tuple[str, ...], machine: Machine) -> bool:
    if device == "cpu":
        return True
    return machine.gpu is not None and (backend != "tensorrt-rtx" or machine.capability in targets)


def _unsupported(subject: Subject, examined: Examined, plan: Plan) -> list[Problem]:
    """Operators that the backend has no form for, and attention it has no kernel for."""
    if FORMS[plan.backend] == "ragged":
        return []
    from seekforge.compile.onnx_translations import TRANSLATIONS

    missing = operators_without(examined.program, TRANSLATIONS)
    problems = [
        Problem(
            f"no ONNX translation for {name} ({line})",
            "build for inductor, or add it to compile/onnx_translations.py",
        )
        for name, line in missing.items()
    ]
    check_workspace(examined.program, plan.limits, plan.backend)
    size = subject.spec.head_dim
    dense = not subject.spec.kv_lora_rank
    fused = plan.backend.startswith("tensorrt") and dense and plan.dtype != "float32"
    if fused and (size % 16 or size > 256):
        problems.append(
            Problem(
                f"head_dim {size}: TensorRT has fused attention for multiples of 16 up to 256",
                "build for inductor or onnxruntime, or with --dtype float32",
            )
        )
    return problems


def _profiles(
    plan: Plan, subject: Subject, options: Options, data: dict[str, Any]
) -> list[Problem]:
    if not plan.backend.startswith("tensorrt"):
        return []
    kv = KVLayout(
        subject.spec.num_layers, options.block_size, subject.spec.kv_pools, plan.dtype, False
    )
    profiles = map(profile_to_json, make_profiles(plan.limits, kv))
    shown = ("token_ids", "block_tables")
    data["profiles"] = [{name: profile[name] for name in shown} for profile in profiles]
    return []


def _predicted(
    examined: Examined,
    plan: Plan,
    machine: Machine,
    floor: int,
    out: Path,
    problems: list[Problem],
    data: dict[str, Any],
) -> None:
    activation = activation_bytes(examined.program, examined.inputs, plan)
    prediction = predict(examined.facts, plan, floor, activation, durations(plan.subject))
    free = free_disk(out)
    data |= {
        "facts": dataclasses.asdict(examined.facts),
        "steps": prediction.steps,
        "seconds": round(prediction.seconds, 1),
        "peak_bytes": prediction.peak_bytes,
        "engine_bytes": prediction.engine_bytes,
        "disk_bytes": prediction.disk_bytes,
        "disk_free": free,
        "activation_bytes": prediction.activation_bytes,
    }
    if prediction.peak_bytes > machine.memory + floor:
        name = max(prediction.steps, key=lambda step: int(prediction.steps[step]["peak_bytes"]))
        problems.append(
            Problem(
                f"step {name!r} will take {gigabytes(prediction.peak_bytes)} of host memory; "
                f"{gigabytes(machine.memory)} are free",
                "build on a machine with more"
                + (", or leave verification out (--no-verify)" if name == "verify" else ""),
            )
        )
    on_gpu = max(step["device_bytes"] for step in prediction.steps.values())
    if machine.gpu is not None and on_gpu > machine.gpu_bytes:
        problems.append(
            Problem(
                f"the build will take {gigabytes(on_gpu)} of GPU memory; {machine.gpu} has "
                f"{gigabytes(machine.gpu_bytes)}",
                "use --quant, or build on a larger GPU",
            )
        )
    if prediction.disk_bytes > free:
        problems.append(
            Problem(
                f"the build will write {gigabytes(prediction.disk_bytes)}; "
                f"{gigabytes(free)} are free in {out.resolve()}",
                "free some, or give another folder with -o",
            )
        )


def _room(run: dict[str, Any], plan: Plan) -> list[Problem]:
    if run["kv_tokens"] is None or run["kv_tokens"] >= plan.limits.max_len:
        return []
    return [
        Problem(
            f"{gigabytes(run['memory_bytes'])} hold {gigabytes(run['weights_bytes'])} of weights "
            f"and then {max(0, run['kv_tokens']):,} tokens of KV cache; one sequence of "
            f"{plan.limits.max_len:,} does not fit",
            "use --quant, a smaller --max-len, or a larger machine",
        )
    ]
