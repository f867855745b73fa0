"""On how much of a model passes are proven, and what the manifest keeps."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from seekforge.compile import verify_level
from seekforge.compile.build import Options, build
from seekforge.compile.check_model import Subject, open_subject
from seekforge.compile.steps import Steps
from seekforge.compile.verify_error import PassError, difference, median_error
from seekforge.compile.verify_level import PassProof, cheap_layers
from seekforge.kernels.errors import InputError
from seekforge.models.checkpoint import Checkpoint
from seekforge.passes.int4_options import Int4Options
from seekforge.runtime.manifest import MANIFEST_NAME, read_manifest

ORT = Options(backends=("onnxruntime",), max_len=64)


def test_cheap_is_one_layer_of_each_kind(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = open_subject(tiny_checkpoint("llama", num_hidden_layers=12))
    routed = open_subject(
        tiny_checkpoint("deepseek_v3", num_hidden_layers=6, first_k_dense_replace=3)
    )
    assert cheap_layers(dense) == (2, ())
    assert cheap_layers(routed) == (4, ())
    monkeypatch.setattr(verify_level, "MOST_LAYERS", 2)
    assert cheap_layers(routed) == (2, (3,))


@pytest.mark.parametrize("int4", [None, Int4Options(16, skip=("lm_head", "layers.5.mlp"))])
def test_only_the_first_layers_are_read(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, int4: Int4Options | None
) -> None:
    """Also where the user names a layer that is not run."""
    subject = open_subject(tiny_checkpoint("llama", num_hidden_layers=6))
    read: set[str] = set()
    plain = Checkpoint.read

    def watched(self: Checkpoint, name: str) -> Tensor:
        read.add(name.split(".")[2] if "layers" in name else name)
        return plain(self, name)

    monkeypatch.setattr(Checkpoint, "read", watched)
    shown = StringIO()
    steps = Steps("test", Console(file=shown, width=200))
    proof = PassProof(subject, "cheap", "padded", "float32", 64, int4, "cpu")
    assert not proof.whole
    proof.run_short(steps)
    proof.finish(steps)
    assert read == {"0", "1", "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"}
    assert [step["name"] for step in steps.done] == [verify_level.STEP]
    passes = 12 if int4 else 11
    assert f"{passes} passes proven on 2 of 6 layers, 15 tokens: largest" in shown.getvalue()
    assert ("INT4 by plain rounding" in shown.getvalue()) == (int4 is not None)


def test_kinds_left_out_are_said(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_level, "MOST_LAYERS", 2)
    subject: Subject = open_subject(
        tiny_checkpoint("deepseek_v3", num_hidden_layers=6, first_k_dense_replace=3)
    )
    shown = StringIO()
    steps = Steps("test", Console(file=shown, width=200))
    proof = PassProof(subject, "cheap", "ragged", "float32", 64, None, "cpu")
    proof.run_short(steps)
    proof.finish(steps)
    assert "not run: kinds of layers that begin at layer 3" in shown.getvalue()
    assert proof.record()["kinds_left_out"] == [3]


@pytest.mark.parametrize(("level", "layers"), [("cheap", 2), ("full", 3), ("none", None)])
def test_the_manifest_has_it(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, level: str, layers: int | None
) -> None:
    checkpoint = tiny_checkpoint("qwen3", num_hidden_layers=3)
    (engine,) = build(checkpoint, tmp_path, replace(ORT, verify=level))
    manifest = read_manifest(engine)
    assert manifest.proof is not None and manifest.proof["level"] == level
    assert manifest.proof.get("layers") == layers
    errors = {entry["name"]: entry.get("error") for entry in manifest.passes}
    if layers is None:
        assert set(errors.values()) == {None}
        assert manifest.receipt == {"executed": False, "reason": "built with --no-verify"}
        return
    assert [name for name, error in errors.items() if error is None] == ["logits_rows"]
    assert 0 < errors["kv_cache"]["normalised"] < manifest.proof["limit"] == 2e-12 * layers
    assert errors["kv_cache"]["max"] > errors["kv_cache"]["mean"] > 0
    assert errors["mla"]["same"] and not errors["rope"]["same"]
    steps = [step["name"] for step in manifest.steps]
    assert manifest.predicted is not None and set(steps) == set(manifest.predicted["steps"])
    assert (verify_level.STEP in steps) == (level == "cheap")
    assert "Infinity" not in (engine / MANIFEST_NAME).read_text()


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(InputError, match="--verify most: unknown; one of none, cheap, full"):
        Options(verify="most")


def test_figures() -> None:
    """3 and 4 off in a plane of size 1: relative to the root mean square."""
    old = torch.ones(2, 50)
    new = old.clone()
    new[1, :2] = torch.tensor([4.0, 5.0])
    error = difference(old, new)
    assert (error.max, error.mean) == (4.0, 0.07)
    assert error.normalised == pytest.approx(25 / (100 + 98 + 16 + 25))
    assert median_error(old, new) == 0.0  # of two positions the lower
    assert json.dumps(PassError(float("inf"), 0.0, 0.0, 0.0).to_dict()).startswith(
        '{"normalised": null'
    )


def test_values_that_are_not_finite() -> None:
    old = torch.ones(3, 4)
    new = old.clone()
    new[0, 0] = torch.nan
    assert difference(old, new).normalised == median_error(old, new) == float("inf")
    assert difference(new, new).normalised == 0.0  # in the same places
