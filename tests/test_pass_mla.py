"""Latent attention on transformers' graphs, and attention that must keep its keys and values."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seekforge.compile.execute import run
from seekforge.kernels.attention import attention
from seekforge.kernels.mla_attention import mla_attention
from seekforge.kernels.rope import rope
from seekforge.kernels.tolerance import assert_close, normalised_error
from seekforge.passes.mla import fuse_mla
from seekforge.passes.pipeline import run_fusions, run_pipeline
from seekforge.passes.program import Program
from seekforge.passes.region import writes
from seekforge.passes.rule import PassResult

MAX_LEN = 256
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
V3_YARN = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("deepseek_v3", {}),  # rope_interleave absent (B01)
    ("deepseek_v3", {"rope_interleave": True}),
    ("deepseek_v3", {"rope_interleave": False}),
    ("deepseek_v3", {"rope_scaling": V3_YARN}),
    ("deepseek_v3", {"rope_scaling": V3_YARN | {"mscale": 0.707, "mscale_all_dim": 0.9}}),
    ("deepseek_v3", {"rope_scaling": YARN, "rope_interleave": False}),
    ("deepseek_v3", {"q_lora_rank": None}),
    ("deepseek_v3", {"v_head_dim": 20}),  # wider than q and k (B20)
    ("deepseek_v3", {"v_head_dim": 4, "qk_nope_head_dim": 6, "qk_rope_head_dim": 10}),
    ("deepseek_v3", {"attention_bias": True}),
    ("deepseek_v2", {}),
    ("deepseek_v2", {"q_lora_rank": 24, "attention_bias": True}),
    ("deepseek_v2", {"attention_bias": True, "v_head_dim": 20}),
    ("deepseek_v2", {"rope_scaling": V3_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}),
]


def fused(program: Program) -> dict[str, PassResult]:
    return {result.name: result for result in run_fusions(program, MAX_LEN)}


def check_graph(program: Program, module: nn.Module, layers: int) -> None:
    """Nothing but views is left between projections and attention."""
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not any(writes(node) for node in program.graph.nodes), names
    left = {"attention", "cat", "slice", "transpose", "expand", "new_empty", "copy_", "flatten"}
    assert not {name.split(".")[1] for name in names if "." in name} & left, names
    nodes = program.nodes(mla_attention)
    assert [node.args[6] for node in nodes] == list(range(layers))
    for layer, node in enumerate(nodes):
        owner = f"model.layers.{layer}.self_attn"
        assert node.args[4].target == f"{owner}.kv_b_proj.weight"  # type: ignore[union-attr]
        assert node.args[5] == module.get_submodule(owner).scaling
        dims = [x.meta["val"].dim() for x in node.args[:5]]  # type: ignore[union-attr]
        assert dims == [4, 4, 3, 3, 2]


def check_logits(program: Program, module: nn.Module, what: str) -> None:
    ids = torch.randint(0, 293, (3, 6))
    for start in (0, 5, MAX_LEN - 6):
        positions = torch.arange(6).expand(3, 6) + start
        (logits,) = run(program, module.state_dict().__getitem__, ids, positions, False)
        eager = module(input_ids=ids, position_ids=positions, use_cache=False).logits
        for at in range(6):
            assert_close(logits[:, at], eager[:, at], f"{what} position {start + at}")


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_whole_models(exported: Callable[..., Any], family: str, overrides: dict[str, Any]) -> None:
    """One dense layer, so that nothing else is in the way."""
    program, module = exported(family, num_hidden_layers=1, **overrides)
    results = fused(program)
    for name in ("rope", "qkv", "swiglu", "mla"):
        assert (results[name].fired, results[name].misses) == (1, ()), name
    (node,) = program.nodes(rope)
    assert node.args[5] is overrides.get("rope_interleave", True)
    check_graph(program, module, 1)
    check_logits(program, module, f"{family} {overrides}")


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v2"])
def test_layers_of_both_kinds(exported: Callable[..., Any], family: str) -> None:
    """A dense and a MoE layer; one cos and sin table for both."""
    program, module = exported(family)
    results = fused(program)
    assert [results[name].fired for name in ("rope", "qkv", "mla", "moe")] == [2, 2, 2, 1]
    assert {name for name in program.weights if "rope" in name} == {"rope.cos", "rope.sin"}
    check_graph(program, module, 2)
    check_logits(program, module, family)


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v2"])
def test_bf16(exported: Callable[..., Any], family: str) -> None:
    """No further from fp32 than 1.1 times what the eager module in bf16 is."""
    program, module = exported(family, torch.bfloat16, num_hidden_layers=1)
    results = fused(program)
    assert [results[name].fired for name in ("rope", "qkv", "mla")] == [1, 1, 1]
    judge = copy.deepcopy(module).float()
    ids = torch.randint(0, 293, (8, 32), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(32).expand(8, 32) + 7
    (logits,) = run(program, module.get_parameter, ids, positions, False)
    eager, right = (
        m(input_ids=ids, position_ids=positions, use_cache=False).logits for m in (module, judge)
    )
    assert logits.dtype == torch.bfloat16
    assert normalised_error(logits, right) <= 1.1 * normalised_error(eager, right)


def test_second_run_changes_nothing(exported: Callable[..., Any]) -> None:
    program, _ = exported("deepseek_v3")
    fused(program)
    before = str(program.graph)
    again = fuse_mla(program)
    assert (again.fired, again.misses) == (0, ())
    assert str(program.graph) == before


@pytest.mark.parametrize("form", ["ragged", "padded"])
@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v2"])
def test_chunks_through_the_cache_equal_eager(
    exported: Callable[..., Any], family: str, form: str
) -> None:
    """12 tokens as 5, 1, 5, 1, so decompressed and absorbed in turn; the pool begins as NaN."""
    program, module = exported(family, num_hidden_layers=1)
    _, inputs = run_pipeline(program, form, MAX_LEN, None)
    (entry,) = (entry for entry in inputs if "_pool_" in entry.name)
    assert (entry.name, entry.dims[2:]) == ("latent_pool_0", (16 + 8,))  # all that is cached
    ids, blocks, size = torch.randint(0, 293, (12,)), torch.tensor([[5, 1, 3]]), 4
    pool = torch.full((6, size, 24), torch.nan)
    at = torch.arange(12)
    slots = blocks[0, at // size] * size + at % size
    logits = []
    for chunk in at.split([5, 1, 5, 1]):
        past, count = torch.tensor([int(chunk[0])]), len(chunk)
        rows = torch.arange(count)
        if form == "ragged":
            index = (slots[chunk], blocks, past + count, torch.tensor([0, count]), rows)
            args = (ids[chunk], chunk, *index, pool)
        else:
            args = (ids[None, chunk], chunk[None], blocks, past, rows, pool)
        y, *new = run(program, module.state_dict().__getitem__, *args)
        if new:
            pool.view(-1, 24)[slots[chunk]] = new[0][0]
        logits.append(y)
    (eager,) = module(input_ids=ids[None], use_cache=False).logits
    for position, (y, right) in enumerate(zip(torch.cat(logits), eager, strict=True)):
        assert_close(y, right, f"{family} {form} {position=}")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_ordinary_attention_is_no_near_miss(exported: Callable[..., Any], family: str) -> None:
    program, _ = exported(family)
    result = fused(program)["mla"]
    assert (result.fired, result.misses) == (0, ())
    assert len(program.nodes(attention)) == 2


B, S, D, H, NOPE, ROPE, V, RANK = 2, 7, 12, 3, 4, 6, 5, 8
FREQUENCIES = 1e4 ** (-torch.arange(0, ROPE, 2) / ROPE)
Same = Callable[[Tensor], Tensor]


def rotate(m: nn.Module, x: Tensor, positions: Tensor) -> Tensor:
    """x [batch, heads, seq, ROPE], halves."""
    angle = torch.cat((positions[..., None] * m.constant,) * 2, -1)
    cos, sin = angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)
    return x * cos + torch.cat((-x[..., ROPE // 2 :], x[..., : ROPE // 2]), -1) * sin


def layer(
    change_k: Same = lambda x: x, change_q: Same = lambda x: x, nope_first: bool = True,
    k_heads: int = 1, other_v: bool = False, read: str = "", change_latent: Same = lambda x: x,
    scaled: bool = False,
) -> Callable[..., Any]:  # fmt: skip
    """An attention layer with a latent. change_k, change_q: of the rotated parts
    [batch, heads, seq, ROPE]. read: what else is an output."""

    def function(m: nn.Module, x: Tensor, positions: Tensor) -> Any:
        batch, seq = x.shape[:2]
        q = m.q(x).view(batch, seq, H, NOPE + ROPE).transpose(1, 2)
        q_nope, q_rot = q.split([NOPE, ROPE], -1)
        latent, k_rot = m.kv_a(x).split([RANK, k_heads * ROPE], -1)
        k_rot = k_rot.view(batch, seq, k_heads, ROPE).transpose(1, 2)
        q_rot, k_rot = rotate(m, q_rot, positions), rotate(m, k_rot, positions)
        q_rot, k_rot = change_q(q_rot), change_k(k_rot).expand(batch, H, seq, ROPE)
        kv = m.kv_b(change_latent(latent)).view(batch, seq, H, NOPE + V).transpose(1, 2)
        k_nope, v = kv.split([NOPE, V], -1)
        if not nope_first:
            v, k_nope = kv.split([V, NOPE], -1)
        if other_v:
            v = m.other(latent).view(batch, seq, H, V).transpose(1, 2)
        k = kv.new_empty(batch, H, seq, NOPE + ROPE)
        k[..., :NOPE].copy_(k_nope)
        k[..., NOPE:].copy_(k_rot * 2 if scaled else k_rot)
        q = torch.cat((q_nope, q_rot), -1)
        y = attention(*(t.transpose(1, 2) for t in (q, k, v)), 0.3, 0)
        y = y.reshape(batch, seq, H * V)
        extra = {"latent": latent, "k": k, "k_nope": k_nope, "v": v, "q": q_rot, "": None}[read]
        return (y,) if extra is None else (y, extra.exp())

    return function


def parts(k_heads: int = 1, bias: bool = False) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "q": nn.Linear(D, H * (NOPE + ROPE), bias=False),
        "kv_a": nn.Linear(D, RANK + k_heads * ROPE, bias=False),
        "kv_b": nn.Linear(RANK, H * (NOPE + V), bias=bias),
        "other": nn.Linear(RANK, H * V, bias=False),
        "constant": FREQUENCIES,
    }


def draw() -> tuple[Tensor, Tensor]:
    return torch.randn(B, S, D), torch.tensor([[0, 7, 200, 1, 2, 3, 64]] * B)


def backwards(x: Tensor) -> Tensor:
    return torch.cat((x[..., ROPE // 2 :], x[..., : ROPE // 2]), -1)


def evens_first(x: Tensor) -> Tensor:
    return x.view(*x.shape[:-1], ROPE // 2, 2).transpose(-1, -2).reshape(x.shape)


def swap_tokens(x: Tensor) -> Tensor:
    """[batch, seq, RANK] -> [batch, 1, seq, RANK]"""
    return x.unsqueeze(1).transpose(0, 2).reshape(x.shape[0], 1, *x.shape[1:])


def repeated(x: Tensor) -> Tensor:
    return torch.cat((x[..., :3], x[..., :3]), -1)


def agree(program: Program, module: nn.Module, inputs: tuple[Tensor, ...], what: str) -> None:
    ours, right = run(program, module.get_parameter, *inputs), module(*inputs)
    for y, expected in zip(ours, right, strict=True):
        assert_close(y, expected, what)


@pytest.mark.parametrize("change", [lambda x: x, backwards, evens_first])
def test_equal_permutations_are_dropped(traced: Callable[..., Any], change: Same) -> None:
    inputs = draw()
    program, module = traced(layer(change, change), *inputs, **parts())
    result = fused(program)["mla"]
    assert (result.fired, result.misses) == (1, ())
    names = " ".join(str(node.target) for node in program.graph.nodes)
    assert "cat" not in names and "copy_" not in names and "transpose" not in names
    agree(program, module, inputs, change.__name__)
    agree(program, module, tuple(x[:1, :3] for x in inputs), "other sizes")


@pytest.mark.parametrize("read", ["k", "k_nope", "v", "q"])
def test_values_that_others_read_stay(traced: Callable[..., Any], read: str) -> None:
    """B51, with the copies that a value is made of; a rotated q still in the model's order."""
    inputs = draw()
    program, module = traced(layer(evens_first, evens_first, read=read), *inputs, **parts())
    assert fused(program)["mla"].fired == 1
    assert any(map(writes, program.graph.nodes)) == (read == "k")
    agree(program, module, inputs, read)


NEAR_MISSES: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "a rotated part for each head": (
        layer(k_heads=H), parts(k_heads=H), "rotated part of k has 3 heads, expected one for all",
    ),
    "latent with a second reader": (
        layer(read="latent"), parts(), "latent .* is also read by exp",
    ),
    "v of another projection": (layer(other_v=True), parts(), "k comes from .*, v from"),
    "k ordered otherwise than q": (
        layer(change_k=evens_first), parts(), "rotated parts of q and k are ordered differently",
    ),
    "two orders": (
        layer(backwards, evens_first), parts(), "rotated parts of q and k are ordered differently",
    ),
    "dimensions taken twice": (
        layer(repeated, repeated), parts(), "last 6 dimensions of k are not those of",
    ),
    "v before k": (layer(nope_first=False), parts(), "v is not the last 5 rows of each head"),
    "bias": (layer(), parts(bias=True), "expected a linear layer without bias"),
    "scaled rotated part": (layer(scaled=True), parts(), "k comes from .*mul"),
    "latent in another order of tokens": (
        layer(change_latent=swap_tokens), parts(),
        "is no view of a latent",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(traced: Callable[..., Any], name: str) -> None:
    function, modules, reason = NEAR_MISSES[name]
    inputs = draw()
    program, module = traced(function, *inputs, **modules)
    result = fused(program)["mla"]
    assert result.fired == 0
    reasons = [miss.reason for miss in result.misses]
    assert len(reasons) == 1 and re.search(reason, reasons[0]), reasons
    agree(program, module, inputs, name)
