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
MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "deepseek_v2": MLA | {"q_lora_rank": None, "topk_method": "group_limited_greedy"},
    "deepseek_v3": MLA | {"q_lora_rank": 24},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 6},
}  # fmt: skip


def config_of(family: str, **overrides: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(family, **{**SIZES, **OF_FAMILY.get(family, {}), **overrides})


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
    with pytest.raises(
        CheckpointError, match=r"'gpt2'.*llama, qwen2, qwen3, qwen3_moe, deepseek_v2, deepseek_v3"
    ):
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


def test_max_len_within_the_window_of_a_family_without_layer_types() -> None:
    config = config_of("qwen3_moe", use_sliding_window=True, sliding_window=16)
    with pytest.raises(InputError, match=r"--max-len 17 .*window of 16 tokens that layers 0 to 1"):
        check_max_len(config, 17)
    check_max_len(config_of("qwen3_moe", use_sliding_window=False, sliding_window=16), 256)


@pytest.mark.parametrize(
    ("family", "length", "scaling", "limit"),
    [
        (
            "llama",
            256,
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            256,
        ),
        ("qwen2", 64, {"type": "yarn", "factor": 4.0}, 64),  # Qwen2.5: no extension is assumed
        (
            "llama",
            256,
            LLAMA3 | {"rope_type": "llama3", "original_max_position_embeddings": 64},
            256,
        ),
        (
            "deepseek_v3",
            256,
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.7},
            256,
        ),
    ],
)
def test_max_position_embeddings_is_the_extended_length(
    family: str, length: int, scaling: dict[str, Any], limit: int
) -> None:
    """Whatever the scaling's factor: a longer context has to be written into
    max_position_embeddings."""
    config = config_of(family, max_position_embeddings=length, rope_scaling=scaling)
    assert ModelSpec.from_config(config).max_position_embeddings == limit
    check_max_len(config, limit)
    with pytest.raises(InputError, match=rf"1\.\.{limit}"):
        check_max_len(config, limit + 1)


def test_mla_spec() -> None:
    spec = ModelSpec.from_config(config_of("deepseek_v3", num_hidden_layers=3))
    assert (spec.head_dim, spec.v_head_dim, spec.num_kv_heads) == (8 + 4, 10, 4)
    assert (spec.kv_lora_rank, spec.q_lora_rank) == (16, 24)
    assert (spec.num_experts, spec.experts_per_token, spec.num_shared_experts) == (8, 2, 1)
    assert (spec.num_moe_layers, spec.moe_intermediate_size) == (2, 6)
    assert spec.kv_pools == {"latent": (20,)}


def test_kv_pools_of_usual_attention() -> None:
    assert ModelSpec.from_config(config_of("llama")).kv_pools == {"k": (2, 8), "v": (2, 8)}


PER_LAYER = {"add_rms_norm": 2, "rope": 1, "qkv": 1, "kv_cache": 1}


@pytest.mark.parametrize(
    ("family", "overrides", "others"),
    [
        ("llama", {}, {"rms_norm": 9, "swiglu": 4}),
        ("qwen2", {}, {"rms_norm": 9, "swiglu": 4}),
        ("qwen3", {}, {"rms_norm": 17, "swiglu": 4}),
        ("qwen3_moe", {}, {"rms_norm": 17, "moe": 4}),
        ("qwen3_moe", {"decoder_sparse_step": 2}, {"rms_norm": 17, "swiglu": 2, "moe": 2}),
        ("qwen3_moe", {"mlp_only_layers": [0]}, {"rms_norm": 17, "swiglu": 1, "moe": 3}),
        (
            "qwen3_moe",
            {"decoder_sparse_step": 2, "mlp_only_layers": [1]},
            {"rms_norm": 17, "swiglu": 3, "moe": 1},
        ),
        ("deepseek_v2", {}, {"rms_norm": 13, "swiglu": 4, "moe": 3, "mla": 4}),
        ("deepseek_v2", {"q_lora_rank": 24}, {"rms_norm": 17, "swiglu": 4, "moe": 3, "mla": 4}),
        ("deepseek_v3", {}, {"rms_norm": 17, "swiglu": 4, "moe": 3, "mla": 4}),
        ("deepseek_v3", {"q_lora_rank": None}, {"rms_norm": 13, "swiglu": 4, "moe": 3, "mla": 4}),
        (
            "deepseek_v3",
            {"first_k_dense_replace": 0},
            {"rms_norm": 17, "swiglu": 4, "moe": 4, "mla": 4},
        ),
        (
            "deepseek_v3",
            {"first_k_dense_replace": 3},
            {"rms_norm": 17, "swiglu": 4, "moe": 1, "mla": 4},
        ),
        ("deepseek_v3", {"first_k_dense_replace": 4}, {"rms_norm": 17, "swiglu": 4, "mla": 4}),
    ],
)
def test_expected_fusions(family: str, overrides: dict[str, Any], others: dict[str, int]) -> None:
    spec = ModelSpec.from_config(config_of(family, num_hidden_layers=4, **overrides))
    per_layer = {name: 4 * count for name, count in PER_LAYER.items()}
    assert expected_fusions(spec) == per_layer | {"logits_rows": 1} | others


@pytest.mark.parametrize("family", FAMILIES)
def test_expected_counts_are_those_of_the_module(family: str) -> None:
    config = config_of(family)
    names = [type(part).__name__ for part in build_module(config, torch.float32).modules()]
    expected = expected_fusions(ModelSpec.from_config(config))
    assert expected["rms_norm"] == sum(name.endswith("RMSNorm") for name in names)
    assert expected["add_rms_norm"] == 2 * config.num_hidden_layers
    assert expected.get("moe", 0) == sum(name.endswith("Experts") for name in names)
    assert expected.get("swiglu", 0) == sum(name.endswith("MLP") for name in names)


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("deepseek_v2", {"topk_method": "noaux_tc"}, r"topk_method 'noaux_tc'.*deepseek_v2"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob True"),
        ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method 'greedy'"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads 2 is not"),
        ("deepseek_v3", {"n_group": 3}, "n_group 3 and topk_group 2 do not fit 8 experts"),
        ("deepseek_v3", {"n_group": None}, "n_group None"),
        ("deepseek_v3", {"topk_group": 5}, "topk_group 5"),
        ("deepseek_v3", {"n_group": 8}, "one expert a group"),
        ("deepseek_v3", {"topk_group": 1, "num_experts_per_tok": 3}, "more than the 2 experts"),
        ("deepseek_v3", {"num_experts_per_tok": 9}, r"num_experts_per_tok 9 is outside 1\.\.8"),
        ("deepseek_v3", {"n_shared_experts": 0}, "n_shared_experts 0"),
        ("qwen3_moe", {"num_experts_per_tok": 0}, "num_experts_per_tok 0"),
        ("deepseek_v32", {}, "'deepseek_v32'.*indexer"),
        ("deepseek_v4", {}, "'deepseek_v4'.*compressed sparse attention"),
    ],
)
def test_refused_by_name(family: str, overrides: dict[str, Any], message: str) -> None:
    config = AutoConfig.for_model("deepseek_v3")
    if family in FAMILIES:
        config = config_of(family, **overrides)
    else:
        config.model_type = family
    with pytest.raises(CheckpointError, match=message):
        ModelSpec.from_config(config)


@pytest.mark.parametrize(
    "overrides",
    [
        {"n_group": 1, "topk_group": 1},
        {"topk_method": "greedy", "n_group": None, "topk_group": None},
        {"n_group": 8},  # one expert a group: its score is the group's
        {"moe_layer_freq": 1, "scoring_func": "softmax"},  # as V2-Lite's file has them
    ],
)
def test_v2_router_accepted(overrides: dict[str, Any]) -> None:
    assert ModelSpec.from_config(config_of("deepseek_v2", **overrides)).num_experts == 8
