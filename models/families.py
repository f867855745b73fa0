"""What differs between the model families, as data: one literal, differences only.

A family is looked up by the `model_type` of config.json. It says how often each fusion must fire in
a graph exported from transformers' own module; fewer matches end the build. It also lists the keys
of config.json of which transformers' module implements, and so this project compiles, only some
values. Knows nothing about files or graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from seekforge.kernels.errors import CheckpointError

if TYPE_CHECKING:
    from seekforge.models.spec import ModelSpec

# Every decoder-only family: matches in each layer, and matches once a model. The first norm of the
# model has no residual to add; each of the other 2 x layers norms follows an addition, with which
# the pass after rms_norm fuses it.
PER_LAYER = {"rms_norm": 2, "add_rms_norm": 2, "rope": 1, "qkv": 1, "kv_cache": 1}
PER_MODEL = {"rms_norm": 1, "logits_rows": 1}


@dataclass(frozen=True, slots=True)
class Family:
    """A family's name, the matches a layer it has beyond `PER_LAYER`, and for some keys of
    config.json the only values that can be compiled (an absent key is fine)."""

    name: str
    per_layer: Mapping[str, int] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


FAMILIES: Mapping[str, Family] = {
    "llama": Family("Llama"),
    "qwen2": Family("Qwen2"),
    "qwen3": Family("Qwen3", per_layer={"rms_norm": 2}),  # q_norm and k_norm, over head_dim
    "qwen3_moe": Family("Qwen3-MoE", per_layer={"rms_norm": 2}),
    "deepseek_v2": Family(
        "DeepSeek-V2",
        per_layer={"rms_norm": 1, "mla": 1},  # kv_a_layernorm
        only={
            "topk_method": ("greedy", "group_limited_greedy"),
            "scoring_func": ("softmax",),
            "norm_topk_prob": (False, None),  # transformers' router never normalises
            "moe_layer_freq": (1,),
            "rope_interleave": (True, None),
        },
    ),
    "deepseek_v3": Family(
        "DeepSeek-V3",
        per_layer={"rms_norm": 1, "mla": 1},
        only={
            "topk_method": ("noaux_tc",),
            "scoring_func": ("sigmoid",),
            "moe_layer_freq": (1,),
        },
    ),
}  # fmt: skip
# Known, and not compiled: what is missing.
MISSING = {
    "deepseek_v32": "the indexer of its sparse attention, which chooses the tokens that each query "
    "sees, and the indexer's own cache",
    "deepseek_v4": "its compressed sparse attention, hyper-connections and hash-routed experts",
}


def family_of(model_type: str | None) -> Family:
    """The family of a `model_type`; raises `CheckpointError` that lists the supported ones, and
    what is missing for one that is known."""
    if model_type in MISSING:
        raise CheckpointError(
            f"model_type {model_type!r} in config.json is not supported: missing is "
            f"{MISSING[model_type]}. Supported are {', '.join(FAMILIES)}."
        )
    if model_type is None or model_type not in FAMILIES:
        raise CheckpointError(
            f"model_type {model_type!r} in config.json is not supported; supported are "
            f"{', '.join(FAMILIES)}. Use a checkpoint of one of these architectures; "
            "`seekforge inspect CHECKPOINT --graph` shows what this one would need."
        )
    return FAMILIES[model_type]


def expected_fusions(spec: ModelSpec) -> dict[str, int]:
    """How many matches each fusion must have in the graph of the whole model."""
    layers, moe_layers = spec.num_layers, spec.num_moe_layers
    expected = dict(PER_MODEL)
    for counts in (PER_LAYER, family_of(spec.model_type).per_layer):
        for fusion, count in counts.items():
            expected[fusion] = expected.get(fusion, 0) + count * layers
    if spec.q_lora_rank is not None:
        expected["rms_norm"] += layers  # q_a_layernorm
    # One gated MLP a layer; a layer with experts has one where some experts are shared.
    expected["swiglu"] = layers - (0 if spec.num_shared_experts else moe_layers)
    expected["moe"] = moe_layers
    return {fusion: count for fusion, count in expected.items() if count}
