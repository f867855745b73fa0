"""Every pass proven on every family, and wrong passes: each is caught and named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from seekforge.compile.cli import main
from seekforge.compile.export import export_checkpoint
from seekforge.compile.verify import Verifier, copied
from seekforge.compile.verify_inputs import draw_tokens
from seekforge.kernels.errors import BuildError, CheckpointError
from seekforge.kernels.gathered_attention import gathered_attention
from seekforge.kernels.int4 import Int4
from seekforge.kernels.moe_route import moe_route
from seekforge.kernels.paged_attention import paged_attention
from seekforge.kernels.rope import rope
from seekforge.models.checkpoint import Checkpoint, open_checkpoint
from seekforge.passes import pipeline
from seekforge.passes.int4_options import Int4Options
from seekforge.passes.pipeline import run_pipeline
from seekforge.passes.program import Program

aten = torch.ops.aten
Exported = Callable[..., tuple[Program, Checkpoint]]
FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3"]
INT4 = Int4Options(16)


@pytest.fixture(scope="module")
def opened(tiny_checkpoint: Callable[..., Path]) -> Exported:
    """Factory `(family, dtype="float32") -> (exported program, checkpoint)`."""
    made: dict[Any, tuple[Program, Checkpoint]] = {}

    def make(family: str, dtype: str = "float32") -> tuple[Program, Checkpoint]:
        if (family, dtype) not in made:
            checkpoint = open_checkpoint(tiny_checkpoint(family))
            made[family, dtype] = export_checkpoint(checkpoint, dtype, 64), checkpoint
        program, checkpoint = made[family, dtype]
        return replace(copied(program), constants=program.constants), checkpoint

    return make


def verified(
    opened: Exported, family: str, form: str, dtype: str = "float32",
    int4: Int4Options | None = None, device: str = "cpu",
) -> Verifier:  # fmt: skip
    program, checkpoint = opened(family, dtype)
    verifier = Verifier(checkpoint, 2, dtype, 64)
    run_pipeline(program, form, 64, None, int4, device, verifier.observe)
    return verifier


@pytest.mark.parametrize("form", ["ragged", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_pass(opened: Exported, family: str, form: str) -> None:
    int4 = INT4 if form == "padded" else None
    verifier = verified(opened, family, form, int4=int4)
    names = [name for name, _ in pipeline.fusions(64)] + (["int4"] if int4 else [])
    assert list(verifier.errors) == [*names, "kv_cache", "final cleanup"]
    assert all(error.normalised <= 2e-12 for error in verifier.errors.values())  # half the limit
    ran = {name for name, error in verifier.errors.items() if not error.same}
    assert {"rms_norm", "rope", "qkv", "kv_cache", "final cleanup"} <= ran
    assert ("mla" in ran) == family.startswith("deepseek")
    # Sums in another order: that the cached graph was run at all shows in these digits.
    assert verifier.errors["kv_cache"].normalised > 0
    losses = {name: e.rounding for name, e in verifier.errors.items() if e.rounding is not None}
    assert list(losses) == (["int4"] if int4 else [])
    assert all(1e-3 < loss < 0.5 for loss in losses.values())


@pytest.mark.parametrize(
    ("family", "form", "dtype", "int4"),
    [
        ("llama", "ragged", "bfloat16", None),
        ("qwen2", "padded", "float16", INT4),
        ("deepseek_v3", "padded", "bfloat16", INT4),
        ("qwen3_moe", "ragged", "float16", None),
    ],
)
def test_lower_dtypes(
    opened: Exported, family: str, form: str, dtype: str, int4: Int4Options | None
) -> None:
    """In float32 as near as ever, and in the engine's dtype about as good as the exported graph."""
    verifier = verified(opened, family, form, dtype, int4)
    assert max(error.normalised for error in verifier.errors.values()) <= 2e-12
    own = [error.own for error in verifier.errors.values() if not error.same]
    assert verifier.own_limit is not None and len(own) > 6
    assert all(value is not None and 0 < value < 0.75 * verifier.own_limit for value in own)


def test_the_gpu_form(opened: Exported) -> None:
    verifier = verified(opened, "llama", "ragged", "bfloat16", device="cuda")
    assert not verifier.errors["rope_append"].same
    assert max(error.normalised for error in verifier.errors.values()) <= 2e-12


@dataclass(frozen=True)
class Wrong:
    """A fault added to what a pass of the pipeline leaves behind. step: the name it runs under."""

    step: str
    family: str
    form: str
    spoil: Callable[[Program], None]
    dtype: str = "float32"
    int4: Int4Options | None = None


def set_argument(target: Any, index: int, value: Any, program: Program) -> None:
    node = program.nodes(target)[-1]
    node.args = (*node.args[:index], value, *node.args[index + 1 :])


def scaled_attention(target: Any, index: int, factor: float, program: Program) -> None:
    set_argument(target, index, program.nodes(target)[0].args[index] * factor, program)


def swapped_halves(part: str, program: Program) -> None:
    for name, weight in program.weights.items():
        if part in name:
            program.weights[name] = replace(weight, sources=weight.sources[::-1])


def past_forgotten(program: Program) -> None:
    """No error in a prefill: only a step that reads the cache shows it."""
    node = program.nodes(gathered_attention)[0]
    with program.graph.inserting_before(node):
        none = program.emit(aten.mul.Tensor, node.args[6], 0, like=node.args[6])
    node.args = (*node.args[:6], none, *node.args[7:])


def wrong_shape(program: Program) -> None:
    linear = program.nodes(aten.linear.default)[0]
    linear.args = (linear.args[0], program.nodes(aten.linear.default)[-1].args[1])


def overflowing(program: Program) -> None:
    """x * 60000 / 60000 of the residual stream: nothing in fp32, infinite in fp16."""
    node = program.nodes(aten.embedding.default)[0]
    users = list(node.users)
    with program.graph.inserting_after(node):
        large = program.emit(aten.mul.Tensor, node, 6e4, like=node)
    with program.graph.inserting_after(large):
        back = program.emit(aten.div.Tensor, large, 6e4, like=node)
    for user in users:
        user.replace_input_with(node, back)


CHANGES = "changes what the model computes"
WRONG = [
    (Wrong("rope", "llama", "ragged", partial(set_argument, rope, 5, True)), CHANGES),
    (Wrong("swiglu", "llama", "padded", partial(swapped_halves, "gate_up_proj.weight")), CHANGES),
    (Wrong("moe", "deepseek_v3", "ragged", partial(set_argument, moe_route, 2, 3)), CHANGES),
    (Wrong("int4", "llama", "ragged", partial(swapped_halves, "gate_up_proj."), int4=INT4),
     CHANGES),
    (Wrong("kv_cache", "llama", "padded", past_forgotten), CHANGES),
    (Wrong("kv_cache", "qwen2", "ragged", partial(scaled_attention, paged_attention, 9, 1.0003)),
     CHANGES),
    (Wrong("qkv", "qwen3", "ragged", wrong_shape), "leaves a graph that can't be run: .*linear"),
    (Wrong("cleanup", "llama", "padded", overflowing, "float16"), "loses precision in float16"),
]  # fmt: skip


def plant(monkeypatch: pytest.MonkeyPatch, wrong: Wrong) -> None:
    def spoilt(run: Callable[..., Any]) -> Callable[..., Any]:
        def pass_(program: Program, *args: Any) -> Any:
            result = run(program, *args)
            wrong.spoil(program)
            return result

        return pass_

    if wrong.step in ("int4", "kv_cache"):
        name = f"insert_{wrong.step}"
        monkeypatch.setattr(pipeline, name, spoilt(getattr(pipeline, name)))
        return
    steps = pipeline.fusions

    def fusions(max_len: int) -> list[pipeline.Step]:
        return [(n, spoilt(run) if n == wrong.step else run) for n, run in steps(max_len)]

    monkeypatch.setattr(pipeline, "fusions", fusions)


@pytest.mark.parametrize(("wrong", "says"), WRONG, ids=[wrong.step for wrong, _ in WRONG])
def test_a_wrong_pass_is_named(
    opened: Exported, monkeypatch: pytest.MonkeyPatch, wrong: Wrong, says: str
) -> None:
    plant(monkeypatch, wrong)
    with pytest.raises(BuildError, match=f"pass '{wrong.step}' {says}") as caught:
        verified(opened, wrong.family, wrong.form, wrong.dtype, wrong.int4)
    assert "seekforge bisect" in str(caught.value)


def test_what_rounding_explains_is_no_fault(
    opened: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One unit in the last place of fp32, where 3e-4 is found above."""
    spoil = partial(scaled_attention, paged_attention, 9, 1 + 2**-23)
    plant(monkeypatch, Wrong("kv_cache", "qwen2", "ragged", spoil))
    error = verified(opened, "qwen2", "ragged").errors["kv_cache"]
    assert 0 < error.normalised < 4e-12


def one_token_off(program: Program) -> None:
    """Logits of one token id are wrong, which is in the first draw and not in the second."""
    first, second = (set(torch.cat(draw_tokens(293, 64, seed)).tolist()) for seed in (0, 1))
    (odd, *_) = sorted(first - second)
    node = program.nodes(aten.embedding.default)[0]
    users = list(node.users)
    with program.graph.inserting_after(node):
        hit = program.emit(aten.eq.Scalar, node.args[1], odd, like=node)
    with program.graph.inserting_after(hit):
        column = program.emit(aten.unsqueeze.default, hit, -1, like=node)
    with program.graph.inserting_after(column):
        off = program.emit(aten.add.Tensor, node, column, like=node)
    for user in users:
        user.replace_input_with(node, off)


def test_experts_get_a_second_draw(opened: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    """With experts one token may be sent elsewhere by rounding; without, nothing excuses it."""
    plant(monkeypatch, Wrong("rms_norm", "", "", one_token_off))
    assert verified(opened, "qwen3_moe", "ragged").errors["rms_norm"].normalised < 4e-12
    with pytest.raises(BuildError, match="pass 'rms_norm' changes"):
        verified(opened, "qwen3", "ragged")


QKV = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class Smoothed:
    """A checkpoint whose first norm is multiplied by 2; `folded`: what reads it is divided by 2."""

    checkpoint: Checkpoint
    folded: bool

    def digest(self) -> str:
        return ""

    def read(self, name: str) -> Tensor:
        tensor = self.checkpoint.read(name).float()
        if name == "model.layers.0.input_layernorm.weight":
            return tensor * 2
        reads = name.startswith("model.layers.0.self_attn.") and name.split(".")[-2] in QKV
        return tensor / 2 if reads and self.folded else tensor

    def int4(self, name: str, group_size: int, symmetric: bool, dtype: torch.dtype) -> Int4:
        return replace(self.checkpoint).int4(name, group_size, symmetric, dtype)


def test_smoothing_that_is_not_taken_back(opened: Exported) -> None:
    verifier = verified(opened, "qwen3", "padded", int4=INT4)
    found = verifier.check_source(Smoothed(verifier.checkpoint, folded=True))
    assert found["smoothing"] < 1e-12 < found["rounding"]
    with pytest.raises(BuildError, match="AWQ's smoothing changes what the model computes"):
        verifier.check_source(Smoothed(verifier.checkpoint, folded=False))


def test_the_program_says_it(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Exit code 1, the pass on stderr, and no engine."""
    plant(monkeypatch, WRONG[0][0])
    arguments = ["build", str(tiny_checkpoint("llama")), "-o", str(tmp_path)]
    arguments += ["--backend", "onnxruntime", "--max-len", "64"]
    assert main(arguments) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "pass 'rope' changes what the model computes" in said and "seekforge bisect" in said
    assert not (tmp_path / "onnxruntime").exists()
    with pytest.raises(SystemExit) as refused:
        main([*arguments, "--verify", "most"])
    assert refused.value.code == 2


def test_weights_that_are_not_numbers(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Named as the checkpoint's own fault; no pass is blamed."""
    folder = shutil.copytree(tiny_checkpoint("llama"), tmp_path / "checkpoint")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    tensors[name][3, 5] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    checkpoint = open_checkpoint(folder)
    program = export_checkpoint(checkpoint, "float32", 64)
    with pytest.raises(CheckpointError, match=f"not finite in float32.*: tensor {name} holds NaN"):
        run_pipeline(
            program, "padded", 64, None, None, "cpu", Verifier(checkpoint, 2, "float32", 64).observe
        )
