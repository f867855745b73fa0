"""Six planted faults in real checkpoints, each named: step, node, layer; within three minutes.

Built and bisected while the fault is in force, as if the installed code were wrong. The fast twins
on tiny models are in test_bisect.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import planted
import pytest
import torch
from safetensors import safe_open

from seekforge.compile.bisect import bisect
from seekforge.compile.bisect_result import Bisection, format_bisection
from seekforge.compile.build import Options, build
from seekforge.models.default import resolve_checkpoint
from seekforge.passes.int4 import Int4Options

pytestmark = pytest.mark.slow

TRAINED = Path(__file__).parents[2] / "shared" / "checkpoints" / "tiny-deepseek-v3"
SECONDS = 180


def checkpoint(name: str) -> Path:
    if name == "default":
        return resolve_checkpoint("default")
    if not TRAINED.is_dir():
        pytest.skip("tiny-deepseek-v3 is not here")
    return TRAINED


def bisected(
    path: Path, out: Path, backend: str = "onnxruntime", dtype: str = "float32", **more: Any
) -> Bisection:
    """Builds an engine with nothing compared, and walks it."""
    options = Options(
        backends=(backend,), dtype=dtype, max_len=256, max_chunk=64, max_batch=4, verify="none",
        cache=False, **more,
    )  # fmt: skip
    (engine,) = build(path, out / "engines", options)
    found = bisect(engine, out=out / "culprit")
    print()
    print(format_bisection(found))
    print(f"bisected in {found.seconds:.1f} s")
    assert found.seconds <= SECONDS
    return found


def saved(found: Bisection) -> dict[str, torch.Tensor]:
    assert found.saved is not None
    with safe_open(found.saved, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def names(found: Bisection) -> tuple[str, str, int | None, str]:
    assert found.culprit is not None, format_bisection(found)
    culprit = found.culprit
    return culprit.step, culprit.operator, culprit.layer, culprit.module


@pytest.mark.parametrize(
    ("model", "backend", "dtype"),
    [
        ("default", "onnxruntime", "float32"), ("default", "onnxruntime", "float16"),
        ("default", "inductor", "float32"), ("tiny-deepseek-v3", "onnxruntime", "float32"),
        ("tiny-deepseek-v3", "onnxruntime", "float16"),
    ],
)  # fmt: skip
def test_no_fault(model: str, backend: str, dtype: str, tmp_path: Path) -> None:
    found = bisected(checkpoint(model), tmp_path, backend, dtype)
    assert found.culprit is None and found.saved is None
    assert [step.name for step in found.steps][-3:] == ["weights", "lowered", "runtime"]


@pytest.mark.parametrize(("model", "layer"), [("default", 17), ("tiny-deepseek-v3", 5)])
def test_wrong_rope_pairing(
    model: str, layer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted.wrong_rope_pairing(monkeypatch, layer)
    found = bisected(checkpoint(model), tmp_path)
    assert names(found) == ("rope", "seekforge.rope", layer, f"model.layers.{layer}.self_attn")
    assert saved(found)["reference"].shape == saved(found)["found"].shape


@pytest.mark.parametrize(("model", "layer"), [("default", 11), ("tiny-deepseek-v3", 0)])
def test_swapped_halves(
    model: str, layer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted.swapped_halves(monkeypatch, layer)
    found = bisected(checkpoint(model), tmp_path)
    assert names(found) == ("swiglu", "seekforge.swiglu", layer, f"model.layers.{layer}.mlp")
    assert f"[model.layers.{layer}.mlp.up_proj, model.layers.{layer}.mlp.gate_proj]" in str(
        found.culprit
    )


@pytest.mark.parametrize(
    ("model", "layer", "producer", "reader"),
    [
        ("tiny-deepseek-v3", 3, "self_attn.q_a_layernorm", "self_attn.q_b_proj"),
        ("default", 2, "self_attn.v_proj", "self_attn.o_proj"),
    ],
)
def test_scale_not_folded(
    model: str, layer: int, producer: str, reader: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    planted.scale_not_folded(monkeypatch, layer, f"{producer}.weight")
    found = bisected(checkpoint(model), tmp_path, quant="awq-int4", int4=Int4Options(group_size=64))
    prefix = f"model.layers.{layer}."
    assert names(found) == ("smoothed", "aten.linear", layer, prefix + reader)
    told = f"the scale of {prefix}{reader}.weight is not folded into {prefix}{producer}.weight"
    assert found.culprit is not None and told in found.culprit.detail


@pytest.mark.parametrize(("model", "layer"), [("default", 23), ("tiny-deepseek-v3", 0)])
def test_wrong_translation(
    model: str, layer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted.wrong_translation(monkeypatch, layer)
    found = bisected(checkpoint(model), tmp_path)
    assert names(found) == ("lowered", "seekforge.swiglu", layer, f"model.layers.{layer}.mlp")
    gate, up = saved(found)["input.0." + input_of(found)].chunk(2, -1)
    assert torch.allclose(saved(found)["found"], gate.sigmoid() * up, rtol=1e-4, atol=1e-6)


def input_of(found: Bisection) -> str:
    (name,) = [n for n in saved(found) if n.startswith("input.0.")]
    return name.removeprefix("input.0.")


@pytest.mark.parametrize(
    ("plant", "tensor"),
    [(planted.short_tables, "block_tables"), (planted.shared_block, "block_tables")],
)
@pytest.mark.parametrize("model", ["default", "tiny-deepseek-v3"])
def test_off_by_one_in_a_block_table(
    model: str, plant: Callable[[pytest.MonkeyPatch], None], tensor: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    plant(monkeypatch)
    found = bisected(checkpoint(model), tmp_path)
    assert found.culprit is not None, format_bisection(found)
    assert (found.culprit.step, found.culprit.node) == ("runtime", tensor)
    assert "of sequence" in found.culprit.detail


def test_overflow_in_a_norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default model's residual stream passes 256 behind its layer 2."""
    planted.overflowing_norm(monkeypatch)
    found = bisected(checkpoint("default"), tmp_path, dtype="float16")
    module = "model.layers.3.input_layernorm"
    assert names(found) == ("lowered", "seekforge.add_rms_norm", 3, module)
    x, residual, _ = (t.float() for n, t in saved(found).items() if n.startswith("input."))
    largest = float((x + residual).abs().max())
    print(f"largest value that the norm reads: {largest:.0f}")
    assert 256 < largest < torch.finfo(torch.float16).max
