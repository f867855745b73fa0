"""Smoothing changes nothing before rounding: every pair of every family, in transformers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from seekforge.compile.awq_smoothing import Factors, Heads, merged, smoothing, tied
from seekforge.kernels.tolerance import normalised_error
from seekforge.models.awq_groups import GROUPS, ScaleGroup, scale_groups

LAYER = 1  # of deepseek_*: the first with experts
FAMILIES: list[tuple[str, dict[str, object]]] = [
    ("llama", {}),
    ("llama", {"num_key_value_heads": 4}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("qwen3_moe", {}),
    ("deepseek_v2", {}),
    ("deepseek_v3", {}),
]


def heads_of(config: object) -> Heads:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads  # type: ignore[attr-defined]
    if hasattr(config, "kv_lora_rank"):
        return Heads(heads, 1, config.v_head_dim, config.qk_nope_head_dim)  # type: ignore[attr-defined]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads  # type: ignore[attr-defined]
    return Heads(kv_heads, heads // kv_heads, head_dim)


def draw_scales(group: ScaleGroup, layer: nn.Module, heads: Heads) -> Tensor:
    """Scales between 1/8 and 8; each expert's own for `down`."""
    weight = dict(layer.named_parameters())[group.linears[0]]
    experts = weight.shape[:1] if group.rows == "up" else ()
    scales = torch.exp2(6 * torch.rand(*experts, weight.shape[-1]) - 3)
    return scales if experts else tied(group.rows, scales, heads)


def apply(layer: nn.Module, factors: dict[str, Factors]) -> None:
    for name, parameter in layer.named_parameters():
        if name in factors:
            parameter.data = factors[name].apply(parameter.data)


def groups_of(model: nn.Module, index: int) -> list[ScaleGroup]:
    layer = model.model.layers[index]  # type: ignore[union-attr, index]
    return scale_groups(model.config.model_type, dict(layer.named_parameters()))  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize(("family", "overrides"), FAMILIES)
def test_every_pair_is_invariant(
    tiny_model: Callable[..., nn.Module], family: str, overrides: dict[str, object]
) -> None:
    torch.manual_seed(0)
    ids = torch.randint(3, 290, (2, 9))
    right = tiny_model(family, **overrides)(ids).logits
    count = len(groups_of(tiny_model(family, **overrides), LAYER))
    for i in range(count + 1):  # the last time all groups together
        model = tiny_model(family, **overrides)
        layer, heads = model.model.layers[LAYER], heads_of(model.config)  # type: ignore[union-attr, index]
        groups = groups_of(model, LAYER)
        chosen = groups if i == count else [groups[i]]
        names = dict(layer.named_parameters())
        parts = [smoothing(g, draw_scales(g, layer, heads), heads, names) for g in chosen]
        changed = {name: tensor.data.clone() for name, tensor in names.items()}
        apply(layer, merged(parts))
        for group in chosen:
            for name in (group.producer, *group.readers):
                assert not torch.equal(changed[name], names[name]), f"{name} is as it was"
        error = normalised_error(model(ids).logits, right)
        assert error < 1e-10, f"{chosen}: error {error:.1e}"


def test_biases_follow(tiny_model: Callable[..., nn.Module]) -> None:
    """Qwen2's v has a bias; without its scaling the outputs differ."""
    model = tiny_model("qwen2")
    layer, heads = model.model.layers[0], heads_of(model.config)  # type: ignore[union-attr, index]
    names = dict(layer.named_parameters())
    group = next(group for group in groups_of(model, 0) if group.rows == "kv_heads")
    factors = smoothing(group, draw_scales(group, layer, heads), heads, names)
    assert "self_attn.v_proj.bias" in factors


def test_groups_of_layers(tiny_model: Callable[..., nn.Module]) -> None:
    v3 = tiny_model("deepseek_v3")
    dense, moe = groups_of(v3, 0), groups_of(v3, 1)
    assert [group.producer for group in dense] == [
        "input_layernorm.weight", "self_attn.q_a_layernorm.weight",
        "self_attn.kv_a_layernorm.weight", "self_attn.kv_b_proj.weight",
        "post_attention_layernorm.weight", "mlp.up_proj.weight",
    ]  # fmt: skip
    assert moe[4].others == ("mlp.gate.weight",)
    assert [group.producer for group in moe[5:]] == [
        "mlp.experts.gate_up_proj", "mlp.shared_experts.up_proj.weight",
    ]  # fmt: skip
    v2 = groups_of(tiny_model("deepseek_v2"), 0)
    assert v2[0].linears == ("self_attn.q_proj.weight", "self_attn.kv_a_proj_with_mqa.weight")


def test_kept_weights_follow_but_do_not_lead(tiny_model: Callable[..., nn.Module]) -> None:
    names = dict(tiny_model("deepseek_v3").model.layers[0].named_parameters())  # type: ignore[union-attr, index]
    kept = ("self_attn.kv_b_proj.weight", "mlp.gate_proj.weight")
    groups = {group.producer: group for group in scale_groups("deepseek_v3", names, kept)}
    assert "self_attn.kv_a_layernorm.weight" not in groups
    assert groups["post_attention_layernorm.weight"].linears == ("mlp.up_proj.weight",)
    assert groups["post_attention_layernorm.weight"].others == ("mlp.gate_proj.weight",)
    assert groups["self_attn.kv_b_proj.weight"].linears == ("self_attn.o_proj.weight",)


def test_every_quantised_weight_is_in_a_group(tiny_model: Callable[..., nn.Module]) -> None:
    """All matrices but the router are read by some group."""
    for family in GROUPS:
        model = tiny_model(family)
        for index, layer in enumerate(model.model.layers):  # type: ignore[union-attr, arg-type]
            groups = groups_of(model, index)
            read = {name for group in groups for name in group.linears}
            matrices = {n for n, p in layer.named_parameters() if p.ndim > 1 and "gate.w" not in n}
            assert read == matrices, family


def test_tied_scales_repeat_each() -> None:
    """B33: 2 KV heads, 2 query heads each, head_dim 3: heads 0 and 1 share, not 0 and 2."""
    heads = Heads(kv_heads=2, repeats=2, v_head_dim=3)
    channels = torch.arange(12.0)
    expected = [1.5, 2.5, 3.5, 1.5, 2.5, 3.5, 7.5, 8.5, 9.5, 7.5, 8.5, 9.5]
    assert tied("kv_heads", channels, heads).tolist() == expected
    assert torch.equal(tied("all", channels, heads), channels)


def test_only_value_rows_of_kv_b_are_scaled() -> None:
    """B33: per head 2 key rows, then 3 value rows."""
    heads = Heads(kv_heads=2, repeats=1, v_head_dim=3, nope=2)
    group = ScaleGroup("self_attn.kv_b_proj.weight", ("self_attn.o_proj.weight",), rows="values")
    factors = smoothing(group, torch.full((6,), 2.0), heads, ())
    rows = factors["self_attn.kv_b_proj.weight"].rows
    assert rows is not None and rows.tolist() == [1, 1, 0.5, 0.5, 0.5] * 2


def test_factors_round_once() -> None:
    weight = torch.full((2, 2), 1 / 3, dtype=torch.bfloat16)
    factors = Factors(rows=torch.tensor([3.0, 1.0]), columns=torch.tensor([1 / 3, 1.0]))
    expected = (weight.float() * torch.tensor([[1.0, 3.0], [1 / 3, 1.0]])).to(torch.bfloat16)
    assert torch.equal(factors.apply(weight), expected)
    twice = Factors(rows=torch.tensor([3.0, 1.0])).times(Factors(columns=torch.tensor([1 / 3, 1])))
    assert torch.equal(twice.apply(weight), expected)
