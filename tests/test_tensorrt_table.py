"""Compiled kernels joined with the graph's operators and transformers' source lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seekforge.compile.cli import main
from seekforge.compile.tensorrt_layers import compiled_layers, parse_nodes
from seekforge.runtime.manifest import read_manifest

Engine = Callable[..., Path]


@pytest.fixture
def llama(tiny_engine: Engine) -> Path:
    """Two layers with untied embeddings."""
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")
    return tiny_engine("llama", "tensorrt-rtx", dtype="float16", head_dim=16)


def table_of(engine: Path) -> dict[str, Any]:
    layers = read_manifest(engine).layers
    assert layers is not None
    table: dict[str, Any] = layers["table"]
    return table


def test_names_of_a_kernel_have_a_control_character_between_them() -> None:
    assert parse_nodes("[ONNX Layer: a.b]\x1f[ONNX Layer: c]") == ("a.b", "c")
    assert parse_nodes("[ONNX Layer: a][ONNX Layer: b [profile 1]]\n") == ("a", "b [profile 1]")
    assert parse_nodes("") == ()


def test_kernels_are_sorted_into_profiles() -> None:
    line = "Name: {}, LayerType: k, Inputs: [], Metadata: [ONNX Layer: {}]"
    names = ("copy", "a_myl1_0", "b_myl1_1", "copy [profile 1]", "a_myl4_0")
    listing = "\n".join(["Layers:", *(line.format(name, name) for name in names)])
    found = compiled_layers([listing], 2)
    assert [layer.profile for layer in found] == [0, 0, 0, 1, 1]


def test_every_operator_that_computes_is_in_a_kernel(llama: Path) -> None:
    """Of two layers: embedding, 2 norms and 4 products and RoPE and attention and SwiGLU each …"""
    table = table_of(llama)
    assert len(table["profiles"]) == 2
    for profile in table["profiles"]:
        assert profile["found"] == profile["operators"] == 22 and profile["missing"] == []
        assert len(profile["kernels"]) > 20
        named = {table["nodes"][i]["operator"] for k in profile["kernels"] for i in k["nodes"]}
        assert {
            "rope", "gathered_attention", "swiglu", "add_rms_norm", "aten.linear", "aten.embedding",
        } <= named  # fmt: skip


def test_a_kernel_leads_to_module_and_source_line(llama: Path) -> None:
    table = table_of(llama)
    for number, profile in enumerate(table["profiles"]):
        kernel = "_gemm_mha" if number == 0 else "_gemv_mha"
        fused = [k for k in profile["kernels"] if kernel in k["name"]]
        assert len(fused) == 2
        for layer, found in enumerate(fused):
            (node,) = [table["nodes"][i] for i in found["nodes"]]
            assert node["operator"] == "gathered_attention"
            assert node["layer"] == f"model.layers.{layer}.self_attn"
            source = table["sources"][node["source"]]
            assert source.startswith("llama/modeling_llama.py:")
            assert "attention_interface(" in source
    down = next(n for n in table["nodes"] if n["onnx"] == "model.layers.1.mlp.down_proj.MatMul")
    assert (down["operator"], down["layer"]) == ("aten.linear", "model.layers.1.mlp.down_proj")
    assert "self.down_proj(" in table["sources"][down["source"]]
    assert len(set(table["sources"])) == len(table["sources"]) < 20


def test_inspect_shows_it(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(llama), "--layers"]) == 0
    text = capsys.readouterr().out
    assert "kernels name 22 of 22 operators that compute (100%)" in text
    assert "model.layers.1.self_attn  llama/modeling_llama.py:" in text
    assert main(["inspect", str(llama), "--json"]) == 0
    (engine,) = json.loads(capsys.readouterr().out)["engines"].values()
    assert engine["layers"]["table"] == table_of(llama)
    assert main(["inspect", str(llama)]) == 0
    assert "modeling_llama" not in capsys.readouterr().out.partition("  layers\n")[2]


def test_engines_without_one_are_named(
    tiny_engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(tiny_engine("llama", "onnxruntime")), "--layers"]) == 2
    assert "--layers: no TensorRT engine here" in capsys.readouterr().err.replace("\n", " ")
