"""A comparison as text: one line for each engine and for eager, and one for each layer if asked."""

from __future__ import annotations

from seekforge.compile.compare_result import Comparison, EngineResult

JUDGES = {
    "reference": "transformers eager in float32",
    "checkpoint": "transformers eager in float32 with the checkpoint's own weights",
}
PLACES = {"cpu": "", "cuda": ", on the GPU"}


def format_table(comparison: Comparison) -> str:
    rows = (*comparison.eager, *comparison.engines)
    wide = max(16, *(len(row.name) + 1 for row in rows)) if rows else 16
    head = f"{'':<{wide}}{'dtype':<10}{'weights':<10}{'max err':>10}{'mean err':>10}{'KL':>10}"
    head += f"{'top-1':>8}{'tokens':>8}{'perplexity':>12}  verdict"
    lines = [
        f"{comparison.num_prompts} prompts, {comparison.num_positions} positions, against "
        f"{JUDGES[comparison.judge]}{PLACES[comparison.device]}"
    ]
    if comparison.cut_prompts:
        lines.append(
            f"{comparison.cut_prompts} of the prompts were cut: they and the new tokens are longer "
            "than an engine's sequences (--max-len)"
        )
    if comparison.perplexity is not None:
        lines.append(
            f"perplexity of the judge {comparison.perplexity:.4f} "
            f"({comparison.text_tokens:,} tokens predicted)"
        )
    lines.append(head)
    for row in rows:
        ppl = "" if row.perplexity is None else f"{row.perplexity:.4f}"
        lines.append(
            f"{row.name:<{wide}}{row.dtype:<10}{row.quantization or '':<10}"
            f"{row.max_error:>10.2e}{row.mean_error:>10.2e}{row.kl:>10.2e}{row.top1:>8.1%}"
            f"{row.tokens:>8.1%}{ppl:>12}  {_verdict(comparison, row)}"
        )
    layered = [row for row in rows if row.layers is not None]
    return "\n".join(lines + (_layers(layered) if layered else []))


def _verdict(comparison: Comparison, row: EngineResult) -> str:
    if row.limit is None:
        return ""
    return "pass" if row.passed and comparison.perplexity_passed(row) else "FAIL"


def _layers(rows: list[EngineResult]) -> list[str]:
    """One line a layer. A fault shows as the first layer whose error is far above the one before
    it."""
    names = [row.name if row.dtype == "float32" else f"{row.name} {row.dtype}" for row in rows]
    widths = [max(12, len(name) + 2) for name in names]
    cells = "".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True))
    lines = ["", "normalised error of the hidden state behind each layer", f"{'layer':<8}{cells}"]
    for index, errors in enumerate(zip(*(row.layers or () for row in rows), strict=True)):
        cells = "".join(f"{e:>{width}.1e}" for e, width in zip(errors, widths, strict=True))
        lines.append(f"{index:<8}{cells}")
    by: dict[str, list[str]] = {}
    for row in rows:
        if row.layers_by is not None:
            by.setdefault(row.layers_by, []).append(row.name)
    return lines + [f"{', '.join(names)}: {how}" for how, names in by.items()]
