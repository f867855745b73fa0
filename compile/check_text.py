"""`seekforge check` as text."""

from __future__ import annotations

from typing import Any


def gigabytes(size: float) -> str:
    return f"{size / 2**30:,.2f} GiB" if abs(size) >= 2**30 else f"{size / 2**20:,.0f} MiB"


def format_check(report: dict[str, Any]) -> str:
    model, limits, machine = report["model"], report["limits"], report["machine"]
    gpu = machine["gpu"] or "no GPU"
    if machine["gpu"]:
        gpu += f", compute capability {machine['capability']}, {gigabytes(machine['gpu_bytes'])}"
    lines = [
        f"{report['path']}: {model['model_type']}, {model['layers']} layers, "
        f"{model['parameters']:,} parameters, {gigabytes(model['stored_bytes'])} stored",
        f"here: {gigabytes(machine['memory'])} of memory free; {gpu}, "
        f"driver {'for CUDA ' + machine['driver'] if machine['driver'] else 'none'}; "
        + ", ".join(f"{name} {version}" for name, version in machine["versions"].items()),
        f"asked for: {limits['max_batch']} sequences of {limits['max_len']:,} tokens, "
        f"{limits['max_chunk']} prefill tokens a step",
    ]
    for backend, engine in report["engines"].items():
        lines += ["", *_engine(backend, engine)]
    return "\n".join(lines)


def _engine(backend: str, engine: dict[str, Any]) -> list[str]:
    quant = f", {engine['quant']}" if engine["quant"] else ""
    verdict = "will build" if not engine["problems"] else "will not do"
    if not engine["runs_here"]:
        verdict += "; runs on another machine, with the GPU it is built for"
    lines = [f"{backend} ({engine['dtype']}{quant}, {engine['device']}): {verdict}"]
    for problem in engine["problems"]:
        lines.append(f"  missing   {problem['what']}")
        if problem["do"]:
            lines.append(f"            do: {problem['do']}")
    if "steps" in engine:
        lines += _build(engine)
    if "run" in engine:
        lines += _run(engine["run"])
    for index, profile in enumerate(engine.get("profiles", ())):
        ranges = ", ".join(
            f"{name} {sizes['min']} to {sizes['max']}" for name, sizes in profile.items()
        )
        lines.append(f"  profile {index} {ranges}")
    return lines


def _build(engine: dict[str, Any]) -> list[str]:
    lines = [f"  {'step':<22}{'memory':>12}{'seconds':>10}"]
    for name, step in engine["steps"].items():
        source = "" if step["recorded"] else " (default)"
        if step["settled_bytes"]:
            source += f"   {gigabytes(step['settled_bytes'])} if fp64 must settle it"
        gpu = f"   {gigabytes(step['device_bytes'])} on the GPU" if step["device_bytes"] else ""
        lines.append(
            f"  {name:<22}{gigabytes(step['peak_bytes']):>12}{step['seconds']:>10.1f}{source}{gpu}"
        )
    lines += [
        f"  build     {gigabytes(engine['peak_bytes'])} at most, about {engine['seconds']:.0f} s",
        f"  disk      engine {gigabytes(engine['engine_bytes'])}, while it is built "
        f"{gigabytes(engine['disk_bytes'])}; {gigabytes(engine['disk_free'])} free",
    ]
    return lines


def _run(run: dict[str, Any]) -> list[str]:
    need = (
        f"  run       weights {gigabytes(run['weights_bytes'])}, a step "
        f"{gigabytes(run['workspace_bytes'])}, KV cache {run['kv_token_bytes']:,} bytes a token"
    )
    if run["kv_tokens"] is None:
        wanted = run["weights_bytes"] + run["workspace_bytes"]
        wanted += run["wanted_tokens"] * run["kv_token_bytes"]
        more = f"            {gigabytes(wanted)} for all that was asked for; no GPU is known here: "
        return [need, more + "give its memory with --gpu-memory"]
    return [
        need,
        f"            {gigabytes(run['memory_bytes'])} of {run['device']} memory: room for "
        f"{max(0, run['kv_tokens']):,} tokens; all sequences at full length have "
        f"{run['wanted_tokens']:,}; the pool will have {run['pool_tokens']:,}",
    ]
