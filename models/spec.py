"""The model's dimensions, read off a transformers configuration, and what is refused by them.

In: a `PreTrainedConfig` (of any size; nothing is allocated). Out: a `ModelSpec`, which the manifest
stores. Knows nothing about files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedConfig

from seekforge.kernels.errors import CheckpointError, InputError
from seekforge.models.families import Family, family_of
from seekforge.models.module import count_parameters
from seekforge.models.moe import read_experts

# RoPE kinds whose frequencies are fixed by the configuration alone.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# Kinds whose frequencies follow the length of each request: a key that was rotated and cached while
# the request was short would have to be rotated again once it is long.
LENGTH_DEPENDENT_ROPE_TYPES = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Dimensions of one model. Sizes count elements, lengths count tokens, `parameters` counts a
    tied embedding once.

    head_dim: of a query and a key as they are multiplied; with multi-head latent attention (MLA)
    qk_nope_head_dim + qk_rope_head_dim. v_head_dim: of a value, equal to head_dim but for MLA. The
    other MLA sizes are 0 and q_lora_rank is None for usual attention (q_lora_rank is None too for
    MLA with one query projection); the experts' sizes are 0 for a dense model.
    """

    family: str
    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope_type: str
    parameters: int
    kv_lora_rank: int = 0
    q_lora_rank: int | None = None
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    num_shared_experts: int = 0
    num_moe_layers: int = 0
    moe_intermediate_size: int = 0

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> ModelSpec:
        """Reads and checks a configuration; raises `CheckpointError` naming the offending key."""
        family = family_of(config.model_type)
        _check_values(config, family)
        heads = config.num_attention_heads
        kv_heads = config.num_key_value_heads or heads
        if kv_heads < 1 or heads % kv_heads:
            raise CheckpointError(
                f"config.json: num_key_value_heads {kv_heads} does not divide num_attention_heads "
                f"{heads}; each K/V head serves equally many query heads. Correct config.json."
            )
        if config.hidden_act not in ("silu", "swish"):
            raise CheckpointError(
                f"config.json: hidden_act {config.hidden_act!r} is not supported; the gated MLP is "
                "compiled with 'silu'."
            )
        experts = read_experts(config)
        return cls(
            family=family.name,
            model_type=config.model_type,
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=heads,
            num_kv_heads=kv_heads,
            **_head_sizes(config, heads, kv_heads),
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_position_embeddings,
            tie_word_embeddings=bool(config.tie_word_embeddings),
            rope_type=rope_type_of(config),
            parameters=count_parameters(config),
            num_experts=experts.num_experts,
            experts_per_token=experts.experts_per_token,
            num_shared_experts=experts.num_shared_experts,
            num_moe_layers=len(experts.layers),
            moe_intermediate_size=experts.moe_intermediate_size,
        )

    @property
    def kv_pools(self) -> dict[str, tuple[int, ...]]:
        """What one token leaves in each layer's cache, by pool: K and V of all KV heads, or with
        MLA one latent and the rotated key that all heads share."""
        if self.kv_lora_rank:
            return {"latent": (self.kv_lora_rank + self.qk_rope_head_dim,)}
        kv_heads = self.num_kv_heads
        return {"k": (kv_heads, self.head_dim), "v": (kv_heads, self.v_head_dim)}

    def to_dict(self) -> dict[str, Any]:
        """Plain values for manifest.json."""
        return asdict(self)


def _check_values(config: PreTrainedConfig, family: Family) -> None:
    """Refuses keys with values that transformers' module ignores or does not implement."""
    for key, values in family.only.items():
        value = getattr(config, key, values[0])
        if value not in values:
            raise CheckpointError(
                f"config.json: {key} {value!r} is not supported for {config.model_type}: "
                f"transformers' module knows only {' and '.join(map(repr, values))}, and engines "
                "are compiled from it."
            )


def _head_sizes(config: PreTrainedConfig, heads: int, kv_heads: int) -> Mapping[str, Any]:
    """The sizes of one head. The `head_dim` of transformers' DeepSeek configurations is the rotary
    part alone (qk_rope_head_dim)."""
    if not hasattr(config, "kv_lora_rank"):
        # An explicit head_dim wins: Qwen3 has heads * head_dim != hidden_size.
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return {"head_dim": head_dim, "v_head_dim": head_dim}
    if kv_heads != heads:
        raise CheckpointError(
            f"config.json: num_key_value_heads {kv_heads} is not num_attention_heads {heads}; in "
            f"{config.model_type} every head has its own keys, made of one shared latent. Correct "
            "config.json."
        )
    keys = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    return {"head_dim": head_dim} | {key: getattr(config, key) for key in keys}


def rope_type_of(config: PreTrainedConfig) -> str:
    """The kind of RoPE; raises `CheckpointError` for one that is unknown or cannot be compiled.

    transformers merges `rope_scaling` and `rope_theta` into `rope_parameters` and copies the old
    spelling `type` to `rope_type` unless that is present too: with both, `rope_type` wins.
    transformers itself only warns about an unknown kind, and fails later without naming it.
    """
    parameters = config.rope_parameters or {}
    if any(isinstance(value, dict) for value in parameters.values()):
        raise CheckpointError(
            f"config.json: rope_parameters has one entry for each of {', '.join(parameters)}; "
            f"{config.model_type} models have one RoPE for all layers. Write it without nesting."
        )
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind in LENGTH_DEPENDENT_ROPE_TYPES:
        raise CheckpointError(
            f"config.json: RoPE type {kind!r} is not supported: its frequencies change with the "
            "length of each request, and keys already rotated in the cache cannot follow. "
            f"Supported: {', '.join(ROPE_TYPES)}."
        )
    if kind not in ROPE_TYPES:
        raise CheckpointError(
            f"config.json: RoPE type {kind!r} (rope_type or type) is unknown; supported: "
            f"{', '.join(ROPE_TYPES)}."
        )
    partial = parameters.get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise CheckpointError(
            f"config.json: partial_rotary_factor {partial} is not supported for "
            f"{config.model_type}, whose modules rotate the whole head. Remove the key."
        )
    return str(kind)


def check_max_len(config: PreTrainedConfig, max_len: int) -> None:
    """Raises `InputError` unless sequences of `max_len` tokens (prompt and output) are within the
    model's positions, and every sliding window is long enough to see all of them.

    max_position_embeddings is the longest context whatever factor a RoPE scaling has: published
    configurations list the extended length there, and none is extended further.
    """
    limit = config.max_position_embeddings
    if not 1 <= max_len <= limit:
        raise InputError(
            f"--max-len {max_len} is outside 1..{limit}: the model has {limit} positions "
            f"(max_position_embeddings in config.json). Give --max-len {limit} or less."
        )
    window = getattr(config, "sliding_window", None)
    # Qwen3-MoE has no layer_types: its window is in all layers.
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        layer_types = ["sliding_attention"] * config.num_hidden_layers
    sliding = [i for i, kind in enumerate(layer_types) if kind == "sliding_attention"]
    # Position i sees j when i - j < window, so a window of max_len hides nothing.
    if window is not None and sliding and window < max_len:
        raise InputError(
            f"--max-len {max_len} is longer than the sliding window of {window} tokens that layers "
            f"{sliding[0]} to {sliding[-1]} have (use_sliding_window in config.json); windowed "
            f"attention is not compiled. Give --max-len {window} or less."
        )
