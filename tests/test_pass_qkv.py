"""QKV fusion on transformers' graphs, and projections that must stay apart."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seekforge.compile.execute import run
from seekforge.kernels.attention import attention
from seekforge.kernels.tolerance import assert_close
from seekforge.passes.cleanup import cleanup
from seekforge.passes.linears import LINEAR
from seekforge.passes.program import Program
from seekforge.passes.qkv import fuse_qkv
from seekforge.passes.rule import PassResult

B, S, D, HEADS, DIM = 2, 7, 12, 2, 4
SPLIT = torch.ops.aten.split_with_sizes.default


def fused(program: Program) -> PassResult:
    cleanup(program)
    return fuse_qkv(program)


FAMILIES: list[tuple[str, dict[str, Any], list[int], bool]] = [
    ("llama", {}, [32, 16, 16], False),
    ("llama", {"attention_bias": True}, [32, 16, 16], True),
    ("llama", {"num_key_value_heads": 4}, [32, 32, 32], False),
    ("qwen2", {}, [32, 16, 16], True),
    ("qwen3", {}, [64, 16, 16], False),  # head_dim 16, hidden 40, heads 4, one KV head (B09)
]


@pytest.mark.parametrize(("family", "overrides", "widths", "bias"), FAMILIES)
def test_whole_models(
    exported: Callable[..., Any], family: str, overrides: dict[str, Any], widths: list[int],
    bias: bool,
) -> None:  # fmt: skip
    """Biases of q, k and v go along (B10): tiny models draw them with standard deviation 1."""
    program, module = exported(family, **overrides)
    before = len(program.nodes(LINEAR))
    result = fused(program)
    assert (result.fired, result.misses) == (2, ())
    assert len(program.nodes(LINEAR)) == before - 4
    assert [node.args[1] for node in program.nodes(SPLIT)] == [widths, widths]
    for kind in ("weight", "bias") if bias else ("weight",):
        name = f"model.layers.1.self_attn.qkv_proj.{kind}"
        sources = (f"model.layers.1.self_attn.{x}_proj.{kind}" for x in "qkv")
        assert program.weights[name].sources == tuple(sources)
        assert program.tensor(name).shape[0] == sum(widths)
    ids = torch.randint(0, 293, (3, 5))
    positions = torch.arange(5).expand(3, 5)
    (logits,) = run(program, module.get_parameter, ids, positions, False)
    eager = module(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert_close(logits, eager, family)


def test_bf16(exported: Callable[..., Any]) -> None:
    program, module = exported("qwen2", torch.bfloat16)
    assert fused(program).fired == 2
    ids = torch.randint(0, 293, (3, 5))
    positions = torch.arange(5).expand(3, 5)
    (logits,) = run(program, module.get_parameter, ids, positions, False)
    eager = module(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert_close(logits, eager, "qwen2 bf16")


def test_second_run_changes_nothing(exported: Callable[..., Any]) -> None:
    program, _ = exported("llama", num_hidden_layers=1)
    fused(program)
    before = str(program.graph)
    assert fuse_qkv(program).fired == 0
    assert str(program.graph) == before


def projections(**biases: bool) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {name: nn.Linear(D, HEADS * DIM, bias=biases.get(name, False)) for name in "qkv"}


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.view(*x.shape[:2], HEADS, DIM) for x in (q, k, v))
    y: Tensor = attention(q, k, v, 0.5, 0)
    return y


def test_projections_that_others_read_stay(traced: Callable[..., Any]) -> None:
    """B51: q and v are outputs too, q is read before k is made."""

    def function(m: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        q = m.q(x)
        early = q.sin()
        k, v = m.k(x), m.v(x)
        return attend(q, k, v), early, q, v

    x = torch.randn(B, S, D)
    program, module = traced(function, x, **projections())
    assert fused(program).fired == 1
    for y, right in zip(run(program, module.get_parameter, x), module(x), strict=True):
        assert_close(y, right, "B51")


def test_only_those_with_one_input_fuse(traced: Callable[..., Any]) -> None:
    """k and v of another tensor than q (as in MLA, where two groups share one each)."""
    x = torch.randn(B, S, D)
    program, module = traced(
        lambda m, x: attend(m.q(x), m.k(x.sin()), m.v(x.sin())), x, **projections()
    )
    assert fused(program).fired == 1
    (split,) = program.nodes(SPLIT)
    assert split.args[1] == [8, 8]
    assert_close(run(program, module.get_parameter, x)[0], module(x), "k and v")


def test_linear_elsewhere_is_left(traced: Callable[..., Any]) -> None:
    """A linear of another module on the same input does not join."""
    x = torch.randn(B, S, D)
    block = nn.Module()
    block.other = nn.Linear(D, 3)
    program, module = traced(
        lambda m, x: (attend(m.q(x), m.k(x), m.v(x)), m.block.other(x)),
        x, **projections(), block=block,
    )  # fmt: skip
    assert fused(program).fired == 1
    assert len(program.nodes(LINEAR)) == 2
    for y, right in zip(run(program, module.get_parameter, x), module(x), strict=True):
        assert_close(y, right, "block")


def test_bias_on_some(traced: Callable[..., Any]) -> None:
    """q_proj has none beside DeepSeek's kv_a_proj_with_mqa: those that are there follow the
    product."""
    x = torch.randn(B, S, D)
    program, module = traced(
        lambda m, x: attend(m.q(x), m.k(x), m.v(x)), x, **projections(k=True, v=True)
    )
    assert fused(program).fired == 1
    (linear,) = program.nodes(LINEAR)
    assert len(linear.args) == 2
    assert {"k.bias", "v.bias", "qkv_proj.weight"} == set(program.weights)
    assert_close(run(program, module.get_parameter, x)[0], module(x), "bias on k and v")


MLA: list[tuple[str, dict[str, Any], tuple[str, ...], list[int]]] = [
    ("deepseek_v3", {}, ("q_a_proj", "kv_a_proj_with_mqa"), [24, 24]),
    ("deepseek_v3", {"attention_bias": True}, ("q_a_proj", "kv_a_proj_with_mqa"), [24, 24]),
    ("deepseek_v2", {}, ("q_proj", "kv_a_proj_with_mqa"), [64, 24]),
    ("deepseek_v2", {"attention_bias": True}, ("q_proj", "kv_a_proj_with_mqa"), [64, 24]),
]


@pytest.mark.parametrize(("family", "overrides", "parts", "widths"), MLA)
def test_latent_attention(
    exported: Callable[..., Any], family: str, overrides: dict[str, Any], parts: tuple[str, ...],
    widths: list[int],
) -> None:  # fmt: skip
    """The first projections of q and of the latent; kv_b_proj and q_b_proj stay apart."""
    program, module = exported(family, num_hidden_layers=1, **overrides)
    result = fused(program)
    assert (result.fired, result.misses) == (1, ())
    owner = "model.layers.0.self_attn"
    (split, *_) = program.nodes(SPLIT)
    assert split.args[1] == widths
    sources = program.weights[f"{owner}.qkv_proj.weight"].sources
    assert sources == tuple(f"{owner}.{part}.weight" for part in parts)
    if overrides and parts[0] == "q_a_proj":
        sources = program.weights[f"{owner}.qkv_proj.bias"].sources
        assert sources == tuple(f"{owner}.{part}.bias" for part in parts)
    ids = torch.randint(0, 293, (3, 5))
    positions = torch.arange(5).expand(3, 5)
    (logits,) = run(program, module.get_parameter, ids, positions, False)
    eager = module(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert_close(logits, eager, f"{family} {overrides}")


NEAR_MISSES: dict[str, tuple[Callable[..., Tensor], dict[str, nn.Module], str]] = {
    "three inputs": (
        lambda m, x: attend(m.q(x), m.k(x.sin()), m.v(x.cos())), projections(),
        "no two linear layers of .* share an input",
    ),
    "weight that is computed": (
        lambda m, x: attend(m.q(x), m.k(x), nn.functional.linear(x, m.v.weight * 2)), projections(),
        "not a weight of the checkpoint",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(traced: Callable[..., Any], name: str) -> None:
    function, parts, reason = NEAR_MISSES[name]
    x = torch.randn(B, S, D)
    program, module = traced(function, x, **parts)
    result = fused(program)
    assert result.fired == 0
    assert re.search(reason, result.misses[0].reason), result.misses[0].reason
    assert torch.equal(run(program, module.get_parameter, x)[0], module(x))
