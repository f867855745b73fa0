"""Configurations: what is read, what is refused, and the RoPE frequencies that follow from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from seekforge.kernels.errors import CheckpointError, InputError
from seekforge.models.families import FAMILIES, expected_fusions
from seekforge.models.module import build_module
from seekforge.models.spec import ModelSpec, check_max_len

SIZES = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def config_of(family: str, **overrides: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(family, **{**SIZES, **overrides})


def inv_freq(config: PreTrainedConfig) -> torch.Tensor:
    return build_module(config, torch.float32).get_buffer("model.rotary_emb.inv_freq")


def test_spec_reads_explicit_head_dim() -> None:
    spec = ModelSpec.from_config(
        config_of("qwen3", hidden_size=40, num_key_value_heads=1, head_dim=16)
    )
    assert (spec.family, spec.num_heads, spec.num_kv_heads, spec.head_dim) == ("Qwen3", 4, 1, 16)
    # embedding and head 2 * 101 * 40, final norm 40; a layer: q 64x40, k and v 16x40, o 40x64,
    # q_norm and k_norm 16, gate, up and down 56x40, two norms 40
    layer = 64 * 40 + 2 * 16 * 40 + 40 * 64 + 2 * 16 + 3 * 56 * 40 + 2 * 40
    assert spec.parameters == 2 * 101 * 40 + 40 + 2 * layer
    assert spec.to_dict()["parameters"] == spec.parameters


def test_spec_derives_head_dim_and_counts_a_tied_embedding_once() -> None:
    untied = ModelSpec.from_config(config_of("qwen2"))
    tied = ModelSpec.from_config(config_of("qwen2", tie_word_embeddings=True))
    assert untied.head_dim == 8
    assert untied.parameters - tied.parameters == 101 * 32
    assert (tied.tie_word_embeddings, untied.tie_word_embeddings) == (True, False)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_kv_heads_that_divide(kv_heads: int) -> None:
    config = config_of("qwen3", hidden_size=40, head_dim=16, num_key_value_heads=kv_heads)
    weights = build_module(config, torch.float32).state_dict()
    assert ModelSpec.from_config(config).num_kv_heads == kv_heads
    assert weights["model.layers.0.self_attn.k_proj.weight"].shape == (16 * kv_heads, 40)


def test_kv_heads_that_do_not_divide() -> None:
    config = config_of("llama", num_key_value_heads=3)
    with pytest.raises(CheckpointError, match=r"num_key_value_heads 3 .* num_attention_heads 4"):
        ModelSpec.from_config(config)


@pytest.mark.parametrize("spelling", [("rope_type",), ("type",), ("rope_type", "type")])
def test_llama3_rope_in_every_spelling(spelling: tuple[str, ...]) -> None:
    scaling = LLAMA3 | dict.fromkeys(spelling, "llama3")
    config = config_of("llama", head_dim=16, rope_theta=5e5, rope_scaling=scaling)
    right = [1.0, 0.1911265, 0.00470075, 0.00091158, 0.00017678, 3.428e-5, 6.65e-6, 1.29e-6]
    assert ModelSpec.from_config(config).rope_type == "llama3"
    torch.testing.assert_close(inv_freq(config), torch.tensor(right), rtol=1e-3, atol=0)


def test_linear_rope_is_applied_once() -> None:
    scaling = {"type": "linear", "factor": 4.0}  # DeepSeek-Coder's spelling
    config = config_of("llama", rope_theta=1e4, rope_scaling=scaling)
    assert ModelSpec.from_config(config).rope_type == "linear"
    right = torch.tensor([0.25, 0.025, 0.0025, 0.00025])
    torch.testing.assert_close(inv_freq(config), right, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scaling", [None, {"rope_type": "default"}, {"type": "default"}])
def test_default_rope(scaling: dict[str, Any] | None) -> None:
    config = config_of("llama", rope_theta=1e4, rope_scaling=scaling)
    assert ModelSpec.from_config(config).rope_type == "default"
    torch.testing.assert_close(inv_freq(config), torch.tensor([1.0, 0.1, 0.01, 0.001]))


def test_rope_type_wins_over_type() -> None:
    """As in transformers, whose frequencies are the ones computed with."""
    scaling = {"rope_type": "linear", "type": "foo", "factor": 2.0}
    config = config_of("llama", rope_theta=1e4, rope_scaling=scaling)
    assert ModelSpec.from_config(config).rope_type == "linear"
    torch.testing.assert_close(inv_freq(config), torch.tensor([0.5, 0.05, 0.005, 0.0005]))


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "foo", "factor": 2.0}, "'foo'.*unknown"),
        ({"type": "foo", "factor": 2.0}, "'foo'.*unknown"),
        ({"rope_type": "foo", "type": "linear", "factor": 2.0}, "'foo'.*unknown"),
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic'.*length of each request"),
        ({"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}, "'longrope'"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "partial_rotary"),
    ],
)
def test_rope_refused_by_name(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ModelSpec.from_config(config_of("llama", rope_scaling=scaling))


def test_other_activation_is_refused() -> None:
    with pytest.raises(CheckpointError, match="hidden_act 'gelu'"):
        ModelSpec.from_config(config_of("llama", hidden_act="gelu"))


def test_unknown_architecture_lists_the_known() -> None:
    config = AutoConfig.for_model("gpt2")
    with pytest.raises(CheckpointError, match=r"'gpt2'.*llama, qwen2, qwen3"):
        ModelSpec.from_config(config)


def test_max_len_within_the_models_positions() -> None:
    config = config_of("llama")
    check_max_len(config, 1)
    check_max_len(config, 256)
    for max_len in (0, 257):
        with pytest.raises(InputError, match=rf"--max-len {max_len} .*1\.\.256"):
            check_max_len(config, max_len)


def test_max_len_within_the_sliding_window() -> None:
    """Qwen2's window is for layers with index >= max_window_layers."""
    window = {"use_sliding_window": True, "sliding_window": 16}
    config = config_of("qwen2", **window, max_window_layers=1)
    check_max_len(config, 16)
    with pytest.raises(InputError, match=r"--max-len 17 .*window of 16 tokens that layers 1 to 1"):
        check_max_len(config, 17)
    check_max_len(config_of("qwen2", **window, max_window_layers=2), 256)  # no layer has it
    check_max_len(config_of("qwen2", **window | {"use_sliding_window": False}), 256)


@pytest.mark.parametrize(("family", "rms_norm"), [("llama", 7), ("qwen2", 7), ("qwen3", 13)])
def test_expected_fusions(family: str, rms_norm: int) -> None:
    spec = ModelSpec.from_config(config_of(family, num_hidden_layers=3))
    assert expected_fusions(spec) == {
        "rms_norm": rms_norm,
        "add_rms_norm": 6,
        "rope": 3,
        "qkv": 3,
        "swiglu": 3,
        "kv_cache": 3,
        "logits_rows": 1,
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_expected_norms_are_all_norms_of_the_module(family: str) -> None:
    config = config_of(family)
    names = [type(part).__name__ for part in build_module(config, torch.float32).modules()]
    expected = expected_fusions(ModelSpec.from_config(config))
    assert expected["rms_norm"] == sum(name.endswith("RMSNorm") for name in names)
    assert expected["add_rms_norm"] == 2 * config.num_hidden_layers
