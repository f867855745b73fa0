"""transformers' experts as one operator, and those it can't compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from seekforge.kernels.errors import BuildError
from seekforge.kernels.moe_experts import moe_experts
from seekforge.kernels.tolerance import assert_close
from seekforge.models.exportable import make_exportable

SMALL = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": 64, "moe_intermediate_size": 24, "intermediate_size": 24,
}  # fmt: skip


def build(family: str, **overrides: Any) -> nn.Module:
    with torch.device("meta"):
        config = AutoConfig.for_model(family, **{**SMALL, **overrides})
        module: nn.Module = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return module.eval()


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "qwen3_moe"])
def test_one_node_a_layer(exported: Callable[..., Any], family: str) -> None:
    """x and the routing are what transformers gives; the weights are the module's own."""
    program, module = exported(family)
    nodes = program.nodes(moe_experts)
    assert len(nodes) == sum(hasattr(part, "_apply_gate") for part in module.modules())
    prefix = "model.layers.1.mlp.experts."
    names = [node.target for node in nodes[-1].args[3:]]
    assert names == [prefix + "gate_up_proj", prefix + "down_proj"]


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "qwen3_moe"])
def test_module_still_equals_eager(tiny_model: Callable[..., nn.Module], family: str) -> None:
    ids = torch.randint(0, 293, (2, 5), generator=torch.Generator().manual_seed(0))
    right = tiny_model(family)
    right.set_experts_implementation("eager")  # type: ignore[operator]
    module = make_exportable(tiny_model(family))
    assert_close(module(input_ids=ids).logits, right(input_ids=ids).logits, family)


def test_models_without_experts_keep_their_configuration() -> None:
    module = build("llama")
    before = module.config._experts_implementation  # type: ignore[union-attr]
    make_exportable(module)
    assert module.config._experts_implementation == before  # type: ignore[union-attr]
    assert module.config._attn_implementation == "seekforge"  # type: ignore[union-attr]


def test_other_activation_is_refused() -> None:
    module = build("qwen3_moe", num_experts=4, hidden_act="gelu")
    with pytest.raises(BuildError, match=r"layers\.0\.mlp\.experts.*activation GELUActivation"):
        make_exportable(module)


def test_other_layouts_are_refused() -> None:
    """GPT-OSS: biases, weights transposed, gate and up rows interleaved, a clamped activation."""
    module = build("gpt_oss", num_local_experts=4, layer_types=["full_attention"])
    with pytest.raises(BuildError) as error:
        make_exportable(module)
    for what in ("GptOssExperts", "biases", "transposed", "interleaved", "gating function"):
        assert what in str(error.value)


def test_swish_is_silu() -> None:
    make_exportable(build("qwen3_moe", num_experts=4, hidden_act="swish"))
