"""transformers' module without weights: names, shapes, real frequencies; and the eager oracle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from seekforge.models.checkpoint import open_checkpoint, tensors_for_parameter
from seekforge.models.module import build_module, load_eager

BIASES = {
    "q_proj": "model.layers.0.self_attn.q_proj.bias",
    "k_proj": "model.layers.0.self_attn.k_proj.bias",
    "v_proj": "model.layers.0.self_attn.v_proj.bias",
    "o_proj": "model.layers.0.self_attn.o_proj.bias",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_are_meta_and_frequencies_real(
    tiny_checkpoint: Callable[..., Path], dtype: torch.dtype
) -> None:
    module = build_module(open_checkpoint(tiny_checkpoint("llama")).config, dtype)
    assert {(p.device.type, p.dtype, p.requires_grad) for p in module.parameters()} == {
        ("meta", dtype, False)
    }
    buffers = dict(module.named_buffers())
    assert "model.rotary_emb.inv_freq" in buffers
    assert {(b.device.type, b.dtype) for b in buffers.values()} == {("cpu", torch.float32)}
    assert not any(part.training for part in module.modules())
    assert not module.state_dict().keys() & buffers.keys()  # still not part of a checkpoint


@pytest.mark.parametrize(
    ("family", "overrides", "biased"),
    [
        ("qwen2", {}, {"q_proj", "k_proj", "v_proj"}),
        ("qwen3", {"attention_bias": False}, set()),
        ("llama", {}, set()),
        ("llama", {"attention_bias": True}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
    ],
)
def test_attention_biases_come_from_the_checkpoint(
    tiny_checkpoint: Callable[..., Path],
    family: str,
    overrides: dict[str, bool],
    biased: set[str],
) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint(family, **overrides))
    names = build_module(checkpoint.config, torch.float32).state_dict().keys()
    assert {name for name, bias in BIASES.items() if bias in names} == biased
    for name in biased:
        stored = checkpoint.read(*tensors_for_parameter(checkpoint, BIASES[name]))
        assert stored.abs().max() > 0.1  # filled: a bias dropped later changes the logits


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"tie_word_embeddings": True, "mlp_only_layers": [0]}),
    ("deepseek_v2", {}),
    ("deepseek_v2", {"n_group": None, "topk_group": None, "first_k_dense_replace": 0}),
    ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),
    ("deepseek_v2", {"q_lora_rank": 24, "first_k_dense_replace": 2}),  # dense throughout
    ("deepseek_v3", {}),
    ("deepseek_v3", {"num_hidden_layers": 4, "first_k_dense_replace": 3, "q_lora_rank": None}),
    ("deepseek_v3", {"n_group": 1, "topk_group": 1, "tie_word_embeddings": True}),
]


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_module_filled_from_the_checkpoint_equals_eager(
    tiny_checkpoint: Callable[..., Path],
    tiny_model: Callable[..., nn.Module],
    family: str,
    overrides: dict[str, Any],
) -> None:
    """Every tensor reaches its parameter: what the weight writer does, in small."""
    checkpoint = open_checkpoint(tiny_checkpoint(family, **overrides))
    module = build_module(checkpoint.config, torch.float32)
    weights = {
        fqn: torch.cat([checkpoint.read(name) for name in tensors_for_parameter(checkpoint, fqn)])
        for fqn in module.state_dict()
    }
    shaped = {fqn: weights[fqn].view(meta.shape) for fqn, meta in module.state_dict().items()}
    module.load_state_dict(shaped, assign=True)
    ids = torch.randint(3, 280, (2, 21), generator=torch.Generator().manual_seed(0))
    right = tiny_model(family, **overrides)(ids).logits
    assert right.abs().max() > 2  # loud enough to hear a wrong weight
    torch.testing.assert_close(module(ids).logits, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v2", "qwen3_moe"])
def test_module_has_the_dtypes_of_the_oracle(
    tiny_checkpoint: Callable[..., Path], family: str, dtype: torch.dtype
) -> None:
    path = tiny_checkpoint(family)
    compiled = build_module(open_checkpoint(path).config, dtype).state_dict()
    eager = load_eager(path, dtype).state_dict()
    assert {name: t.dtype for name, t in compiled.items()} == {n: t.dtype for n, t in eager.items()}
    if family == "deepseek_v3":
        bias = "model.layers.1.mlp.gate.e_score_correction_bias"
        assert compiled[bias].dtype == torch.float32 and compiled[bias].is_meta


def test_load_eager_dtype_and_attention(tiny_checkpoint: Callable[..., Path]) -> None:
    path = tiny_checkpoint("qwen2")
    eager, sdpa = load_eager(path, torch.float32), load_eager(path, torch.float32, "sdpa")
    ids = torch.arange(3, 14)[None]
    torch.testing.assert_close(eager(ids).logits, sdpa(ids).logits, rtol=1e-4, atol=1e-4)
    half = load_eager(path, torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert not half.training
    assert not any(p.requires_grad for p in half.parameters())
