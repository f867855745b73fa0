"""The report's sections that are tables of the manifest: what was built, passes, accuracy, costs,
limits, files. In: a manifest. Out: HTML that needs no script."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seekforge.compile.account_text import grouped_misses
from seekforge.compile.report_accuracy import error_size, judgement, proven, shown_receipt
from seekforge.compile.report_html import Html, meter, pairs, section, table, tag
from seekforge.compile.report_text import amount_text, cell, size_text
from seekforge.runtime.manifest import Manifest


def head(manifest: Manifest, name: str) -> Html:
    """Title and one line of what it is."""
    quant = manifest.quantization
    kind = [
        f"{manifest.backend} {manifest.backend_version}", manifest.device,
        manifest.compute_capability and f"compute capability {manifest.compute_capability}",
        manifest.dtype, quant and f"{quant['method']}, groups of {quant['group_size']}",
        f"{manifest.form} form",
    ]  # fmt: skip
    model = manifest.model
    what = (f"{model['model_type']}, {model['num_layers']} layers, "
            f"{amount_text(model['parameters'])} parameters")  # fmt: skip
    line = " · ".join(str(part) for part in kind if part)
    return tag("div", tag("h1", name), tag("p", what), tag("p", line))


def verdict(manifest: Manifest) -> Html:
    fired = _expected(manifest)
    level, word, sentence = judgement(manifest)
    first, last = manifest.passes[0], manifest.passes[-1]
    size = sum(entry.size for entry in manifest.files)
    receipt = shown_receipt(manifest)
    found = sum(passed["fired"] for passed in fired)
    wanted = sum(passed["expected"] for passed in fired)
    tiles = [
        ("fusions found", f"{found:,}" if fired else "–",
         f"of {wanted:,} expected" if fired else "nothing was expected"),
        ("graph nodes", f"{last['nodes_after']:,}", f"from {first['nodes_before']:,} exported"),
        ("engine", size_text(size), f"{len(manifest.files)} files"),
        ("KV cache", size_text(manifest.kv.token_bytes), f"a token, in {manifest.kv.dtype}"),
        ("built in", f"{sum(s['seconds'] for s in manifest.steps):,.1f} s",
         f"peak {size_text(max((s['peak_bytes'] for s in manifest.steps), default=0))}"),
    ]  # fmt: skip
    worst = max(proven(manifest), key=lambda p: error_size(p["error"]["normalised"]), default=None)
    if worst is not None and manifest.proof is not None:
        tiles.insert(0, ("largest error of a pass", cell(worst["error"]["normalised"]),
                         f"{worst['name']}; limit {cell(manifest.proof['limit'])}"))  # fmt: skip
    if receipt is not None:
        tiles[:0] = [
            ("logit error", cell(receipt["judged"]), f"limit {cell(receipt['limit'])}"),
            ("greedy tokens equal", f"{receipt['tokens']:.0%}", f"top-1 {receipt['top1']:.1%}"),
        ]
    return section(
        "verdict", "Verdict",
        tag("p", tag("span", word, class_=f"badge {level}"), tag("span", sentence),
            class_="verdict"),
        tag("dl", *(tag("div", tag("dt", name), tag("dd", value, tag("small", more)))
                    for name, value, more in tiles), class_="tiles"),
    )  # fmt: skip


def passes(manifest: Manifest) -> Html:
    """The fusion account; one row for each pass, near-misses below its name."""
    slowest = max((p["seconds"] for p in manifest.passes), default=0) or 1
    rows = []
    for passed in manifest.passes:
        expected = passed.get("expected")
        few = expected is not None and passed["fired"] < expected
        rows.append([
            passed["name"],
            "–" if expected is None else f"{expected:,}",
            tag("span", f"{passed['fired']:,}", class_="bad-text" if few else None),
            f"{passed['nodes_before']:,}", f"{passed['nodes_after']:,}",
            f"{passed['nodes_after'] - passed['nodes_before']:+,}".replace("-", "−"),
            f"{passed['seconds'] * 1e3:,.1f}",
            cell(passed["error"]["normalised"]) if passed.get("error") else "–",
            meter(passed["seconds"] / slowest),
        ])  # fmt: skip
    head = ["pass", "expected", "found", "nodes before", "after", "change", "ms",
            "error", "time"]  # fmt: skip
    near = sum(len(p["misses"]) for p in manifest.passes)
    return section(
        "passes", "Fusion account",
        tag("p", "A pass that fires less often than the model family promises ends the build. "
            f"Near-misses are places that almost matched: {near:,} of them. The error is the "
            "normalised one between the logits before the pass and after it.", class_="note"),
        table("Passes in the order they ran", head, rows),
        tag("h3", "Near-misses") if near else None,
        tag("ul", *map(_misses, (p for p in manifest.passes if p["misses"])), class_="misses"),
    )  # fmt: skip


def _misses(passed: Mapping[str, Any]) -> Html:
    items = [
        tag("li", f"{count} × {miss['reason']}; first ", tag("code", miss["node"]),
            f", {miss['source']}")
        for count, miss in grouped_misses(passed["misses"])
    ]  # fmt: skip
    return tag("li", tag("b", passed["name"]), tag("ul", *items))


def limits(manifest: Manifest) -> Html:
    kv, most = manifest.kv, manifest.limits
    pools = ", ".join(f"{name} {list(shape)}" for name, shape in kv.pools.items())
    rows: list[tuple[str, Any]] = [
        ("tokens of a sequence", f"{most.max_len:,}"),
        ("sequences of a step", f"{most.max_batch:,}"),
        ("prefill tokens of a step", f"{most.max_chunk:,}"),
        ("tokens of a KV block", f"{kv.block_size:,}"
         + (" (any size at run time)" if kv.dynamic_block_size else "")),
        ("KV pools, for each of the layers", f"{pools}, {kv.dtype}"),
        ("bytes of cache a token", f"{kv.token_bytes:,}"),
        ("vocabulary", f"{manifest.vocab_size:,}"),
    ]  # fmt: skip
    return section(
        "limits", "Limits, profiles, tensors",
        pairs("Limits", ["limit", "value"], rows),
        *(_profile(index, profile) for index, profile in enumerate(manifest.profiles)),
        tag("details", tag("summary", "Inputs and outputs"), _tensors(manifest)),
    )  # fmt: skip


def _profile(index: int, profile: Mapping[str, Any]) -> Html:
    rows, pools = [], 0
    for name, sizes in profile.items():
        pools += "_pool_" in name
        if "_pool_" not in name or pools == 1:
            ranges = (" × ".join(map(str, sizes[key])) for key in ("min", "opt", "max"))
            rows.append((f"{name} and all other pools" if "_pool_" in name else name, *ranges))
    return table(f"Profile {index}", ["input", "min", "opt", "max"], rows)


def _tensors(manifest: Manifest) -> Html:
    seen: set[tuple[str, Any]] = set()
    rows = []
    for way, specs in (("in", manifest.inputs), ("out", manifest.outputs)):
        for spec in specs:
            base, _, number = spec.name.rpartition("_")
            if number.isdigit() and (base, spec.shape) in seen:
                continue  # the pools of the layers differ in their number only
            seen.add((base, spec.shape))
            name = f"{base}_0 …" if number.isdigit() else spec.name
            rows.append((name, way, spec.dtype, " × ".join(map(str, spec.shape))))
    return pairs("Tensors of a step", ["tensor", "way", "dtype", "shape"], rows)


def backend(manifest: Manifest) -> Html | None:
    """Counts of what the backend made, as the manifest has them."""
    layers = dict(manifest.layers or {})
    layers.pop("table", None)  # the walk shows it
    profiles = layers.pop("profiles", [])
    rows = [(key.replace("_", " "), cell(value)) for key, value in layers.items()]
    for number, profile in enumerate(profiles):
        rows += [(f"profile {number}, {key.replace('_', ' ')}", cell(value))
                 for key, value in profile.items()]  # fmt: skip
    if not rows:
        return None
    return section(
        "backend",
        "Backend",
        pairs("What the backend made of the graph", ["what", "how many"], rows),
    )


def files(manifest: Manifest) -> Html:
    rows = [(entry.path, f"{entry.size:,}", tag("code", entry.sha256[:16] + "…"))
            for entry in manifest.files]  # fmt: skip
    return section(
        "files", "Files",
        tag("p", "Checked one by one before the engine is loaded. This page is not among them: it "
            "may be deleted, and ", tag("code", "seekforge report DIR"), " writes it again.",
            class_="note"),
        table("Files of the engine", ["file", "bytes", "sha256"], rows),
        tag("p", "Checkpoint: ", tag("code", manifest.model.get("checkpoint", "unknown"))),
    )  # fmt: skip


def _expected(manifest: Manifest) -> list[dict[str, Any]]:
    return [p for p in manifest.passes if p.get("expected") is not None]
