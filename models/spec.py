"""The model's dimensions, read off a transformers configuration, and what is refused by them.

In: a `PreTrainedConfig` (of any size; nothing is allocated). Out: a `ModelSpec`, which the manifest
stores. Knows nothing about files.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedConfig

from seekforge.kernels.errors import CheckpointError, InputError
from seekforge.models.families import family_of
from seekforge.models.module import count_parameters

# RoPE kinds whose frequencies are fixed by the configuration alone.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# Kinds whose frequencies follow the length of each request: a key that was rotated and cached while
# the request was short would have to be rotated again once it is long.
LENGTH_DEPENDENT_ROPE_TYPES = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Dimensions of one model. Sizes count elements, lengths count tokens, `parameters` counts a
    tied embedding once."""

    family: str
    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope_type: str
    parameters: int

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> ModelSpec:
        """Reads and checks a configuration; raises `CheckpointError` naming the offending key."""
        family = family_of(config.model_type)
        heads = config.num_attention_heads
        kv_heads = config.num_key_value_heads or heads
        # An explicit head_dim wins: Qwen3 has heads * head_dim != hidden_size.
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
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
        return cls(
            family=family.name,
            model_type=config.model_type,
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_position_embeddings,
            tie_word_embeddings=bool(config.tie_word_embeddings),
            rope_type=rope_type_of(config),
            parameters=count_parameters(config),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for manifest.json."""
        return asdict(self)


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
    model's positions, and every sliding window is long enough to see all of them."""
    limit = config.max_position_embeddings
    if not 1 <= max_len <= limit:
        raise InputError(
            f"--max-len {max_len} is outside 1..{limit}: the model has {limit} positions "
            f"(max_position_embeddings in config.json). Give --max-len {limit} or less."
        )
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None) or []
    sliding = [i for i, kind in enumerate(layer_types) if kind == "sliding_attention"]
    # Position i sees j when i - j < window, so a window of max_len hides nothing.
    if window is not None and sliding and window < max_len:
        raise InputError(
            f"--max-len {max_len} is longer than the sliding window of {window} tokens that layers "
            f"{sliding[0]} to {sliding[-1]} have (use_sliding_window in config.json); windowed "
            f"attention is not compiled. Give --max-len {window} or less."
        )
