"""The engine as it was built, on right inputs: its logits in each paged step against eager's.

Below the runtime: inputs are handed to the compiled model itself, so that a wrong table made by the
runtime does not show here, and a wrong kernel does not hide there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seekforge.compile.bisect_steps import PagedStep
from seekforge.runtime.session import Session

# Of a row of logits' mean error: so many times the worst that eager in the engine's dtype has
# against float32, and at least this share of the logits' mean magnitude.
FACTOR = 4.0
FLOOR = 1e-3
ROUTED_SHARE = 0.9  # rows judged in models with experts, dtypes below float32 (see compare.py)


def engine_outputs(session: Session, step: PagedStep) -> dict[str, Tensor]:
    """The compiled model's outputs by name; the pools have the step's K and V afterwards."""
    manifest = session.manifest
    engine: Any = session
    if manifest.form == "ragged":
        one = len(step.inputs["token_ids"]) == 1 and len(step.inputs["logits_rows"]) == 1
        loader = engine.decode if one else engine.model
        given = {spec.name: step.inputs[spec.name].to(engine.device) for spec in manifest.inputs}
        (logits,) = loader.run(list(given.values()))
        for name, tensor in given.items():
            if "_pool_" in name:  # which a GPU has written to in a copy
                step.inputs[name].copy_(tensor)
        return {"logits": logits.cpu()}
    outputs: dict[str, Tensor] = engine._run(step.inputs)
    step.keep(outputs)
    return outputs


def fresh_pools(steps: list[PagedStep]) -> None:
    """Fills the pools that the steps share with random values: nothing is cached."""
    random = torch.Generator().manual_seed(3)
    for name, tensor in steps[0].inputs.items():
        if "_pool_" in name:
            tensor.copy_(torch.randn(tensor.shape, generator=random))


@dataclass(frozen=True, slots=True)
class Allowed:
    """How far a row of an engine's logits may be from float32 eager's: `limit` of mean error.

    share: of the rows that are judged, the better ones.
    """

    limit: float
    share: float

    @classmethod
    def by(cls, eager: Tensor, exact: Tensor, routed: bool) -> Allowed:
        """From eager in the engine's dtype and in float32, all rows [N, V]. routed: the model has
        experts, of which rounding picks another now and then."""
        error = (eager.double() - exact.double()).abs().mean(-1)
        share = ROUTED_SHARE if routed and bool((error > 0).any()) else 1.0
        usual = float(_better(error, share).max())
        return cls(FACTOR * max(usual, FLOOR * float(exact.abs().mean())), share)

    def part(self, found: Tensor, exact: Tensor) -> float:
        """How much of it the worst row takes."""
        error = (found.double() - exact.double()).abs().mean(-1)
        if not bool(error.isfinite().all()):
            return math.inf
        return float(_better(error, self.share).max()) / self.limit


def _better(error: Tensor, share: float) -> Tensor:
    return error.sort().values[: max(1, int(share * len(error)))]
