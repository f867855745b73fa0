"""What calibration found, and how it is stored: smoothing, clipping and an account of each layer.

In: a checkpoint. Out: a source of smoothed and rounded tensors. On disk: tensors named "rows:NAME",
"columns:NAME" and "clip:NAME" by the name of the checkpoint tensor, and text (metadata).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from seekforge.compile.awq_smoothing import Factors
from seekforge.compile.bundle import write_whole
from seekforge.kernels.int4 import Int4, quantise
from seekforge.models.checkpoint import Checkpoint

PARTS = ("qweight", "scales", "zeros")  # as `Int4` has them


@dataclass(frozen=True, slots=True)
class GroupResult:
    """What one scale group of one layer came to.

    Errors are |X (W' - W)^T|^2 / |X W^T|^2 over the group's INT4 weights: `rtn_error` of plain
    rounding, `scaled_error` after smoothing, `error` after smoothing, clipping and, where it was
    asked for, error feedback.
    clipped: share of the groups of weights whose largest magnitude was cut.
    """

    layer: int
    producer: str
    linears: tuple[str, ...]
    ratio: float
    rtn_error: float
    scaled_error: float
    error: float
    clipped: float


@dataclass(slots=True)
class Calibration:
    """A checkpoint with its smoothing and clipping: the weight writer's source.

    factors, clips: by name of a stored tensor. files: where the INT4 form of a stored tensor lies
    that was rounded with error feedback (none: rounded when asked for). expert_tokens: for each
    MoE layer how many tokens each expert saw. kept: layers that an earlier calibration had found.
    """

    checkpoint: Checkpoint
    tokens: int
    factors: dict[str, Factors] = field(default_factory=dict)
    clips: dict[str, Tensor] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)
    groups: list[GroupResult] = field(default_factory=list)
    expert_tokens: dict[int, list[int]] = field(default_factory=dict)
    kept: int = 0

    def read(self, name: str) -> Tensor:
        """The stored tensor, smoothed (then in fp32)."""
        tensor = self.checkpoint.read(name)
        return self.factors[name].apply(tensor.float()) if name in self.factors else tensor

    def int4(self, name: str, group_size: int, symmetric: bool, dtype: torch.dtype) -> Int4:
        """The stored tensor smoothed, clipped and rounded; scales in `dtype`. With error feedback
        group size and symmetry must be those of `calibrate`."""
        if name in self.files:
            packed = _load(self.files[name], name)
            found = (packed.group_size, packed.zeros is None)
            assert found == (group_size, symmetric), f"{name} was calibrated as {found}"
            return replace(packed, scales=packed.scales.to(dtype))
        return quantise(self.read(name), group_size, symmetric, self.clips.get(name), dtype)

    @property
    def neutral_experts(self) -> dict[int, list[int]]:
        """For each MoE layer the experts that saw no token, which are rounded as they are."""
        silent = {
            layer: [e for e, count in enumerate(counts) if not count]
            for layer, counts in self.expert_tokens.items()
        }
        return {layer: experts for layer, experts in silent.items() if experts}

    @property
    def mean_errors(self) -> tuple[float, float]:
        """(of plain rounding, of AWQ): the mean over all groups."""
        count = max(1, len(self.groups))
        plain = sum(group.rtn_error for group in self.groups) / count
        return plain, sum(group.error for group in self.groups) / count

    def add(self, other: Calibration) -> None:
        """Takes in what was found for further layers."""
        self.factors |= other.factors
        self.clips |= other.clips
        self.files |= other.files
        self.groups += other.groups
        self.expert_tokens |= other.expert_tokens

    def to_tensors(self) -> dict[str, Tensor]:
        tensors = {f"clip:{name}": clip for name, clip in self.clips.items()}
        for name, factors in self.factors.items():
            for kind, value in (("rows", factors.rows), ("columns", factors.columns)):
                if value is not None:
                    tensors[f"{kind}:{name}"] = value
        # clone: factors of several tensors may share memory, which the format refuses.
        return {name: tensor.contiguous().clone() for name, tensor in tensors.items()}

    def to_text(self) -> dict[str, str]:
        return {
            "groups": json.dumps([asdict(group) for group in self.groups]),
            "expert_tokens": json.dumps(self.expert_tokens),
        }

    def fill(self, tensors: Mapping[str, Tensor], text: Mapping[str, str]) -> None:
        """The reverse of `to_tensors` and `to_text`; other tensors and texts are left out."""
        for name, tensor in tensors.items():
            kind, _, stored = name.partition(":")
            if kind == "clip":
                self.clips[stored] = tensor
            elif kind in ("rows", "columns"):
                known = self.factors.get(stored, Factors())
                self.factors[stored] = replace(known, **{kind: tensor})
        for group in json.loads(text["groups"]):
            self.groups.append(GroupResult(**{**group, "linears": tuple(group["linears"])}))
        for layer, counts in json.loads(text["expert_tokens"]).items():
            self.expert_tokens[int(layer)] = counts


def save_layer(found: Calibration, packed: Mapping[str, Tensor], path: Path) -> None:
    """One layer: what was found, and its rounded weights ("NAME.qweight", …)."""
    text = found.to_text() | {
        "checkpoint": found.checkpoint.digest(), "packed": json.dumps(sorted(found.files)),
    }  # fmt: skip
    tensors = {**packed, **found.to_tensors()}
    write_whole(path, lambda part: save_file(tensors, part, text))


def load_layer(checkpoint: Checkpoint, path: Path) -> Calibration | None:
    """What `save_layer` wrote there for this checkpoint; None where it did not."""
    if not path.is_file():
        return None
    found = Calibration(checkpoint, 0)
    try:
        with safe_open(path, framework="pt") as file:
            text = file.metadata() or {}
            if text.get("checkpoint") != checkpoint.digest():
                return None
            kept = [name for name in file.keys() if ":" in name]  # noqa: SIM118
            found.fill({name: file.get_tensor(name) for name in kept}, text)
            found.files = dict.fromkeys(json.loads(text["packed"]), path)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        return None
    return found


def _load(path: Path, name: str) -> Int4:
    with safe_open(path, framework="pt") as file:
        stored = set(file.keys())
        keys = [f"{name}.{part}" for part in PARTS]
        return Int4(*(file.get_tensor(key) for key in keys if key in stored))
