"""RoPE fusion on transformers' graphs, partial rotary, and rotations that must stay."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, rotate_half

from seekforge.compile.execute import run
from seekforge.kernels.rope import rope
from seekforge.kernels.tolerance import assert_close
from seekforge.passes.cleanup import cleanup
from seekforge.passes.program import Program
from seekforge.passes.rope import fuse_rope
from seekforge.passes.rule import PassResult

B, S, HEADS, DIM, MAX_LEN = 2, 7, 4, 8, 701
FREQUENCIES = 1e4 ** (-torch.arange(0, DIM, 2) / DIM)


def fused(program: Program, max_len: int = MAX_LEN) -> PassResult:
    cleanup(program)
    result = fuse_rope(program, max_len)
    cleanup(program)
    return result


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"rope_scaling": LLAMA3, "rope_theta": 5e5}),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("deepseek_v3", {"first_k_dense_replace": 2}),
    ("deepseek_v3", {"rope_interleave": False}),
    ("deepseek_v3", {"rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
        "mscale": 0.707, "mscale_all_dim": 1.0,
    }}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "overrides"), MODELS)
def test_whole_models(exported: Callable[..., Any], family: str, overrides: dict[str, Any]) -> None:
    """Bitwise in fp32 at the first and at late positions, whatever the scaling; one table."""
    layers = 1 if overrides and "first_k_dense_replace" not in overrides else 2
    program, module = exported(family, num_hidden_layers=layers, **overrides)
    result = fused(program)
    assert (result.fired, result.misses) == (layers, ())
    assert {name for name in program.weights if "rope" in name} == {"rope.cos", "rope.sin"}
    assert "model.rotary_emb.inv_freq" not in program.weights
    assert not program.nodes(torch.ops.aten.neg.default)
    ids = torch.randint(0, 293, (3, 5))
    for start in (0, 200, MAX_LEN - 5):
        positions = torch.arange(5).expand(3, 5) + start
        (logits,) = run(program, module.get_parameter, ids, positions, False)
        eager = module(input_ids=ids, position_ids=positions, use_cache=False).logits
        assert torch.equal(logits, eager), f"{start=}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_complex_numbers(exported: Callable[..., Any], dtype: torch.dtype) -> None:
    """DeepSeek-V2: not bitwise, a complex product may be fused. YaRN's factor is in the table."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
               "mscale": 0.707, "mscale_all_dim": 1.0}  # fmt: skip
    program, module = exported("deepseek_v2", dtype, num_hidden_layers=1, rope_scaling=scaling)
    result = fused(program)
    assert (result.fired, result.misses) == (1, ())
    assert {name for name in program.weights if "rope" in name} == {"rope.cos", "rope.sin"}
    first = program.weights["rope.cos"].value[0]
    assert torch.equal(first, torch.full_like(first, module.model.rotary_emb.attention_scaling))
    assert first[0] != 1
    for operator in ("view_as_complex", "view_as_real", "polar"):
        assert not program.nodes(getattr(torch.ops.aten, operator).default)
    ids = torch.randint(0, 293, (3, 5))
    for start in (0, 200):
        positions = torch.arange(5).expand(3, 5) + start
        (logits,) = run(program, module.get_parameter, ids, positions, False)
        eager = module(input_ids=ids, position_ids=positions, use_cache=False).logits
        assert_close(logits, eager, f"{start=}")


def test_second_run_changes_nothing(exported: Callable[..., Any]) -> None:
    program, _ = exported("llama")
    fused(program)
    before = str(program.graph)
    again = fuse_rope(program, MAX_LEN)
    assert (again.fired, again.misses) == (0, ())
    assert str(program.graph) == before


def angles(m: nn.Module, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    half = positions[..., None].to(torch.float32) * m.constant
    both = torch.cat((half, half), -1)
    return both.cos().to(dtype), both.sin().to(dtype)


def draw(head_dim: int = DIM, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """q [batch, heads, seq, head_dim], k with one head, positions. Traced with distinct sizes."""
    q, k = torch.randn(B, S, HEADS, head_dim), torch.randn(B, S, 1, head_dim)
    return q.to(dtype), k.to(dtype), torch.tensor([[0, 7, 700, 1, 2, 3, 64]] * B)


def rotate(m: nn.Module, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    q, k = apply_rotary_pos_emb(
        q.transpose(1, 2), k.transpose(1, 2), *angles(m, positions, q.dtype)
    )
    return q.transpose(1, 2), k.transpose(1, 2)


def rotate_token_major(
    m: nn.Module, q: Tensor, k: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    return apply_rotary_pos_emb(q, k, *angles(m, positions, q.dtype), unsqueeze_dim=2)


def rotate_from_the_end(
    m: nn.Module, q: Tensor, k: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Negative dimensions, heads first."""
    cos, sin = angles(m, positions, q.dtype)
    q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=-3)
    return q.transpose(1, 2), k.transpose(1, 2)


def leading(m: nn.Module, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    """Rotary 8 of 16 in front, as in Phi and GLM."""
    turned = rotate(m, q[..., :DIM], k[..., :DIM], positions)
    return tuple(torch.cat((x, y[..., DIM:]), -1) for x, y in zip(turned, (q, k), strict=True))


def trailing(m: nn.Module, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    """No rotation for 8, then rotary 8, as in DeepSeek's MLA."""
    (q_nope, q_rope), (k_nope, k_rope) = (x.split([DIM, DIM], -1) for x in (q, k))
    q_rope, k_rope = rotate(m, q_rope, k_rope, positions)
    return torch.cat((q_nope, q_rope), -1), torch.cat((k_nope, k_rope), -1)


def pairs(m: nn.Module, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    """DeepSeek-V3: even dims of the result in front, then the odd ones."""
    q, k = apply_rotary_pos_emb_interleave(
        q.transpose(1, 2), k.transpose(1, 2), *angles(m, positions, q.dtype)
    )
    return q.transpose(1, 2), k.transpose(1, 2)


def evens_first(x: Tensor) -> Tensor:
    return x.view(*x.shape[:-1], x.shape[-1] // 2, 2).transpose(-1, -2).reshape(x.shape)


def split_pairs(m: nn.Module, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    """DeepSeek-V3 in older releases: de-interleave, then rotate halves. k was [batch, seq, dim]."""
    k = k.flatten(2).view(k.shape[0], 1, k.shape[1], k.shape[3])
    q, k = (evens_first(x) for x in (q.transpose(1, 2), k))
    q, k = apply_rotary_pos_emb(q, k, *angles(m, positions, q.dtype))
    return q.transpose(1, 2), k.transpose(1, 2)


def complex_pairs(m: nn.Module, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    """DeepSeek-V2. k was [batch, seq, dim]."""
    k = k.flatten(2).view(k.shape[0], 1, k.shape[1], k.shape[3])
    angle = positions[..., None].to(torch.float32) * m.constant
    q, k = apply_rotary_emb(q.transpose(1, 2), k, torch.polar(torch.ones_like(angle), angle))
    return q.transpose(1, 2), k.transpose(1, 2)


INTERLEAVED = {"pairs": pairs, "split pairs": split_pairs, "complex": complex_pairs}
FORMS = {
    "heads first": (rotate, DIM),
    "tokens first": (rotate_token_major, DIM),
    "negative dimension": (rotate_from_the_end, DIM),
    "leading 8 of 16": (leading, 16),
    "trailing 8 of 16": (trailing, 16),
}


@pytest.mark.parametrize(("function", "head_dim"), FORMS.values(), ids=FORMS)
def test_forms(traced: Callable[..., Any], function: Callable[..., Any], head_dim: int) -> None:
    """B12: eager against fused, bitwise in fp32, at positions 0, 7 and 700."""
    inputs = draw(head_dim)
    program, module = traced(function, *inputs, constant=FREQUENCIES)
    result = fused(program)
    assert (result.fired, result.misses) == (1, ())
    (node,) = program.nodes(rope)
    assert [x.meta["val"].shape[2:] for x in node.args[:2]] == [(HEADS, DIM), (1, DIM)]
    for x in (inputs, [t[:, :3] for t in inputs]):
        assert all(map(torch.equal, run(program, module.get_parameter, *x), module(*x)))


@pytest.mark.parametrize("name", INTERLEAVED)
def test_interleaved_pairs(traced: Callable[..., Any], name: str) -> None:
    """B01: pairs (2i, 2i + 1), in every spelling; positions 0, 7 and 700; k of one head."""
    inputs = draw()
    program, module = traced(INTERLEAVED[name], *inputs, constant=FREQUENCIES)
    result = fused(program)
    assert (result.fired, result.misses) == (1, ())
    (node,) = program.nodes(rope)
    assert node.args[5] is True
    assert [x.meta["val"].shape[2:] for x in node.args[:2]] == [(HEADS, DIM), (1, DIM)]
    for x in (inputs, [t[:1, :3] for t in inputs]):
        for y, right in zip(run(program, module.get_parameter, *x), module(*x), strict=True):
            assert_close(y, right, name)
            assert name == "complex" or torch.equal(y, right)


@pytest.mark.parametrize("function", [rotate, *INTERLEAVED.values()])
def test_bf16_is_within_the_table(traced: Callable[..., Any], function: Callable[..., Any]) -> None:
    """Not bitwise: the model rounds cos, sin and both products, the operator rounds once."""
    inputs = draw(dtype=torch.bfloat16)
    program, module = traced(function, *inputs, constant=FREQUENCIES)
    assert fused(program).fired == 1
    for y, right in zip(run(program, module.get_parameter, *inputs), module(*inputs), strict=True):
        assert_close(y, right, "bf16")


def test_values_that_others_read_stay(traced: Callable[..., Any]) -> None:
    """B51: the rotated q is an output, and is read before k is rotated; so is its half."""

    def function(m: nn.Module, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        cos, sin = (x.unsqueeze(2) for x in angles(m, positions, q.dtype))
        half = rotate_half(q)
        q = q * cos + half * sin
        early = q.sin().cos()
        k = k * cos + rotate_half(k) * sin
        return q, k, early + k, half, q.exp()

    inputs = draw()
    program, module = traced(function, *inputs, constant=FREQUENCIES)
    assert fused(program).fired == 1
    assert all(map(torch.equal, run(program, module.get_parameter, *inputs), module(*inputs)))


def turned(change: Callable[..., Tensor]) -> Callable[..., Any]:
    """A rotation whose half-swap is `change`."""

    def function(m: nn.Module, q: Tensor, k: Tensor, positions: Tensor) -> list[Tensor]:
        cos, sin = (x.unsqueeze(2) for x in angles(m, positions, q.dtype))
        return [x * cos + change(x) * sin for x in (q, k)]

    return function


def with_angles(make: Callable[..., Any]) -> Callable[..., Any]:
    """A rotation whose angle table [batch, seq, head_dim] is make(m, q, positions)."""

    def function(m: nn.Module, q: Tensor, k: Tensor, positions: Tensor) -> Any:
        angle = make(m, q, positions)
        return apply_rotary_pos_emb(q, k, angle.cos(), angle.sin(), unsqueeze_dim=2)

    return function


def plain(m: nn.Module, positions: Tensor) -> Tensor:
    half = positions[..., None].to(torch.float32) * m.constant
    return torch.cat((half, half), -1)


def with_pairs(turn: Callable[..., Tensor]) -> Callable[..., Any]:
    """A rotation of even and odd dims x1, x2 by turn(x1, x2, cos, sin)."""

    def function(m: nn.Module, q: Tensor, k: Tensor, positions: Tensor) -> list[Tensor]:
        cos, sin = (x[..., : DIM // 2].unsqueeze(2) for x in angles(m, positions, q.dtype))
        return [turn(x[..., 0::2], x[..., 1::2], cos, sin) for x in (q, k)]

    return function


def with_complex(change: Callable[..., Tensor]) -> Callable[..., Any]:
    """A complex rotation whose frequencies are change(polar numbers, q)."""

    def function(m: nn.Module, q: Tensor, k: Tensor, positions: Tensor) -> Any:
        angle = positions[..., None].to(torch.float32) * m.constant
        freqs = change(torch.polar(torch.ones_like(angle), angle), q)
        return apply_rotary_emb(q.transpose(1, 2), k.transpose(1, 2), freqs)

    return function


def one_split(m: nn.Module, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return apply_rotary_pos_emb(evens_first(q), k, *angles(m, positions, q.dtype), unsqueeze_dim=2)


def only_q(m: nn.Module, q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
    return apply_rotary_pos_emb(q, k, *angles(m, positions, q.dtype), unsqueeze_dim=2)[0]


NEAR_MISSES: dict[str, tuple[Callable[..., Any], str]] = {
    "halves of 2 in a head of 8": (
        turned(lambda x: torch.cat((-x[..., 2:], x[..., :2]), -1)), "rotates halves of 2 in a head",
    ),
    "no sign": (turned(lambda x: torch.cat((x[..., 4:], x[..., :4]), -1)), "expected aten.neg"),
    "sign on the lower half": (
        turned(lambda x: torch.cat((x[..., 4:], -x[..., :4]), -1)), "expected aten.neg",
    ),
    "halves of another tensor": (
        turned(lambda x: rotate_half(x.sin())), "x is .* in one place and",
    ),
    "along the heads": (
        turned(lambda x: torch.cat((-x[:, :, 4:], x[:, :, :4]), -1) if x.shape[2] > 9 else
               torch.cat((-x[..., 4:].flip(2), x[..., :4]), -1)), "x is|expected aten.slice",
    ),
    "angles of the data": (
        with_angles(lambda m, q, p: plain(m, p) * q.mean((2, 3), keepdim=True)[..., 0]),
        "depend on .*position_ids.*x0.*, expected position_ids alone",
    ),
    "angles of data alone": (
        with_angles(lambda m, q, p: q[:, :, 0] + 0 * plain(m, p)), "depend on",
    ),
    "angles of a weight": (
        with_angles(lambda m, q, p: plain(m, p) * m.weight), "depend on weight, whose value",
    ),
    "halves with other angles": (
        with_angles(lambda m, q, p: plain(m, p).cumsum(-1)), "differs between the two halves",
    ),
    "angles of the longest position": (
        with_angles(lambda m, q, p: plain(m, p) / p.amax(1)[:, None, None]),
        "depends on the other positions",
    ),
    "one angle for all tokens": (
        with_angles(lambda m, q, p: plain(m, p)[:, :1]), "expected one row a token",
    ),
    "pairs turned backwards": (
        with_pairs(lambda a, b, c, s: torch.cat((a * c + b * s, b * c - a * s), -1)),
        "expected aten.cat, found aten.slice",
    ),
    "pairs with cos and sin exchanged": (
        with_pairs(lambda a, b, c, s: torch.cat((a * c - b * s, b * s + a * c), -1)),
        "in one place and",
    ),
    "odd dims first": (
        with_pairs(lambda a, b, c, s: torch.cat((b * c - a * s, a * c + b * s), -1)),
        "expected 0, found 1",
    ),
    "complex angles of the data": (
        with_complex(lambda f, q: f * q[..., :1].mean(2)), "depend on .*x0",
    ),
    "one complex angle for all tokens": (
        with_complex(lambda f, q: f[:, :1]), "expected one row a token",
    ),
    "complex angle of the first position": (
        with_complex(lambda f, q: f / f.real.amax(1, keepdim=True)),
        "depends on the other positions",
    ),
    "only q is de-interleaved": (one_split, "1 rotations in one module, expected q and k"),
    "no k": (only_q, "1 rotations in one module, expected q and k"),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(traced: Callable[..., Any], name: str) -> None:
    function, reason = NEAR_MISSES[name]
    inputs = draw()
    program, module = traced(function, *inputs, constant=FREQUENCIES, weight=torch.rand(DIM))
    result = fused(program)
    assert result.fired == 0
    assert result.misses, "no reason given"
    reasons = [miss.reason for miss in result.misses]
    assert any(re.search(reason, found) for found in reasons), reasons
    ours, right = run(program, module.get_parameter, *inputs), module(*inputs)
    right = right if isinstance(right, (tuple, list)) else [right]
    assert all(torch.allclose(x, y, equal_nan=True) for x, y in zip(ours, right, strict=True))
