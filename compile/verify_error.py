"""How far two sets of logits are apart, as one pass's entry in the manifest."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from seekforge.kernels.tolerance import normalised_error


@dataclass(frozen=True, slots=True)
class PassError:
    """What a pass changed in the logits. normalised: see kernels/tolerance.py. max, mean: the
    largest and the mean difference, in units of the old logits' root mean square. seconds: of the
    comparison.

    own: the median over positions of the normalised error in the engine's dtype against float32,
    None where that is float32. rounding: of the pass that inserts INT4, the normalised error of the
    decoded weights against the plain ones. same: the pass left the graph as it was.
    """

    normalised: float
    max: float
    mean: float
    seconds: float
    own: float | None = None
    rounding: float | None = None
    same: bool = False

    def to_dict(self) -> dict[str, Any]:
        """JSON has no infinity: None stands for an error that is not finite."""
        values = dataclasses.asdict(self)
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }


def difference(old: Tensor, new: Tensor) -> PassError:
    """Of logits [positions, vocab] in float32. Infinite where shapes differ or values are not
    finite in the same places."""
    error = normalised_error(old, new)
    if not math.isfinite(error):
        return PassError(error, math.inf, math.inf, 0.0)
    finite = old.isfinite()
    apart = (old - new)[finite].double().abs()
    size = float(old[finite].double().square().mean().sqrt()) or 1.0
    return PassError(error, float(apart.max()) / size, float(apart.mean()) / size, 0.0)


def median_error(judge: Tensor, found: Tensor) -> float:
    """The median over positions of the normalised error; infinite where `found` is not finite. With
    experts, rounding sends a token now and then to another one, so a mean would say little."""
    if not bool(found.isfinite().all()):
        return math.inf
    x, y = judge.double(), found.double()
    size = x.square().sum(-1) + y.square().sum(-1)
    return float(((x - y).square().sum(-1) / size.clamp_min(1e-300)).median())
