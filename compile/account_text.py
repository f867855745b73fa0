"""The account as text: what `seekforge inspect` prints of passes and operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HEADING = f"{'passes':<18}{'expected':>8}{'found':>7}{'nodes':>16}{'ms':>9}"


def format_account(found: Mapping[str, Any]) -> list[str]:
    """The lines for the data of `account` or `account_unknown`."""
    weights = ", ".join(f"{dtype} {_gigabytes(n)}" for dtype, n in found["weight_bytes"].items())
    lines = [f"{'engine weights':<24}{weights}"]
    if "kv_token_bytes" in found:
        lines.append(f"{'KV cache':<24}{found['kv_token_bytes']:,} bytes a token in bfloat16")
    lines.append(f"{'nodes':<24}{found['nodes_exported']} exported, {found['nodes']} at the end")
    lines += format_passes(found["passes"])
    lines.append("operators left, by layer")
    for run in found["layers"]:
        lines.append(f"  {run['layers']:<10}{run['compute']:>3}: {_counted(run['operators'])}")
        if run["views"]:
            lines.append(f"             views: {_counted(run['views'])}")
    for step in found["steps"]:
        peak = step["peak_bytes"] / 2**30
        lines.append(f"{step['name']:<24}{step['seconds']:.1f} s, peak {peak:.2f} GiB")
    return lines


def format_unknown(found: Mapping[str, Any]) -> str:
    """The whole text for a model without expectations."""
    lines = [f"{key:<24}{found[key]}" for key in ("path", "model_type", "architecture")]
    if found["parameters"] is not None:
        lines.append(f"{'parameters':<24}{found['parameters']:,}")
    lines.append(f"{'can be built':<24}no: {found['refused']}")
    if found["stopped"]:
        message = found["stopped"]["message"].replace("\n", "\n  ")
        lines.append(f"stopped at {found['stopped']['step']}: {message}")
    if found["nodes"]:
        lines += format_account(found)
        lines.append("operators without a form, by backend")
        for backend, missing in found["uncovered"].items():
            said = found["uncovered"]["onnxruntime"] if backend == "tensorrt" else {}
            more = {name: what for name, what in missing.items() if said.get(name) != what}
            head = "" if missing else "none"
            if said and missing:
                head = "those of onnxruntime" + (", and" if more else "")
            lines.append(f"  {backend:<14}{head}".rstrip())
            for name, what in more.items():
                lines.append(
                    f"    {name} {what['count']}, first {what['source']}: {what['reason']}"
                )
    return "\n".join(lines)


def format_passes(passes: Sequence[Mapping[str, Any]]) -> list[str]:
    """A heading, one line for each pass, and below it its near-misses, equal reasons together."""
    lines = [HEADING]
    for result in passes:
        expected = result.get("expected")  # engines built before it was recorded have none
        mark = "   TOO FEW" if expected is not None and result["fired"] < expected else ""
        nodes = f"{result['nodes_before']} -> {result['nodes_after']}"
        lines.append(
            f"  {result['name']:<16}{'-' if expected is None else expected:>8}{result['fired']:>7}"
            f"{nodes:>16}{result['seconds'] * 1e3:>9.1f}{mark}"
        )
        for count, miss in grouped_misses(result["misses"]):
            lines.append(f"    near-miss {count} x {miss['reason']}")
            lines.append(f"      first {miss['node']} ({miss['source']})")
    return lines


def grouped_misses(misses: Sequence[Mapping[str, Any]]) -> list[tuple[int, Mapping[str, Any]]]:
    """Near-misses at one source line for one reason: how many, and the first."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for miss in misses:
        groups.setdefault((miss["source"], _numberless(miss["reason"])), []).append(miss)
    return [(len(group), group[0]) for group in groups.values()]


def _numberless(reason: str) -> str:
    """`expected aten.mul.Tensor, found linear_5` and `… linear_12` are one reason."""
    return "".join("" if letter.isdigit() else letter for letter in reason)


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
