"""Calibration as a step of the build: found once for a bundle, kept, and told about.

In: a checkpoint, a text, the tensors that will be INT4. Out: a source of smoothed and rounded
weights, and an account of what each layer lost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from seekforge.compile.calibration import calibrate
from seekforge.compile.calibration_file import (
    Calibrated,
    calibration_key,
    load_calibration,
    save_calibration,
)
from seekforge.compile.calibration_text import calibration_windows
from seekforge.compile.steps import Steps
from seekforge.models.checkpoint import Checkpoint

WINDOW = 512  # tokens of text seen together
TOKENS = 16384  # of the text, at most


def calibrated(
    checkpoint: Checkpoint,
    text: Path | None,
    group_sizes: Mapping[str, int],
    symmetric: bool,
    dtype: torch.dtype,
    path: Path,
    steps: Steps,
) -> Calibrated:
    """The calibration for these weights: the one kept in `path`, or a new one, kept there.

    text: file or folder; None: the built-in text. Raises InputError where there is no text.
    """
    tokenizer = AutoTokenizer.from_pretrained(checkpoint.path, local_files_only=True)
    end = next(iter(checkpoint.eos_token_ids), None)
    length = min(WINDOW, checkpoint.spec.max_position_embeddings)
    cut = calibration_windows(text, tokenizer, end, length, TOKENS)
    key = calibration_key(cut, group_sizes, symmetric)
    known = load_calibration(checkpoint, path, key)
    if known is not None:
        return known
    with steps.step("calibration"):
        found = Calibrated(calibrate(checkpoint, cut, group_sizes, symmetric, dtype), key)
    save_calibration(found, path)
    plain, error = found.calibration.mean_errors
    steps.console.print(
        f"    {found.calibration.tokens:,} tokens; mean output error of a layer "
        f"{error:.2e}, plain rounding {plain:.2e} ({error / (plain or 1):.2f} x)",
        highlight=False, style="dim",
    )  # fmt: skip
    for layer, experts in found.calibration.neutral_experts.items():
        steps.console.print(
            f"    layer {layer}: experts {experts} saw no token and are rounded as they are",
            highlight=False, style="yellow",
        )  # fmt: skip
    return found


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
