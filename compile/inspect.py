"""What an engine, a bundle, a checkpoint or a configuration is, as data and as text. Reads
manifests and headers, runs nothing; the graph of a model is exported from metadata alone."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

from seekforge.compile.account import account
from seekforge.compile.account_text import format_account, format_passes, format_unknown
from seekforge.compile.account_unknown import account_unknown, unknown_config
from seekforge.compile.quantise import format_groups
from seekforge.kernels.errors import EngineError, InputError
from seekforge.models.checkpoint import open_checkpoint
from seekforge.models.config import parse_config
from seekforge.models.families import expected_fusions
from seekforge.models.shards import has_weights
from seekforge.models.spec import ModelSpec
from seekforge.runtime.fit import unfit_reason
from seekforge.runtime.manifest import BACKENDS, MANIFEST_NAME, Manifest, read_manifest
from seekforge.runtime.memory import Budget

GPU_BYTES = (150_754_820_096, 85_899_345_920)  # as CUDA reports them: an H200, and 80 GiB


def describe(path: Path, graph: bool = False) -> dict[str, Any]:
    """{"checkpoint": …}, {"config": …}, {"engines": {name: …}}, or {"unknown": …} for a model that
    `build` refuses because no family describes it.

    graph: account for the graph after all passes too, which takes up to a minute; always done for a
    configuration without weights. Raises InputError where `path` is nothing of the kind.
    """
    if (path / MANIFEST_NAME).is_file():
        return {"engines": {path.name: _engine(read_manifest(path), path)}}
    engines = [path / name for name in BACKENDS if (path / name / MANIFEST_NAME).is_file()]
    if engines:
        return {"engines": {e.name: _engine(read_manifest(e), e) for e in engines}}
    file = path if path.suffix == ".json" else path / "config.json"
    bare = file == path or not has_weights(path)
    if file.is_file() and (bare or graph) and (unknown := unknown_config(file)):
        return {"unknown": {"path": str(path), **account_unknown(unknown)}}
    if file.is_file() and bare:
        config = parse_config(file)
        spec = ModelSpec.from_config(config).to_dict()
        return {"config": {"path": str(path), **spec, "graph": account(config)}}
    if file.is_file():
        checkpoint = open_checkpoint(path)
        stored: Counter[str] = Counter()
        for tensor in checkpoint.tensors.values():
            stored[tensor.dtype] += tensor.nbytes
        data = {
            "path": str(path),
            **checkpoint.spec.to_dict(),
            "weight_bytes": stored.total(),
            "weight_bytes_by_dtype": dict(stored.most_common()),
            "expected_fusions": expected_fusions(checkpoint.spec),
            "eos_token_ids": list(checkpoint.eos_token_ids),
            "warnings": list(checkpoint.warnings),
            "notes": list(checkpoint.notes),
        }
        if graph:
            data["graph"] = account(checkpoint.config)
        return {"checkpoint": data}
    raise InputError(
        f"{path} is neither an engine directory, nor a bundle of them, nor a checkpoint directory, "
        "nor a config.json"
    )


def _engine(manifest: Manifest, path: Path) -> dict[str, Any]:
    data = dataclasses.asdict(manifest)
    reason = unfit_reason(manifest)
    used = {spec.name for spec in manifest.inputs}
    if manifest.profiles and any(set(profile) != used for profile in manifest.profiles):
        raise EngineError(f"{path}: profiles and inputs name different tensors; build it again")
    data["runs_here"] = reason is None
    data["reason"] = reason
    data["kv"]["token_bytes"] = manifest.kv.token_bytes
    data["size"] = sum(entry.size for entry in manifest.files)
    return data


def format_description(described: dict[str, Any]) -> str:
    if "unknown" in described:
        return format_unknown(described["unknown"])
    if "engines" not in described:
        (data,) = described.values()
        lines = [f"{key:<24}{value}" for key, value in data.items() if key != "graph"]
        return "\n".join(lines + (format_account(data["graph"]) if "graph" in data else []))
    return "\n\n".join(_format_engine(name, e) for name, e in described["engines"].items())


def _format_engine(name: str, engine: dict[str, Any]) -> str:
    model, limits, kv = engine["model"], engine["limits"], engine["kv"]
    gpu = (
        f" compute capability {engine['compute_capability']}"
        if engine["compute_capability"]
        else ""
    )
    lines = [
        f"{name}: {engine['backend']} {engine['backend_version']}, {engine['dtype']}, "
        f"{engine['device']}{gpu}, {engine['form']} form, {engine['size'] / 1e6:.1f} MB",
        f"  model     {model['model_type']}, {model['num_layers']} layers, hidden "
        f"{model['hidden_size']}, {model['num_heads']} heads, {model['num_kv_heads']} KV heads, "
        f"vocabulary {model['vocab_size']}",
        f"  limits    {limits['max_len']} tokens a sequence, {limits['max_batch']} sequences, "
        f"{limits['max_chunk']} prefill tokens a step",
        f"  KV cache  blocks of {kv['block_size']}, {kv['dtype']}, "
        f"{kv['token_bytes']:,} bytes a token",
        "  runs here " + ("yes" if engine["runs_here"] else f"no: {engine['reason']}"),
    ]
    if quantization := engine["quantization"]:
        kind = "symmetric" if quantization["symmetric"] else "asymmetric"
        lines.append(
            f"  weights   {quantization['method']}, {kind}, groups of "
            f"{quantization['group_size']}, {len(quantization['tensors'])} tensors"
        )
        if quantization.get("calibration"):
            lines += [
                f"    {line}" for line in format_groups(quantization["calibration"]).split("\n")
            ]
    lines += [f"  {line}" for line in format_passes(engine["passes"])]
    if engine["memory"]:
        lines += _memory(engine)
    if engine["layers"]:
        lines.append("  layers")
        for kind, counts in engine["layers"].items():
            if kind != "table":  # `inspect --layers` shows it
                lines.append(f"    {kind}: {_counts(counts)}")
    for index, profile in enumerate(engine["profiles"]):
        lines.append(f"  profile {index}")
        for tensor, sizes in profile.items():
            if "_pool_" not in tensor or tensor in ("k_pool_0", "latent_pool_0"):
                more = " (and all other pools)" if "_pool_" in tensor else ""
                ranges = " ".join(f"{key} {sizes[key]}" for key in ("min", "opt", "max"))
                lines.append(f"    {tensor:<14} {ranges}{more}")
    receipt = engine["receipt"]
    if receipt and receipt.get("executed"):
        lines.append(
            f"  verified  max logit error {receipt['max_error']:.2e}, "
            f"mean {receipt['mean_error']:.2e}, "
            f"top-1 {receipt['top1']:.1%}, greedy tokens equal {receipt['tokens']:.1%}"
        )
    elif receipt:
        lines.append(f"  verified  not executed: {receipt['reason']}")
    lines.append("  steps")
    for step in engine["steps"]:
        peak = step["peak_bytes"] / 2**30
        lines.append(f"    {step['name']:<32}{step['seconds']:8.1f} s   peak {peak:5.2f} GiB")
    return "\n".join(lines)


def _memory(engine: dict[str, Any]) -> list[str]:
    """Where an H200's memory would go, and an 80 GB GPU's, by the sum of runtime/memory.py."""
    limits, kv = engine["limits"], engine["kv"]
    weights = sum(file["size"] for file in engine["files"])
    lines = ["  GPU memory, GiB    weights and context   workspace   graphs   slack   KV cache"]
    for total in GPU_BYTES:
        plan = Budget.expected(total, weights, engine["memory"], limits["max_batch"])
        parts = (plan.taken, plan.workspace, plan.graphs, plan.slack, max(0, plan.kv))
        columns = "".join(
            f"{part / 2**30:>{width}.2f}"
            for part, width in zip(parts, (22, 12, 9, 8, 11), strict=True)
        )
        tokens = max(0, plan.kv) // kv["token_bytes"]
        lines.append(f"    of {total / 2**30:<9.1f}{columns}   {tokens:,} tokens")
    return lines


def _counts(counts: Any) -> str:
    if isinstance(counts, dict):
        return ", ".join(f"{key} {_counts(value)}" for key, value in counts.items())
    if isinstance(counts, (list, tuple)):
        return "; ".join(_counts(item) for item in counts)
    return str(counts)
