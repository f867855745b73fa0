"""transformers' module without weights: names, shapes, real frequencies; and the eager oracle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from seekforge.models.checkpoint import open_checkpoint, tensor_for_parameter
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
        stored = checkpoint.read(tensor_for_parameter(checkpoint, BIASES[name]))
        assert stored.abs().max() > 0.1  # filled: a bias dropped later changes the logits


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_module_filled_from_the_checkpoint_equals_eager(
    tiny_checkpoint: Callable[..., Path], tiny_model: Callable[..., nn.Module], family: str
) -> None:
    """Every tensor reaches its parameter: what the weight writer does, in small."""
    for overrides in ({}, {"tie_word_embeddings": True}):
        checkpoint = open_checkpoint(tiny_checkpoint(family, **overrides))
        module = build_module(checkpoint.config, torch.float32)
        weights = {
            fqn: checkpoint.read(tensor_for_parameter(checkpoint, fqn))
            for fqn in module.state_dict()
        }
        module.load_state_dict(weights, assign=True)
        ids = torch.randint(3, 280, (2, 21), generator=torch.Generator().manual_seed(0))
        right = tiny_model(family, **overrides)(ids).logits
        assert right.abs().max() > 2  # loud enough to hear a wrong weight
        torch.testing.assert_close(module(ids).logits, right, rtol=1e-5, atol=1e-5)


def test_load_eager_dtype_and_attention(tiny_checkpoint: Callable[..., Path]) -> None:
    path = tiny_checkpoint("qwen2")
    eager, sdpa = load_eager(path, torch.float32), load_eager(path, torch.float32, "sdpa")
    ids = torch.arange(3, 14)[None]
    torch.testing.assert_close(eager(ids).logits, sdpa(ids).logits, rtol=1e-4, atol=1e-4)
    half = load_eager(path, torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert not half.training
    assert not any(p.requires_grad for p in half.parameters())
