"""The report's section on INT4 weights: what each layer lost, by plain rounding and by AWQ."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from seekforge.compile import report_plots as plots
from seekforge.compile.report_html import Html, pairs, section, table, tag
from seekforge.runtime.manifest import Manifest

Groups = Sequence[Mapping[str, Any]]
ROWS = 400  # of the table; beyond, those that lost most


def quantisation(manifest: Manifest) -> Html | None:
    found = manifest.quantization
    if found is None:
        return None
    kind = "symmetric" if found["symmetric"] else "with zero points"
    sizes = Counter(found["tensors"].values())
    groups = ", ".join(f"{size} ({count} tensors)" for size, count in sorted(sizes.items()))
    rows = [
        ("method", found["method"]),
        ("INT4 values", kind),
        ("weights that share a scale", groups or "none"),
        ("left as they are", ", ".join(found.get("skip") or ()) or "nothing"),
    ]
    calibration = found.get("calibration")
    if not calibration:
        return section("quantisation", "Quantisation", pairs("INT4", ["what", "value"], rows))
    plain, error = calibration["rtn_error"], calibration["error"]
    groups_of = calibration["groups"]
    decades = plots.decades(g[key] for g in groups_of for key in ("error", "rtn_error"))
    rows += [
        ("calibrated on", f"{calibration['tokens']:,} tokens"),
        ("mean output error, plain rounding", f"{plain:.3e}"),
        ("mean output error, AWQ", f"{error:.3e} ({error / (plain or 1):.2f} ×)"),
    ]
    return section(
        "quantisation", "Quantisation",
        pairs("INT4", ["what", "value"], rows),
        tag("p", "Output error of a layer's products, |X(W′ − W)ᵀ|² / |XWᵀ|², on the calibration "
            "text: ", tag("span", class_="swatch"), "AWQ, ", tag("span", class_="swatch two"),
            "plain rounding (RTN). Lower is better.", class_="note"),
        tag("div", *(_figure(role, made, decades) for role, made in by_role(groups_of)),
            class_="plots"),
        _experts(calibration["expert_tokens"]),
        _all(groups_of),
    )  # fmt: skip


def by_role(groups: Groups) -> list[tuple[str, dict[int, dict[str, float]]]]:
    """For each kind of scale group (`self_attn.v_proj`; experts of a layer are one kind) and layer:
    the mean of rtn_error, error, ratio and clipped."""
    found: dict[str, dict[int, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for group in groups:
        role = re.sub(r"\.\d+\.", ".*.", group["producer"].removesuffix(".weight"))
        found[role][group["layer"]].append(group)
    keys = ("rtn_error", "error", "ratio", "clipped")
    return [
        (role, {layer: {key: sum(g[key] for g in members) / len(members) for key in keys}
                for layer, members in sorted(layers.items())})
        for role, layers in found.items()
    ]  # fmt: skip


def _figure(role: str, layers: Mapping[int, Mapping[str, float]], decades: tuple[int, int]) -> Html:
    x = list(layers)
    pair = [[layer[key] for layer in layers.values()] for key in ("error", "rtn_error")]
    ratio, clipped = ([layer[key] for layer in layers.values()] for key in ("ratio", "clipped"))
    return tag(
        "figure",
        tag("figcaption", "input made by ", tag("code", role)),
        plots.lines(
            f"Error, input made by {role}",
            x,
            pair,
            ("AWQ", "plain rounding"),
            decades,
            128,
        ),
        tag("p", "smoothing ratio chosen", class_="note"),
        plots.shares(f"Ratio chosen, input made by {role}", x, ratio, 58, "one", "1"),
        tag("p", "groups of weights that were clipped", class_="note"),
        plots.shares(f"Clipped, input made by {role}", x, clipped, 58, "two", "100 %"),
    )


def _experts(tokens: Mapping[str, Sequence[int]]) -> Html | None:
    if not tokens:
        return None
    rows = []
    for layer, counts in tokens.items():
        silent = [expert for expert, count in enumerate(counts) if not count]
        ordered = sorted(counts)
        rows.append((
            f"layer {layer}", f"{len(counts):,}", f"{ordered[0]:,}",
            f"{ordered[len(ordered) // 2]:,}", f"{ordered[-1]:,}",
            ", ".join(map(str, silent)) or "none",
        ))  # fmt: skip
    numbers = {int(layer): counts for layer, counts in tokens.items()}
    return tag(
        "div",
        tag("h3", "Tokens that each expert saw"),
        tag("div", tag("figure", plots.counts("Calibration tokens by layer and expert", numbers)),
            class_="plots"),
        table("An expert that saw none is rounded as it is",
              ["layer", "experts", "fewest", "median", "most", "saw none"], rows),
    )  # fmt: skip


def _all(groups: Groups) -> Html:
    shown = list(groups)
    caption = "Every scale group"
    if len(shown) > ROWS:
        shown = sorted(groups, key=lambda group: -group["error"])[:ROWS]
        caption = f"The {ROWS} of {len(groups):,} scale groups that lost most"
    rows = [
        (
            f"layer {group['layer']}", group["producer"].removesuffix(".weight"),
            f"{group['rtn_error']:.2e}", f"{group['error']:.2e}",
            f"{group['error'] / (group['rtn_error'] or 1):.2f}",
            f"{group['ratio']:.2f}", f"{group['clipped']:.1%}",
        )
        for group in shown
    ]  # fmt: skip
    head = ["layer", "input made by", "RTN", "AWQ", "×", "ratio", "cut"]
    return tag("details", tag("summary", caption), table("Scale groups", head, rows, left=2))
