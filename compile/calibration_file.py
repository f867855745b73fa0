"""A calibration on disk: found once, then read by every engine of the bundle and by `compare`.

A folder: one file a layer with its rounded weights (written by `calibrate`), and one with smoothing
factors ("rows:NAME", "columns:NAME") and clip bounds ("clip:NAME") by the name of the checkpoint
tensor, in its metadata what was found. The key names everything that decides the result, so a
folder of another text or group size is not taken for this one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from seekforge.compile.awq_smoothing import Factors
from seekforge.compile.calibration import Calibration, GroupResult
from seekforge.kernels.int4 import Int4
from seekforge.models.checkpoint import Checkpoint

CALIBRATION_NAME = "calibration"  # folder beside the engines of a bundle
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
    """sha256 of the text's tokens and of how weights are rounded."""
    what = json.dumps([list(map(list, windows)), sorted(group_sizes.items()), symmetric])
    return hashlib.sha256(what.encode()).hexdigest()


def save_calibration(found: Calibrated, folder: Path) -> None:
    """Completes the folder that `calibrate` wrote the layers to."""
    calibration = found.calibration
    tensors = {f"clip:{name}": clip for name, clip in calibration.clips.items()}
    for name, factors in calibration.factors.items():
        for kind, value in (("rows", factors.rows), ("columns", factors.columns)):
            if value is not None:
                tensors[f"{kind}:{name}"] = value
    metadata = {
        "key": found.key,
        "checkpoint": calibration.checkpoint.digest(),
        "tokens": str(calibration.tokens),
        "groups": json.dumps([dataclasses.asdict(group) for group in calibration.groups]),
        "expert_tokens": json.dumps(calibration.expert_tokens),
        "files": json.dumps({name: file.name for name, file in calibration.files.items()}),
    }
    # clone: factors of several tensors may share memory, which the format refuses.
    plain = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(plain, folder / FACTORS, metadata)


def load_calibration(
    checkpoint: Checkpoint, folder: Path, key: str | None = None
) -> Calibrated | None:
    """The calibration in `folder`; None where there is none of this checkpoint (and key)."""
    if not (folder / FACTORS).is_file():
        return None
    with safe_open(folder / FACTORS, framework="pt") as file:
        metadata = file.metadata()
        if metadata["checkpoint"] != checkpoint.digest() or key not in (None, metadata["key"]):
            return None
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    calibration = Calibration(checkpoint, int(metadata["tokens"]))
    for name, tensor in tensors.items():
        kind, _, stored = name.partition(":")
        if kind == "clip":
            calibration.clips[stored] = tensor
        else:
            known = calibration.factors.get(stored, Factors())
            calibration.factors[stored] = dataclasses.replace(known, **{kind: tensor})
    calibration.files = {
        name: folder / file for name, file in json.loads(metadata["files"]).items()
    }
    for group in json.loads(metadata["groups"]):
        calibration.groups.append(GroupResult(**{**group, "linears": tuple(group["linears"])}))
    calibration.expert_tokens = {
        int(layer): counts for layer, counts in json.loads(metadata["expert_tokens"]).items()
    }
    return Calibrated(calibration, metadata["key"])
