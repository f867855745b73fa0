"""What a bisection found: the steps it walked, and the one culprit with its tensors.

In: findings of the single steps. Out: text, JSON, and a folder with the tensors. Knows nothing of
graphs, backends or the runtime.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

TENSORS_NAME = "culprit.safetensors"
# The worst row that each dtype may have, as `row_error` measures it: relative errors of 4.5e-5,
# 3.2e-2 and 0.14. What sound steps come to is in docs/bisect.md.
LIMITS: dict[torch.dtype, float] = {
    torch.float32: 1e-9,
    torch.float16: 5e-4,
    torch.bfloat16: 1e-2,
}


@dataclass(frozen=True, slots=True)
class Culprit:
    """Where a value first goes wrong. step: of the walk. node: of the graph (of the runtime: the
    tensor). layer: of the model, None outside of the layers. source: transformers' line. detail:
    sentences that say how it is known. tensors: "reference", "found", and the node's inputs."""

    step: str
    node: str
    operator: str
    layer: int | None
    module: str
    source: str
    error: float
    limit: float
    detail: str
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        names = "step", "node", "operator", "layer", "module", "source", "detail", "limit"
        return {name: getattr(self, name) for name in names} | {
            "error": self.error if math.isfinite(self.error) else str(self.error),
            "tensors": {name: list(value.shape) for name, value in self.tensors.items()},
        }

    def save(self, folder: Path) -> Path:
        """The tensors as one safetensors file, with what they are in its metadata."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / TENSORS_NAME
        told = {key: str(value) for key, value in self.to_dict().items() if key != "tensors"}
        # clone: views share memory, which the format refuses
        save_file({n: t.detach().contiguous().clone() for n, t in self.tensors.items()}, path, told)
        return path


class Found(Exception):
    """Ends the walk: the culprit is known."""

    def __init__(self, culprit: Culprit) -> None:
        super().__init__(culprit.step)
        self.culprit = culprit


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step of the walk. error: the worst of its judgements, as a share of its limit (below 1:
    within tolerance); None where nothing was judged, for the reason in `note`."""

    name: str
    seconds: float
    error: float | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Bisection:
    """engine: the directory. culprit: None where every step is within tolerance."""

    engine: Path
    steps: tuple[StepResult, ...]
    culprit: Culprit | None
    saved: Path | None = None

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    def to_dict(self) -> dict[str, Any]:
        return {
            "engine": str(self.engine),
            "ok": self.culprit is None,
            "culprit": None if self.culprit is None else self.culprit.to_dict(),
            "tensors": None if self.saved is None else str(self.saved),
            "seconds": round(self.seconds, 2),
            "steps": [
                {
                    "name": step.name,
                    "seconds": round(step.seconds, 2),
                    "error": str(step.error) if step.error == math.inf else step.error,
                    "note": step.note,
                }
                for step in self.steps
            ],
        }


def format_bisection(found: Bisection) -> str:
    """One line for each step, then the culprit."""
    lines = [f"{'step':<16}{'worst error / limit':>20}{'seconds':>9}"]
    for step in found.steps:
        error = "-" if step.error is None else f"{step.error:.1e}"
        lines.append(f"{step.name:<16}{error:>20}{step.seconds:>9.1f}  {step.note}".rstrip())
    culprit = found.culprit
    if culprit is None:
        return "\n".join([*lines, "no step beyond tolerance"])
    where = f", layer {culprit.layer}" if culprit.layer is not None else ""
    lines += [
        f"first step beyond tolerance: {culprit.step}",
        f"  node      {culprit.node} ({culprit.operator}){where}",
        f"  module    {culprit.module or '-'}",
        f"  source    {culprit.source or '-'}",
        f"  error     {culprit.error:.1e}, limit {culprit.limit:.0e}",
        f"  {culprit.detail}",
    ]
    if found.saved is not None:
        lines.append(f"  tensors   {found.saved}")
    return "\n".join(lines)


def row_error(reference: Tensor, found: Tensor) -> float:
    """The worst row's |x - y|^2 / (|x|^2 + |y|^2), rows along the last dimension.

    A wrong token or a wrong head does not vanish among right ones. Rows below the middle one in
    size are judged against that: a row of near zeros has no relative error worth a name. Integers
    must be equal. Infinite where NaNs or infinities stand in different places.
    """
    if reference.numel() != found.numel():
        return math.inf
    if not found.is_floating_point():
        same = torch.equal(reference.flatten().cpu(), found.flatten().cpu())
        return 0.0 if same else math.inf
    if not found.numel():
        return 0.0
    width = found.shape[-1] if found.dim() else 1
    x, y = (t.detach().cpu().double().reshape(-1, width) for t in (reference, found))
    finite = x.isfinite()
    if not torch.equal(finite, y.isfinite()):
        return math.inf
    if not torch.equal(x[~finite].nan_to_num(), y[~finite].nan_to_num()):
        return math.inf
    x, y = x.where(finite, 0.0), y.where(finite, 0.0)
    size = x.square().sum(-1) + y.square().sum(-1)
    size = size.clamp(min=float(size.median()))
    size = size.where(size > 0, 1.0)
    return float(((x - y).square().sum(-1) / size).max())


def limit_of(found: Tensor) -> float:
    """How far a value of this dtype may be off; integers not at all."""
    return LIMITS.get(found.dtype, 0.0)
