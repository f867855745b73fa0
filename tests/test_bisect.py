"""Bisect on tiny models: each kind of fault is named, and what is right is left alone.

Engines are ONNX Runtime's, which build in a second. The faults are planted.py's; real checkpoints
are in test_bisect_planted.py.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import planted
import pytest
import torch
from safetensors import safe_open
from torch import fx

import seekforge.passes.cleanup
from seekforge.compile import cli
from seekforge.compile.bisect import bisect
from seekforge.compile.bisect_engine import Allowed
from seekforge.compile.bisect_result import Bisection, format_bisection, row_error
from seekforge.compile.build import Options, build
from seekforge.compile.weights import WEIGHTS_NAME, data_offsets
from seekforge.kernels.errors import InputError
from seekforge.passes.int4 import Int4Options
from seekforge.runtime.manifest import file_entries, read_manifest, write_manifest

Checkpoint = Callable[..., Path]
Engine = Callable[..., Path]


def bisected(engine: Path, out: Path) -> Bisection:
    return bisect(engine, out=out / "culprit")


def built(path: Path, out: Path, **options: Any) -> Path:
    """An ONNX Runtime engine, nothing compared."""
    options = {"max_len": 96, "max_batch": 4, "verify": "none", "cache": False, **options}
    (engine,) = build(path, out / "engines", Options(backends=("onnxruntime",), **options))
    return engine


def names(found: Bisection) -> tuple[str, str, int | None]:
    assert found.culprit is not None, format_bisection(found)
    return found.culprit.step, found.culprit.operator, found.culprit.layer


def saved(found: Bisection) -> dict[str, torch.Tensor]:
    assert found.saved is not None
    with safe_open(found.saved, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def check_sound(found: Bisection, quantised: list[str]) -> None:
    print(format_bisection(found))
    assert found.culprit is None and found.saved is None, format_bisection(found)
    assert format_bisection(found).endswith("no step beyond tolerance")
    done = [step.name for step in found.steps]
    assert done[: 2 + len(quantised)] == ["exported", *quantised, "normalise"]
    assert done[-3:] == ["weights", "lowered", "runtime"] and ("int4" in done) == bool(quantised)
    assert all(step.error is not None and step.error <= 1 for step in found.steps)


def test_no_fault(tiny_engine: Engine, tmp_path: Path) -> None:
    check_sound(bisected(tiny_engine("deepseek_v3", "onnxruntime"), tmp_path), [])


# The sum of squares of this model's residual stream is too much for float16.
LOUD = {"hidden_size": 96, "intermediate_size": 512}


def test_no_fault_in_half(tiny_engine: Engine, tmp_path: Path) -> None:
    check_sound(bisected(tiny_engine("llama", "onnxruntime", "float16", **LOUD), tmp_path), [])


def test_no_fault_in_int4(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    engine = built(tiny_checkpoint("qwen2"), tmp_path, quant="awq-int4")
    check_sound(bisected(engine, tmp_path), ["smoothed", "rounded"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype", "quant"),
    [
        ("qwen3_moe", "float16", None), ("qwen3", "float32", "rtn-int4"),
        ("deepseek_v2", "float16", None), ("deepseek_v3", "float16", "awq-int4"),
    ],
)  # fmt: skip
def test_no_fault_elsewhere(
    family: str, dtype: str, quant: str | None, tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    engine = built(tiny_checkpoint(family), tmp_path, dtype=dtype, quant=quant)
    steps = {"rtn-int4": ["rounded"], "awq-int4": ["smoothed", "rounded"]}
    check_sound(bisected(engine, tmp_path), steps.get(quant or "", []))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tensorrt(dtype: str, tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Not executed here, and it says so; what was made of it until then is judged."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    options = Options(
        backends=("tensorrt-rtx",), max_len=96, max_batch=2, dtype=dtype, verify="none",
        cache=False,
    )  # fmt: skip
    (engine,) = build(tiny_checkpoint("deepseek_v3"), tmp_path / "engines", options)
    found = bisected(engine, tmp_path)
    print(format_bisection(found))
    assert found.culprit is None
    *_, weights, lowered, runtime = found.steps
    assert weights.note == "they are inside the engine"
    told = "by ONNX Runtime" if dtype == "float16" else "no bfloat16"
    assert told in lowered.note and (lowered.error is None) == (dtype == "bfloat16")
    if not torch.cuda.is_available():
        assert "the engine is not executed" in lowered.note and runtime.error is None


@pytest.mark.parametrize(
    "family", ["deepseek_v3", pytest.param("deepseek_v2", marks=pytest.mark.slow)]
)
def test_wrong_rope_pairing(
    family: str, tiny_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine(family, "onnxruntime")
    planted.wrong_rope_pairing(monkeypatch, 1)
    assert names(bisected(engine, tmp_path)) == ("rope", "seekforge.rope", 1)


def test_wrong_rope_kernel(
    tiny_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the operator itself: the first layer has it already."""
    engine = tiny_engine("llama", "onnxruntime")
    planted.wrong_rope_kernel(monkeypatch)
    assert names(bisected(engine, tmp_path)) == ("rope", "seekforge.rope", 0)


def test_swapped_halves(
    tiny_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine("llama", "onnxruntime")
    planted.swapped_halves(monkeypatch, 1)
    found = bisected(engine, tmp_path)
    assert names(found) == ("swiglu", "seekforge.swiglu", 1)
    assert found.culprit is not None and found.culprit.source.startswith("llama/modeling_llama.py:")
    tensors = saved(found)
    (gate_up,) = [value for name, value in tensors.items() if name.startswith("input.")]
    up, gate = gate_up.chunk(2, -1)
    right = torch.nn.functional.silu(gate) * up
    assert torch.allclose(tensors["reference"], right.view_as(tensors["reference"]), atol=1e-4)


@pytest.mark.parametrize(
    ("family", "layer", "producer", "reader"),
    [
        ("qwen2", 1, "self_attn.v_proj", "self_attn.o_proj"),
        pytest.param("llama", 0, "input_layernorm", "self_attn.q_proj", marks=pytest.mark.slow),
        pytest.param(
            "deepseek_v3", 1, "self_attn.kv_b_proj", "self_attn.o_proj",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_scale_not_folded(
    family: str, layer: int, producer: str, reader: str, tiny_checkpoint: Checkpoint,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    planted.scale_not_folded(monkeypatch, layer, f"{producer}.weight")
    options = Int4Options(group_size=16)
    engine = built(tiny_checkpoint(family), tmp_path, quant="awq-int4", int4=options)
    found = bisected(engine, tmp_path)
    assert names(found) == ("smoothed", "aten.linear", layer)
    prefix = f"model.layers.{layer}."
    assert found.culprit is not None and found.culprit.module == prefix + reader
    told = f"{prefix}{reader}.weight is not folded into {prefix}{producer}.weight"
    assert told in found.culprit.detail


def test_wrong_translation(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The installed code is right again; the engine as it was built is not."""
    with pytest.MonkeyPatch.context() as patch:
        planted.wrong_translation(patch, 1)
        engine = built(tiny_checkpoint("qwen3"), tmp_path)
    assert names(bisected(engine, tmp_path)) == ("lowered", "seekforge.swiglu", 1)


def test_overflow_in_a_norm(
    tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted.overflowing_norm(monkeypatch)
    found = bisected(built(tiny_checkpoint("llama", **LOUD), tmp_path, dtype="float16"), tmp_path)
    assert names(found)[:2] == ("lowered", "seekforge.add_rms_norm")
    assert found.culprit is not None and "computed in float16" in found.culprit.detail
    x, residual, _ = (t.float() for n, t in saved(found).items() if n.startswith("input."))
    assert float((x + residual).square().sum(-1).max()) > torch.finfo(torch.float16).max


@pytest.mark.slow
@pytest.mark.parametrize("layer", [None, 1])
def test_inductor(
    layer: int | None, tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers are compiled one by one only where the engine as built is wrong."""
    if layer is not None:
        planted.wrong_inductor_code(monkeypatch, layer)
    options = Options(backends=("inductor",), max_len=96, max_batch=4, verify="none", cache=False)
    (engine,) = build(tiny_checkpoint("llama"), tmp_path / "engines", options)
    found = bisected(engine, tmp_path)
    if layer is None:
        check_sound(found, [])
    else:
        assert names(found) == ("lowered", "aten.linear", layer)
        assert found.culprit is not None and found.culprit.module.endswith("mlp.down_proj")


@pytest.mark.parametrize(
    ("plant", "node", "source"),
    [
        (planted.short_tables, "block_tables", "runtime/session.py"),
        (planted.shared_block, "block_tables", "runtime/blocks.py"),
    ],
)
def test_off_by_one_in_a_block_table(
    plant: Callable[[pytest.MonkeyPatch], None], node: str, source: str, tiny_engine: Engine,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    engine = tiny_engine("llama", "onnxruntime")
    plant(monkeypatch)
    found = bisected(engine, tmp_path)
    assert found.culprit is not None, format_bisection(found)
    assert (found.culprit.step, found.culprit.node) == ("runtime", node)
    assert found.culprit.source == source and "of sequence" in found.culprit.detail


def test_new_keys_in_the_next_slot(
    tiny_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots are no input of the padded form: the pool shows where a value is not."""
    engine = tiny_engine("llama", "onnxruntime")
    planted.shifted_slots(monkeypatch)
    found = bisected(engine, tmp_path)
    assert found.culprit is not None
    assert (found.culprit.step, found.culprit.node) == ("runtime", "k_pool_0")
    assert found.culprit.source == "runtime/padded.py"


def test_wrong_clean_up(
    tiny_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that makes no node: it takes an addition's second input for its first."""
    engine = tiny_engine("llama", "onnxruntime")
    right = seekforge.passes.cleanup.cleanup

    def cleanup(program: Any, name: str = "cleanup") -> Any:
        result = right(program, name)
        if name == "normalise":
            adds = program.nodes(torch.ops.aten.add.Tensor)
            chosen = [n for n in adds if isinstance(n.args[1], fx.Node)][-1]
            chosen.args = (chosen.args[1], chosen.args[1])
        return result

    monkeypatch.setattr("seekforge.passes.pipeline.cleanup", cleanup)
    found = bisected(engine, tmp_path)
    assert names(found) == ("normalise", "aten.add.Tensor", 1)


def test_wrong_export(tiny_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention that the export is made with, scaled wrongly in one layer."""
    engine = tiny_engine("llama", "onnxruntime")
    planted.wrong_attention_scale(monkeypatch, 1)
    found = bisected(engine, tmp_path)
    assert names(found) == ("exported", "seekforge.attention", 1)


def test_wrong_weights(tiny_engine: Engine, tmp_path: Path) -> None:
    """A tensor of the engine's file that is not the checkpoint's."""
    engine = tmp_path / "onnxruntime"
    shutil.copytree(tiny_engine("llama", "onnxruntime"), engine)
    name, file = "model.layers.1.mlp.down_proj.weight", engine / WEIGHTS_NAME
    start, _ = data_offsets(file)[name]
    data = bytearray(file.read_bytes())
    data[start] ^= 1
    file.write_bytes(data)
    manifest = read_manifest(engine, check_files=False)
    write_manifest(engine, dataclasses.replace(manifest, files=file_entries(engine)))
    found = bisected(engine, tmp_path)
    assert found.culprit is not None, format_bisection(found)
    assert (found.culprit.step, found.culprit.node, found.culprit.layer) == ("weights", name, 1)


def test_built_by_code_that_is_right_by_now(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The pass is as it should be; the engine's weights still lie as the wrong one put them."""
    with pytest.MonkeyPatch.context() as patch:
        planted.swapped_halves(patch, 1)
        engine = built(tiny_checkpoint("llama"), tmp_path)
    found = bisected(engine, tmp_path)
    assert names(found) == ("weights", "aten.linear", 1)
    assert found.culprit is not None
    assert found.culprit.node == "model.layers.1.mlp.gate_up_proj.weight"


def test_verb(tiny_engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit codes, and the JSON of a sound engine."""
    engine = tiny_engine("llama", "onnxruntime")
    assert cli.main(["bisect", str(engine), "--tokens", "5", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] and told["culprit"] is None and told["steps"][-1]["name"] == "runtime"
    prompt = ["--prompt", "the capital", "-o", str(tmp_path / "out")]
    assert cli.main(["bisect", str(engine), *prompt]) == 0
    assert "no step beyond tolerance" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    assert cli.main(["bisect", str(tmp_path)]) == 2
    with pytest.raises(InputError, match="--checkpoint"):
        bisect(engine, tmp_path)


def test_verb_names_a_culprit(
    tiny_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    engine, out = tiny_engine("llama", "onnxruntime"), tmp_path / "out"
    planted.swapped_halves(monkeypatch, 0)
    assert cli.main(["bisect", str(engine), "-o", str(out), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert not told["ok"] and told["culprit"]["step"] == "swiglu"
    assert told["culprit"]["layer"] == 0 and Path(told["tensors"]).parent == out
    assert {"reference", "found"} <= set(told["culprit"]["tensors"])


def test_how_far_logits_may_be() -> None:
    """In float16 as far as eager's worst row, four times; in float32 a thousandth of the logits."""
    exact = torch.randn(20, 50, generator=torch.Generator().manual_seed(1))
    eager = exact + 0.01 * torch.linspace(0, 1, 20)[:, None]
    half = Allowed.by(eager, exact, routed=False)
    assert half.part(eager, exact) == pytest.approx(1 / 4)
    worse = eager.clone()
    worse[3] += 0.1  # one row
    assert half.part(worse, exact) > 1
    assert Allowed.by(eager, exact, routed=True).part(worse, exact) < 1  # a token's other expert
    assert half.part(worse.fill_(math.nan), exact) == math.inf
    full = Allowed.by(exact, exact, routed=True)
    assert full.limit == pytest.approx(4e-3 * float(exact.abs().mean()))
    wrong = exact.clone()
    wrong[3] += 2 * full.limit
    assert full.part(wrong, exact) == pytest.approx(2, rel=1e-5)


def test_row_error() -> None:
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    assert row_error(x, x) == 0
    wrong = x.clone()
    wrong[1] = -x[1]  # one row of five: not a fifth of the error
    assert row_error(x, wrong) == pytest.approx(2)
    tiny = x.clone()
    tiny[2] *= 1e-9
    assert row_error(tiny, tiny + 1e-9) < 1e-12  # judged against ordinary rows
    assert row_error(x, x.view(7, 5)) == 0 and row_error(x, x[:4]) == math.inf
    nan = x.clone()
    nan[0, 0] = math.nan
    assert row_error(nan, nan) == 0 and row_error(x, nan) == math.inf
    assert row_error(torch.arange(3), torch.tensor([0, 1, 3])) == math.inf
