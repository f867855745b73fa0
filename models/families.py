"""What differs between the model families, as data: one literal, differences only.

A family is looked up by the `model_type` of config.json. It says how often each fusion must fire in
a graph exported from transformers' own module; fewer matches end the build. Knows nothing about
configurations, files or graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from seekforge.kernels.errors import CheckpointError

if TYPE_CHECKING:
    from seekforge.models.spec import ModelSpec

# Every decoder-only family: matches in each layer, and matches once a model. The first norm of the
# model has no residual to add; each of the other 2 x layers norms follows an addition, with which
# the pass after rms_norm fuses it.
PER_LAYER = {"rms_norm": 2, "add_rms_norm": 2, "rope": 1, "qkv": 1, "swiglu": 1, "kv_cache": 1}
PER_MODEL = {"rms_norm": 1, "logits_rows": 1}


@dataclass(frozen=True, slots=True)
class Family:
    """A family's name, and the matches a layer it has beyond `PER_LAYER`."""

    name: str
    per_layer: Mapping[str, int] = field(default_factory=dict)


FAMILIES: Mapping[str, Family] = {
    "llama": Family("Llama"),
    "qwen2": Family("Qwen2"),
    "qwen3": Family("Qwen3", per_layer={"rms_norm": 2}),  # q_norm and k_norm, over head_dim
}


def family_of(model_type: str | None) -> Family:
    """The family of a `model_type`; raises `CheckpointError` that lists the supported ones."""
    if model_type is None or model_type not in FAMILIES:
        raise CheckpointError(
            f"model_type {model_type!r} in config.json is not supported; supported are "
            f"{', '.join(FAMILIES)}. Use a checkpoint of one of these architectures."
        )
    return FAMILIES[model_type]


def expected_fusions(spec: ModelSpec) -> dict[str, int]:
    """How many matches each fusion must have in the graph of the whole model."""
    expected = dict(PER_MODEL)
    for counts in (PER_LAYER, family_of(spec.model_type).per_layer):
        for fusion, count in counts.items():
            expected[fusion] = expected.get(fusion, 0) + count * spec.num_layers
    return expected
