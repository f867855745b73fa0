"""INT4 insertion: counts, numbers against the dequantised reference, what stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from seekforge.compile.execute import run
from seekforge.compile.export import export_checkpoint
from seekforge.compile.quality import tensors_to_quantise
from seekforge.compile.reference import load_dequantised
from seekforge.kernels.errors import InputError
from seekforge.kernels.int4_linear import int4_linear
from seekforge.kernels.int4_moe_experts import int4_moe_experts
from seekforge.kernels.tolerance import assert_close
from seekforge.models.checkpoint import Checkpoint, open_checkpoint
from seekforge.passes.int4 import Int4Options, insert_int4, int4_sizes, int4_tensors, matches
from seekforge.passes.pipeline import run_fusions
from seekforge.passes.program import Program

Make = Callable[..., Path]
IDS = torch.arange(3, 21).view(2, 9)
POSITIONS = torch.arange(9).expand(2, 9)


def fused(checkpoint: Checkpoint) -> Program:
    program = export_checkpoint(checkpoint, "float32", 64)
    run_fusions(program, 64)
    return program


# qkv, o, gate_up, down in each of 2 layers; MLA: qkv (q_a + kv_a), q_b where there is one, o; in
# one of the layers the shared experts' two and the experts instead of gate_up and down.
@pytest.mark.parametrize(("family", "linears", "experts"), [
    ("llama", 8, 0), ("qwen2", 8, 0), ("deepseek_v2", 8, 1), ("deepseek_v3", 10, 1),
    ("qwen3_moe", 4, 2),
])  # fmt: skip
@pytest.mark.parametrize("symmetric", [True, False])
def test_equals_the_dequantised_reference(
    family: str, linears: int, experts: int, symmetric: bool, tiny_checkpoint: Make
) -> None:
    sizes: dict[str, Any] = {"intermediate_size": 64}
    if family == "qwen3_moe":
        sizes |= {"hidden_size": 48, "moe_intermediate_size": 32}
    if family.startswith("deepseek"):
        sizes |= {"v_head_dim": 16} | ({"q_lora_rank": 32} if family == "deepseek_v3" else {})
    checkpoint = open_checkpoint(tiny_checkpoint(family, **sizes))
    program = fused(checkpoint)
    result = insert_int4(program, Int4Options(16, symmetric))
    assert len(program.nodes(int4_linear)) == linears, result.misses
    assert len(program.nodes(int4_moe_experts)) == experts, result.misses
    assert result.fired == linears + experts
    assert {miss.reason for miss in result.misses} <= {
        "a router", "lm_head.weight is to be left as it is",
    }  # fmt: skip
    tensors = int4_tensors(program)
    assert set(int4_sizes(program).values()) == set(tensors.values()) == {16}
    quantization = {"tensors": tensors, "symmetric": symmetric}
    reference = load_dequantised(checkpoint, checkpoint, quantization, torch.float32)
    (logits,) = run(program, checkpoint.read, IDS, POSITIONS, False)
    with torch.inference_mode():
        expected = reference(input_ids=IDS, position_ids=POSITIONS).logits
        plain = run(fused(checkpoint), checkpoint.read, IDS, POSITIONS, False)[0]
    assert_close(logits, expected, family)
    assert (plain - expected).abs().max() > 0.05  # it is quantised


def test_kept_modules(tiny_checkpoint: Make) -> None:
    """B30: whole components of the name; a part of a fused projection keeps all of it, by name."""
    checkpoint = open_checkpoint(tiny_checkpoint("llama", intermediate_size=64))
    program = fused(checkpoint)
    result = insert_int4(program, Int4Options(16, skip=("lm_head", "layers.1.mlp", "k_proj")))
    kept = [miss.reason for miss in result.misses]
    assert sum("k_proj" in reason for reason in kept) == 2
    assert sum("layers.1.mlp" in reason for reason in kept) == 2
    assert result.fired == 4 and not any(".k_proj" in name for name in int4_tensors(program))


def test_ready_made_weights_are_all_int4_in_a_fused_projection(tiny_checkpoint: Make) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("llama", intermediate_size=64))
    names = [f"model.layers.{i}.self_attn.{n}_proj.weight" for i in range(2) for n in "qkv"]
    assert insert_int4(fused(checkpoint), Int4Options(16, True, (), frozenset(names))).fired == 2
    with pytest.raises(InputError, match=r"0\.self_attn\.v_proj\.weight are not INT4"):
        insert_int4(fused(checkpoint), Int4Options(16, True, (), frozenset(names[:2])))


def test_names_match_at_dots() -> None:
    name = "model.layers.11.mlp.gate_up_proj.weight"
    assert matches(name, ["mlp.gate_up_proj"]) and matches(name, ["model.layers.11."])
    assert not matches(name, ["mlp.gate", "layers.1", "layers.1.", "gate_up", "ayers.11"])


def test_rows_that_no_group_divides_stay(tiny_checkpoint: Make) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("llama", intermediate_size=53))
    program = fused(checkpoint)
    result = insert_int4(program, Int4Options(16))
    assert [m.reason for m in result.misses[:2]] == ["no group size divides 53 input features"] * 2
    with pytest.raises(InputError, match="no layer can be quantised with group size 16"):
        tensors_to_quantise(checkpoint, Int4Options(16, skip=("model", "lm_head")))
