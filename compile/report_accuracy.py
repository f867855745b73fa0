"""The report's judgement and its accuracy receipts: what the engine gave beside eager."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from seekforge.compile.report_html import Html, pairs, section, table, tag
from seekforge.compile.report_text import cell
from seekforge.runtime.manifest import Manifest

# Keys of the receipt in the words of the page; others are shown as they are called.
RECEIPT = {
    "max_error": "largest logit error",
    "mean_error": "mean logit error",
    "judged": "error that is judged",
    "limit": "limit",
    "kl": "KL divergence",
    "top1": "same first choice",
    "tokens": "greedy tokens equal",
    "perplexity": "perplexity",
}
SHARES = ("top1", "tokens")
APART = ("executed", "passed", "name", "quantization", "compared", "when")  # said elsewhere


def shown_receipt(manifest: Manifest) -> Mapping[str, Any] | None:
    """The last comparison: of `compare`, or of the build; None where the engine never ran."""
    receipt = manifest.receipt or {}
    return receipt.get("compared") or (receipt if receipt.get("executed") else None)


def judgement(manifest: Manifest) -> tuple[str, str, str]:
    """(class of the badge, word, sentence)"""
    short = [p["name"] for p in manifest.passes if p.get("expected") and p["fired"] < p["expected"]]
    if short:
        return "bad", "Incomplete", f"{', '.join(short)} fired less often than expected."
    receipt = shown_receipt(manifest)
    if receipt is None:
        reason = (manifest.receipt or {}).get("reason", "no receipt was written")
        return "warn", "Not executed", f"Built and checked as a graph; {reason}."
    if not receipt.get("passed"):
        return "bad", "Failed", "The engine does not compute what the checkpoint computes."
    what = "what its quantised weights compute" if manifest.quantization else "what eager computes"
    return (
        "good",
        "Verified",
        f"It was run beside transformers' eager model and computes {what}: errors are within the "
        "limit.",
    )


def accuracy(manifest: Manifest) -> Html:
    receipt = manifest.receipt or {}
    built, later = receipt.get("executed"), receipt.get("compared")
    reason = receipt.get("reason", "the manifest has no receipt")
    return section(
        "accuracy", "Accuracy",
        tag("p", "What the engine gave beside transformers' eager model on the same prompts. ",
            tag("code", "seekforge compare"), " does it again, with more.", class_="note"),
        _table("Accuracy receipt", receipt) if built
        else tag("p", f"Not executed when it was built: {reason}."),
        _table(f"Last comparison, {later['when']}", later) if later else None,
        _proof(manifest),
    )  # fmt: skip


def _table(caption: str, receipt: Mapping[str, Any]) -> Html:
    rows = [
        (RECEIPT.get(key, key.replace("_", " ").replace(".", ": ")), _value(key, value))
        for key, value in flattened({k: v for k, v in receipt.items() if k not in APART})
        if value is not None
    ]
    return pairs(caption, ["measure", "value"], rows)


def _proof(manifest: Manifest) -> Html | None:
    """Each pass held against the graph before it."""
    held, proof = proven(manifest), manifest.proof
    if not held or proof is None:
        return None
    keys = ("normalised", "max", "mean", "own", "rounding")
    head = ["pass", "normalised", "largest", "mean", "in its own dtype", "INT4 rounding"]
    rows = [(p["name"], *(cell(p["error"].get(key)) for key in keys)) for p in held]
    caption = (
        f"Logits before and after each pass, on {proof['layers']} of "
        f"{manifest.model['num_layers']} layers and {proof['tokens']} tokens; limit "
        f"{cell(proof['limit'])}"
    )
    return table(caption, head, rows)


def flattened(data: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Nested keys joined with dots; lists as text."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def proven(manifest: Manifest) -> list[dict[str, Any]]:
    return [p for p in manifest.passes if p.get("error")]


def error_size(error: float | None) -> float:
    return math.inf if error is None else error


def _value(key: str, value: Any) -> str:
    if key in SHARES:
        return f"{value:.2%}"
    return cell(value)
