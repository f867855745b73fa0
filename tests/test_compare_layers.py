"""The hidden state behind each layer: of the engine's own code, and where it goes wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from seekforge.compile import compare_layers
from seekforge.compile.build import Options, build
from seekforge.compile.compare import compare
from seekforge.compile.compare_judge import eager_layers
from seekforge.compile.compare_layers import layer_states, norm_weights
from seekforge.compile.compare_layers_inductor import add_hidden_package, hidden_states
from seekforge.compile.compare_layers_onnx import add_hidden_model
from seekforge.compile.compare_text import format_table
from seekforge.compile.export import export_checkpoint
from seekforge.compile.run_graph import run_graph
from seekforge.kernels.errors import InputError
from seekforge.kernels.tolerance import assert_close
from seekforge.models.checkpoint import open_checkpoint
from seekforge.passes.int4_options import Int4Options
from seekforge.passes.pipeline import run_fusions
from seekforge.runtime.manifest import read_manifest

TOKENS = [5, 80, 3, 250, 17, 9, 9, 41, 100, 7, 30, 2, 66, 54, 12, 201, 77]  # two blocks
PROMPTS = ["the capital of France is", "one"]


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_onnxruntime(
    tiny_engine: Callable[..., Path], tiny_checkpoint: Callable[..., Path],
    tiny_model: Callable[..., nn.Module], family: str,
) -> None:  # fmt: skip
    engine = tiny_engine(family, "onnxruntime")
    right = eager_layers(tiny_model(family), TOKENS)
    with layer_states(engine, tiny_checkpoint(family)) as states:
        found = states(TOKENS)
        (first, _) = states(TOKENS[:1])
    assert len(found) == len(right) == 2
    for i, (ours, theirs) in enumerate(zip(found, right, strict=True)):
        assert_close(ours, theirs, f"layer {i}")
    assert_close(first, right[0][:1], "one token")


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v2"])
def test_the_nodes_of_a_program(
    tiny_checkpoint: Callable[..., Path], tiny_model: Callable[..., nn.Module], family: str
) -> None:
    """What an AOTInductor engine is compiled again with."""
    checkpoint = open_checkpoint(tiny_checkpoint(family))
    program = export_checkpoint(checkpoint, "float32", 64)
    run_fusions(program, 64)
    nodes = [node.name for node in hidden_states(program, norm_weights(2))]
    ids = torch.tensor([TOKENS])
    inputs = {"input_ids": ids, "position_ids": torch.arange(len(TOKENS))[None]}
    found = run_graph(program, checkpoint.read, inputs, nodes)
    right = eager_layers(tiny_model(family), TOKENS)
    for i, (name, theirs) in enumerate(zip(nodes, right, strict=True)):
        assert_close(found[name].squeeze(0), theirs, f"layer {i}")
    with pytest.raises(InputError, match=r"no norm of the graph reads model.layers.2"):
        hidden_states(program, norm_weights(3))


def test_the_layer_where_it_begins(
    tiny_engine: Callable[..., Path], tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """A checkpoint whose second layer is another: the first agrees, the second does not."""
    other = tmp_path / "other"
    shutil.copytree(tiny_checkpoint("llama"), other)
    weights = load_file(other / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"] *= 1.01
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    result = compare(
        [tiny_engine("llama", "onnxruntime"), "eager:bfloat16"], other, PROMPTS, 4, layers=True
    )
    (row,), (eager,) = result.engines, result.eager
    assert row.layers is not None and row.layers[0] < 2e-12 and row.layers[1] > 1e-6
    assert eager.layers is not None and all(1e-7 < error < 1e-2 for error in eager.layers)
    lines = format_table(result).splitlines()
    assert lines[-1] == f"onnxruntime: {compare_layers.HOW['onnxruntime']}"
    assert lines[-4].split() == ["layer", "eager", "bfloat16", "onnxruntime"]
    assert lines[-2].split()[0] == "1" and float(lines[-2].split()[-1]) > 1e-6


def test_an_int4_engine_against_what_it_stands_for(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    options = Options(
        backends=("onnxruntime",), max_len=64, quant="rtn-int4", int4=Int4Options(16), verify="none"
    )
    (engine,) = build(tiny_checkpoint("deepseek_v3"), tmp_path, options)
    own, plain = (
        compare([engine], prompts=PROMPTS, max_tokens=4, judge=judge, layers=True).engines[0]
        for judge in ("reference", "checkpoint")
    )
    assert own.layers is not None and max(own.layers) < 4e-12
    assert plain.layers is not None and min(plain.layers) > 1e-4


def test_backends_that_cannot_be_looked_into(
    tiny_engine: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine("llama", "onnxruntime")
    found = read_manifest(engine)
    for manifest, said in (
        (
            replace(found, backend="tensorrt-rtx"),
            r"tensorrt-rtx engine.*possible for onnxruntime, inductor",
        ),
        (replace(found, dtype="bfloat16"), r"in bfloat16, which numpy does not have"),
    ):
        monkeypatch.setattr(compare_layers, "read_manifest", lambda _, m=manifest: m)
        with pytest.raises(InputError, match=said), layer_states(engine, engine):
            pass


def test_a_graph_without_the_norms(tiny_engine: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no norm in .*model.onnx reads model.layers.7.weight"):
        add_hidden_model(
            tiny_engine("llama", "onnxruntime"),
            tmp_path,
            ["model.norm.weight", "model.layers.7.weight"],
        )


def test_a_program_of_another_checkpoint(
    tiny_engine: Callable[..., Path], tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    engine = tiny_engine("llama", "onnxruntime")
    (tmp_path / "weights.safetensors").hardlink_to(engine / "weights.safetensors")
    manifest = replace(read_manifest(engine), form="ragged")
    with pytest.raises(InputError, match="other weights than the engine"):
        add_hidden_package(manifest, tiny_checkpoint("qwen2"), tmp_path, norm_weights(2))


@pytest.mark.slow  # Inductor compiles two engines: 60 s
def test_inductor(
    tiny_engine: Callable[..., Path], tiny_checkpoint: Callable[..., Path],
    tiny_model: Callable[..., nn.Module],
) -> None:  # fmt: skip
    engine = tiny_engine("deepseek_v3", "inductor")
    right = eager_layers(tiny_model("deepseek_v3"), TOKENS)
    with layer_states(engine, tiny_checkpoint("deepseek_v3")) as states:
        for i, (ours, theirs) in enumerate(zip(states(TOKENS), right, strict=True)):
            assert_close(ours, theirs, f"layer {i}")
