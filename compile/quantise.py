"""Quantisation: calibration as a step of the build, and `seekforge quantize`.

In: a checkpoint, a text, the tensors that will be INT4. Out: a source of smoothed and rounded
weights, found once and kept, and an account of what each layer and the model lost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from seekforge.compile.awq_export import DTYPE, awq_tensors, write_awq
from seekforge.compile.bundle import atomic_directory, check_writable, exclusive
from seekforge.compile.calibration import LAYERS, calibrate
from seekforge.compile.calibration_file import (
    CALIBRATION_NAME,
    KEY_LETTERS,
    Calibrated,
    calibration_key,
    load_calibration,
    save_calibration,
)
from seekforge.compile.calibration_text import calibration_windows
from seekforge.compile.perplexity import WINDOW, windows
from seekforge.compile.perplexity import text_tokens as perplexity_tokens
from seekforge.compile.quality import quality, tensors_to_quantise
from seekforge.compile.steps import Steps
from seekforge.compile.weights import Source
from seekforge.kernels.errors import InputError
from seekforge.models.checkpoint import Checkpoint, open_checkpoint
from seekforge.passes.int4_options import QUANTISATIONS as QUANTISATIONS
from seekforge.passes.int4_options import Int4Options

TOKENS = 16384  # of the text, at most
METHODS = {"common": "RTN with scales of largest / 7", "rtn": "RTN", "awq": "AWQ"}


def calibrated(
    checkpoint: Checkpoint,
    cut: list[list[int]],
    group_sizes: Mapping[str, int],
    symmetric: bool,
    base: Path,
    steps: Steps,
) -> Calibrated:
    """The calibration for these weights and windows of text: the one kept below `base`, in a folder
    named by its key, or a new one, kept there."""
    key = calibration_key(cut, group_sizes, symmetric)
    folder = base / key[:KEY_LETTERS]
    base.mkdir(parents=True, exist_ok=True)
    with exclusive(folder, lambda: steps.console.print("    another build calibrates; waiting")):
        known = load_calibration(checkpoint, base, key)
        if known is not None:
            return known
        # Scales are searched in fp32 and rounded to each engine's dtype when it is written.
        with steps.step("calibration"), atomic_directory(folder, LAYERS) as made:
            found = Calibrated(
                calibrate(checkpoint, cut, group_sizes, symmetric, torch.float32, folder=made), key
            )
            save_calibration(found, made)
        kept = load_calibration(checkpoint, base, key)  # its files are in their place now
    assert kept is not None, folder
    if found.calibration.kept:
        steps.console.print(
            f"    {found.calibration.kept} layers were found by a build that was killed",
            highlight=False, style="dim",
        )  # fmt: skip
    plain, error = kept.calibration.mean_errors
    steps.console.print(
        f"    {kept.calibration.tokens:,} tokens; mean output error of a layer "
        f"{error:.2e}, plain rounding {plain:.2e} ({error / (plain or 1):.2f} x)",
        highlight=False, style="dim",
    )  # fmt: skip
    for layer, experts in kept.calibration.neutral_experts.items():
        steps.console.print(
            f"    layer {layer}: experts {experts} saw no token and are rounded as they are",
            highlight=False, style="yellow",
        )  # fmt: skip
    return kept


def text_windows(checkpoint: Checkpoint, text: Path | None) -> list[list[int]]:
    """What calibration looks at: windows of a file or folder, or of the built-in text (None).

    Raises InputError where there is no text, or no tokenizer to read it with.
    """
    end = next(iter(checkpoint.eos_token_ids), None)
    length = min(WINDOW, checkpoint.spec.max_position_embeddings)
    return calibration_windows(text, _tokenizer(checkpoint), end, length, TOKENS)


def _tokenizer(checkpoint: Checkpoint) -> Any:
    try:
        return AutoTokenizer.from_pretrained(checkpoint.path, local_files_only=True)
    except Exception as error:  # transformers raises many kinds
        raise InputError(
            f"{checkpoint.path}: text needs its tokenizer, which cannot be read ({error}); use "
            "--quant rtn-int4, or add the tokenizer's files"
        ) from None


def summary(found: Calibrated) -> dict[str, Any]:
    """For the manifest: tokens, errors of each scale group, tokens of each expert."""
    calibration = found.calibration
    plain, error = calibration.mean_errors
    return {
        "key": found.key,
        "tokens": calibration.tokens,
        "rtn_error": plain,
        "error": error,
        "groups": [dataclasses.asdict(group) for group in calibration.groups],
        "expert_tokens": {str(k): v for k, v in calibration.expert_tokens.items()},
    }


def quantise_checkpoint(
    path: Path,
    out: Path,
    method: str,
    options: Int4Options,
    calib: Path | None,
    text: str | None,
    text_tokens: int | None,
) -> dict[str, Any]:
    """`seekforge quantize`: writes an AutoAWQ-layout checkpoint below `out`; returns the account.

    text: held-out text for perplexities, its first text_tokens tokens. Raises InputError before
    anything heavy.
    """
    if method not in QUANTISATIONS:
        raise InputError(f"--quant {method}: unknown; one of {', '.join(QUANTISATIONS)}")
    checkpoint = open_checkpoint(path)
    if checkpoint.quant is not None:
        raise InputError(f"{path} holds INT4 weights already; give the unquantised checkpoint")
    out = out.resolve()
    if out.exists() and any(out.iterdir()):
        raise InputError(f"-o {out}: it is not empty; give a new folder")
    check_writable(out.parent)
    if calib is not None and method != "awq-int4":
        raise InputError(f"--calib {calib}: only --quant awq-int4 looks at text")
    seen = text_windows(checkpoint, calib) if method == "awq-int4" else []
    cut: list[list[int]] = []
    if text is not None:
        end = next(iter(checkpoint.eos_token_ids), None)
        stream = perplexity_tokens(_tokenizer(checkpoint), text, end)
        cut = list(windows(stream, WINDOW, text_tokens))
    sizes = tensors_to_quantise(checkpoint, options)
    fits, _ = awq_tensors(checkpoint, sizes, options.group_size)
    report: dict[str, Any] = {
        "checkpoint": str(out), "method": method, "group_size": options.group_size,
        "symmetric": options.symmetric, "tensors": len(fits),
        "left": sorted(set(sizes) - set(fits)), "calibration": None, "perplexity": None,
    }  # fmt: skip
    source: Source = checkpoint
    if method == "awq-int4":
        kept = out.with_name(f"{out.name}.{CALIBRATION_NAME}")
        steps = Steps(checkpoint.spec.model_type)
        found = calibrated(checkpoint, seen, fits, options.symmetric, kept, steps)
        report["calibration"] = summary(found)
        source = found
    with exclusive(out), atomic_directory(out) as made:
        write_awq(checkpoint, source, fits, options.group_size, options.symmetric, made)
    if cut:
        awq = source if method == "awq-int4" else None
        found_quality = quality(checkpoint, fits, options.symmetric, DTYPE, awq, cut)
        report["perplexity"] = dataclasses.asdict(found_quality) | {
            "recovered": found_quality.recovered(found_quality.rtn),
            "recovered_of_common": found_quality.recovered(found_quality.common),
        }
    return report


def format_report(report: dict[str, Any]) -> str:
    """The account as text: what each layer lost, then what the model lost."""
    kind = "symmetric" if report["symmetric"] else "asymmetric"
    lines = [
        f"{report['checkpoint']}: {report['tensors']} weights in {kind} INT4, groups of "
        f"{report['group_size']}"
    ]
    if report["left"]:
        lines.append(f"left as they are: {', '.join(report['left'][:6])} ({len(report['left'])})")
    calibration = report["calibration"]
    if calibration:
        lines += [f"calibrated on {calibration['tokens']:,} tokens", format_groups(calibration)]
    found = report["perplexity"]
    if found:
        lines.append(f"perplexity on {found['tokens']:,} tokens: fp32 {found['full']:.4f}")
        for name, title in METHODS.items():
            if found[name] is not None:
                lost = found[name] / found["full"] - 1
                lines.append(f"  {title} {found[name]:.4f} ({lost:+.2%})")
        for name, title in (("recovered", "RTN"), ("recovered_of_common", METHODS["common"])):
            if found[name] is not None:
                lines.append(f"  AWQ takes back {found[name]:.0%} of what {title} lost")
    return "\n".join(lines)


def format_groups(calibration: dict[str, Any]) -> str:
    """One line for each scale group: output error of plain rounding and of AWQ, ratio, clipping."""
    lines = [
        f"{'layer':<6}{'input made by':<36}{'RTN':>10}{'AWQ':>10}{'x':>6}{'ratio':>7}{'cut':>7}"
    ]
    for group in calibration["groups"]:
        factor = group["error"] / (group["rtn_error"] or 1)
        lines.append(
            f"{group['layer']:<6}{group['producer'].removesuffix('.weight'):<36}"
            f"{group['rtn_error']:>10.2e}{group['error']:>10.2e}{factor:>6.2f}"
            f"{group['ratio']:>7.2f}{group['clipped']:>7.1%}"
        )
    plain, error = calibration["rtn_error"], calibration["error"]
    lines.append(f"{'mean':<42}{plain:>10.2e}{error:>10.2e}{error / (plain or 1):>6.2f}")
    for layer, counts in calibration["expert_tokens"].items():
        silent = [expert for expert, count in enumerate(counts) if not count]
        lines.append(
            f"layer {layer}: experts saw {min(counts)} to {max(counts)} tokens"
            + (f"; none: {silent}, rounded as they are" if silent else "")
        )
    return "\n".join(lines)
