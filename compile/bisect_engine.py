"""The engine as it was built, on right inputs: its logits in each paged step against eager's.

Below the runtime: inputs are handed to the compiled model itself, so that a wrong table made by the
runtime does not show here, and a wrong kernel does not hide there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seekforge.compile.bisect_steps import PagedStep
from seekforge.runtime.session import Session

# Of the mean error of a row of logits: so many times what eager in the engine's dtype has against
# float32, and at least this share of the logits' mean magnitude.
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


def logits_share(found: Tensor, eager: Tensor, exact: Tensor, routed: bool) -> float:
    """How much of what is allowed the worst row of logits takes. eager: in the engine's dtype;
    exact: in float32; all [rows, V]. routed: the model has experts, which rounding may swap."""
    error = (found.double() - exact.double()).abs().mean(-1)
    usual = float((eager.double() - exact.double()).abs().mean())
    limit = FACTOR * max(usual, FLOOR * float(exact.abs().mean()))
    if not bool(error.isfinite().all()):
        return float("inf")
    if routed and usual > 0:
        error = error.sort().values[: max(1, int(ROUTED_SHARE * len(error)))]
    return float(error.max()) / limit
