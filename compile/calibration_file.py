"""A calibration on disk: found once, then read by every engine of the bundle and by `compare`.

A folder: one file a layer with its rounded weights (written by `calibrate`), and one with smoothing
factors ("rows:NAME", "columns:NAME") and clip bounds ("clip:NAME") by the name of the checkpoint
tensor, in its metadata what was found. The key names everything that decides the result, so a
folder of another text, group size or release of the searches is not taken for this one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import seekforge.kernels.int4
import seekforge.models.awq_groups
from seekforge.compile.calibration_result import Calibration
from seekforge.kernels.int4 import Int4
from seekforge.models.checkpoint import Checkpoint

CALIBRATION_NAME = "calibration"  # folder beside the engines of a bundle
KEY_LETTERS = 12  # of the key, in the name of its folder
FACTORS = "smoothing.safetensors"  # written last


@dataclasses.dataclass(frozen=True, slots=True)
class Calibrated:
    """A calibration as a source of weights: a checkpoint's tensors smoothed, clipped, rounded."""

    calibration: Calibration
    key: str

    def digest(self) -> str:
        text = f"{self.calibration.checkpoint.digest()} {self.key}"
        return hashlib.sha256(text.encode()).hexdigest()

    def read(self, name: str) -> Tensor:
        return self.calibration.read(name)

    def int4(self, name: str, group_size: int, symmetric: bool, dtype: torch.dtype) -> Int4:
        return self.calibration.int4(name, group_size, symmetric, dtype)


def calibration_key(
    windows: Sequence[Sequence[int]], group_sizes: Mapping[str, int], symmetric: bool
) -> str:
    """sha256 of the text's tokens, of how weights are rounded, and of the code that decides it."""
    what = json.dumps([list(map(list, windows)), sorted(group_sizes.items()), symmetric])
    digest = hashlib.sha256(what.encode())
    here = Path(__file__).parent
    for file in sorted((*here.glob("awq*.py"), *here.glob("calibration*.py"))):
        digest.update(file.read_bytes())
    for module in (seekforge.kernels.int4, seekforge.models.awq_groups):
        digest.update(inspect.getsource(module).encode())
    return digest.hexdigest()


def save_calibration(found: Calibrated, folder: Path) -> None:
    """Completes the folder that `calibrate` wrote the layers to."""
    calibration = found.calibration
    metadata = calibration.to_text() | {
        "key": found.key,
        "checkpoint": calibration.checkpoint.digest(),
        "tokens": str(calibration.tokens),
        "files": json.dumps({name: file.name for name, file in calibration.files.items()}),
    }
    save_file(calibration.to_tensors(), folder / FACTORS, metadata)


def load_calibration(checkpoint: Checkpoint, base: Path, key: str) -> Calibrated | None:
    """The calibration of `key` below `base`; None where there is none of this checkpoint, or it is
    damaged."""
    folder = base / key[:KEY_LETTERS]
    try:
        found = _load(checkpoint, folder, key)
    except (OSError, SafetensorError, KeyError, ValueError):
        return None
    if found is None or not all(file.is_file() for file in found.calibration.files.values()):
        return None
    return found


def _load(checkpoint: Checkpoint, folder: Path, key: str) -> Calibrated | None:
    with safe_open(folder / FACTORS, framework="pt") as file:
        metadata = file.metadata()
        if metadata["checkpoint"] != checkpoint.digest() or key != metadata["key"]:
            return None
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    calibration = Calibration(checkpoint, int(metadata["tokens"]))
    calibration.fill(tensors, metadata)
    calibration.files = {
        name: folder / file for name, file in json.loads(metadata["files"]).items()
    }
    return Calibrated(calibration, metadata["key"])
