"""The fusion account: of engines, and of models that no family describes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from seekforge.compile.account import account_passes
from seekforge.compile.account_text import format_passes, grouped_misses
from seekforge.compile.account_unknown import _by_inductor
from seekforge.compile.build import Options, build
from seekforge.compile.cli import main
from seekforge.compile.inspect import describe, format_description
from seekforge.kernels.attention import attention
from seekforge.kernels.errors import CheckpointError
from seekforge.passes.pattern import Miss
from seekforge.passes.rule import PassResult

SIZES: dict[str, Any] = {
    "vocab_size": 293, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def unknown(folder: Path, kind: str, **overrides: Any) -> dict[str, Any]:
    AutoConfig.for_model(kind, **SIZES | overrides).save_pretrained(folder)
    return describe(folder)["unknown"]


def by_name(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {result["name"]: result for result in found["passes"]}


def test_mistral_is_accounted_for_and_not_built(tmp_path: Path) -> None:
    found = unknown(tmp_path, "mistral")
    assert found["stopped"] is None
    passes = by_name(found)
    names = ("rms_norm", "add_rms_norm", "rope", "qkv", "swiglu", "kv_cache")
    assert [passes[name]["fired"] for name in names] == [7, 6, 3, 3, 3, 3]
    assert all(result["expected"] is None for result in found["passes"])
    assert passes["rms_norm"]["nodes_after"] < passes["rms_norm"]["nodes_before"]
    assert set(found["uncovered"]) == {"inductor", "onnxruntime", "tensorrt"}
    assert not any(found["uncovered"].values())
    with pytest.raises(CheckpointError, match=r"'mistral'.*not supported.*inspect CHECKPOINT"):
        build(tmp_path, tmp_path / "out", Options())


def test_operators_that_a_backend_has_no_form_for(tmp_path: Path) -> None:
    found = unknown(tmp_path, "gemma")
    (miss, *_) = by_name(found)["rms_norm"]["misses"]
    assert "expected a weight" in miss["reason"] and "modeling_gemma.py:" in miss["source"]
    onnx = found["uncovered"]["onnxruntime"]
    assert set(onnx) == {"aten.pow.Tensor_Scalar", "aten.mean.dim", "aten.rsqrt", "aten.gelu"}
    assert onnx["aten.rsqrt"]["count"] == 2 * 3 + 1
    assert "modeling_gemma.py:" in onnx["aten.rsqrt"]["source"]
    assert found["uncovered"]["tensorrt"] == onnx and not found["uncovered"]["inductor"]
    text = format_description({"unknown": found})
    assert "aten.rsqrt 7, first gemma/modeling_gemma.py:" in text
    assert "near-miss 7 x" in text and "tensorrt      those of onnxruntime" in text


def test_heads_that_tensorrt_has_no_fused_attention_for(tmp_path: Path) -> None:
    found = unknown(tmp_path, "olmo2", num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    more = set(found["uncovered"]["tensorrt"]) - set(found["uncovered"]["onnxruntime"])
    assert more == {"gathered_attention"}
    assert "head_dim 8" in found["uncovered"]["tensorrt"]["gathered_attention"]["reason"]
    assert "those of onnxruntime, and" in format_description({"unknown": found})


def test_a_pass_that_stops_is_named_with_what_came_before(tmp_path: Path) -> None:
    """phi3 slices one projection where the residual stream has lost a dimension."""
    found = unknown(tmp_path, "phi3")
    assert found["stopped"]["step"] == "kv_cache"
    assert "modeling_phi3.py:" in found["stopped"]["message"]
    assert list(by_name(found))[-1] == "cleanup"
    assert found["uncovered"]["inductor"]["attention"]["count"] == 3
    assert "aten.chunk" in found["uncovered"]["onnxruntime"]
    assert "stopped at kv_cache" in format_description({"unknown": found})


def test_an_export_that_fails_is_told(tmp_path: Path) -> None:
    found = unknown(tmp_path, "gemma2")
    assert found["stopped"]["step"] == "export" and "soft cap" in found["stopped"]["message"]
    assert not found["passes"] and found["parameters"] > 0
    assert "soft cap" in format_description({"unknown": found})


def test_weights_need_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unknown(tmp_path, "mistral", num_hidden_layers=1)
    (tmp_path / "model.safetensors.index.json").write_text("{}")  # so it has weights
    assert main(["inspect", str(tmp_path)]) == 2
    assert "--graph" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path), "--graph", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unknown"]["model_type"] == "mistral"


def test_names_that_transformers_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nonsense"}))
    with pytest.raises(CheckpointError, match=r"config\.json.*nonsense"):
        describe(tmp_path)


def test_inductor_takes_what_torch_can_run() -> None:
    library = torch.library.Library("seekforge_test", "DEF")
    library.define("nowhere(Tensor x) -> Tensor")
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    reasons = [
        _by_inductor(graph.call_function(target, (x,)))
        for target in (
            torch.ops.aten.silu.default, torch.ops.seekforge_test.nowhere.default, attention, len,
        )
    ]  # fmt: skip
    no_kernel, no_cache = "torch has no CPU kernel for it", "the KV cache was not inserted"
    assert reasons == [None, no_kernel, no_cache, None]


def test_engines_say_what_was_expected(tiny_engine: Callable[..., Path]) -> None:
    engine = tiny_engine("deepseek_v3", "onnxruntime")
    (found,) = describe(engine)["engines"].values()
    passes = by_name(found)
    for name in ("rms_norm", "add_rms_norm", "rope", "qkv", "swiglu", "mla", "moe", "kv_cache"):
        assert passes[name]["expected"] == passes[name]["fired"] > 0, name
    assert passes["normalise"]["expected"] is None and passes["normalise"]["seconds"] > 0
    (line,) = [x for x in format_description(describe(engine)).split("\n") if "  mla  " in x]
    nodes = f"{passes['mla']['nodes_before']} -> {passes['mla']['nodes_after']}"
    assert line.split()[:3] == ["mla", "2", "2"] and nodes in line
    assert float(line.split()[-1]) == pytest.approx(passes["mla"]["seconds"] * 1e3, abs=0.06)


def test_text_of_too_few_matches_and_of_old_engines() -> None:
    lines = (1, 1, 2)
    misses = tuple(
        Miss(f"mul_{i}", f"expected x, found y_{i}", f"a.py:{line}") for i, line in enumerate(lines)
    )
    (result,) = account_passes([PassResult("swiglu", 1, misses, 9, 7, 0.5)], {"swiglu": 4})
    text = format_passes([result])
    assert "TOO FEW" in text[1] and "9 -> 7" in text[1] and "500.0" in text[1]
    assert [count for count, _ in grouped_misses(result["misses"])] == [2, 1]
    assert "first mul_0 (a.py:1)" in text[3] and "first mul_2 (a.py:2)" in text[5]
    del result["expected"]
    assert "TOO FEW" not in format_passes([result])[1]
