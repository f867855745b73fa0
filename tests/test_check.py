"""Pre-flight: its counts are the build's, its refusals come before it, its predictions hold."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from seekforge.compile.account import account
from seekforge.compile.build import build
from seekforge.compile.check import check
from seekforge.compile.check_machine import (
    compiler_problems,
    outdated,
    requirements,
    target_problems,
)
from seekforge.compile.check_model import (
    alike,
    count_calls,
    examine,
    facts_of,
    open_subject,
    shortened,
)
from seekforge.compile.check_outcomes import format_outcomes, outcomes
from seekforge.compile.check_text import format_check
from seekforge.compile.cli import main
from seekforge.compile.export import export_checkpoint
from seekforge.compile.options import Options
from seekforge.compile.plan import int4_options, plan_of
from seekforge.kernels.errors import CheckpointError, InputError
from seekforge.models.config import parse_config
from seekforge.passes.int4 import Int4Options
from seekforge.passes.pipeline import run_pipeline
from seekforge.runtime.manifest import read_manifest

Checkpoint = Callable[..., Path]
CONFIGS = Path(__file__).parent / "configs"
SMALL = {"max_len": 64, "max_chunk": 16, "max_batch": 2}


@pytest.mark.parametrize(
    ("family", "overrides", "int4", "form"),
    [
        ("llama", {"num_hidden_layers": 5}, None, "ragged"),
        ("qwen2", {"tie_word_embeddings": True}, Int4Options(16), "padded"),
        ("deepseek_v3", {"num_hidden_layers": 4, "first_k_dense_replace": 1}, None, "padded"),
        ("deepseek_v2", {"num_hidden_layers": 3}, Int4Options(16), "ragged"),
        (
            "qwen3_moe",
            {"num_hidden_layers": 3, "decoder_sparse_step": 2},
            Int4Options(16, skip=("lm_head", "layers.2.")),
            "ragged",
        ),
    ],
)
def test_one_layer_of_each_kind_counts_for_all(
    tiny_checkpoint: Checkpoint,
    family: str,
    overrides: dict[str, Any],
    int4: Int4Options | None,
    form: str,
) -> None:
    subject = open_subject(tiny_checkpoint(family, **overrides))
    found = examine(subject, form, "float16", 64, int4, "cpu")
    assert subject.checkpoint is not None
    program = export_checkpoint(subject.checkpoint, "float16", 64)
    layers = subject.spec.num_layers
    exported = count_calls(program, layers)
    run_pipeline(program, form, 64, None, int4)
    assert found.facts == facts_of(program, exported, layers, subject)
    stored = sum(program.tensor(name).nbytes for name in program.weights)
    assert found.facts.weights == stored
    assert found.facts.int4 > 0 if int4 else found.facts.int4 == 0


def test_layers_that_are_alike(tiny_checkpoint: Checkpoint) -> None:
    subject = open_subject(tiny_checkpoint("deepseek_v3", num_hidden_layers=5, n_group=4))
    assert alike(subject, None) == {0: 1, 1: 4}
    assert alike(subject, Int4Options(skip=("layers.3",))) == dict.fromkeys(range(5), 1)
    qwen = open_subject(tiny_checkpoint("qwen2", num_hidden_layers=3))
    assert shortened(qwen.config, 2).layer_types == qwen.config.layer_types[:2]
    assert qwen.config.num_hidden_layers == 3


def test_published_v3_in_seconds_without_weights() -> None:
    start = time.perf_counter()
    report = check(CONFIGS / "deepseek-v3.json", Options(("inductor",), max_len=1024))
    assert time.perf_counter() - start < 60
    engine = report["engines"]["inductor"]
    assert report["model"]["parameters"] == 671_026_404_352
    assert engine["facts"]["experts"] == 58 and engine["facts"]["nodes"] > 60 * 20
    assert engine["run"]["kv_token_bytes"] == 61 * 576 * 4
    assert not report["ok"]  # 2.7 TB of fp32 weights
    assert "of weights and then 0 tokens" in format_check(report)


@pytest.mark.slow
def test_published_v3_counts_are_those_of_the_whole_graph() -> None:
    config = parse_config(CONFIGS / "deepseek-v3.json")
    whole = account(config)
    found = examine(
        open_subject(CONFIGS / "deepseek-v3.json"), "ragged", "bfloat16", 2048, None, "cpu"
    )
    assert found.facts.weights == sum(whole["weight_bytes"].values())


def test_options_that_do_not_fit_are_refused_or_listed(
    tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    path = tiny_checkpoint("llama")
    with pytest.raises(InputError, match="--max-len 300 is outside"):
        check(path, Options(("inductor",), max_len=300))
    with pytest.raises(CheckpointError, match="is not there"):
        check(tmp_path / "config.json", Options(("inductor",)))
    report = check(path, Options(("onnxruntime",), dtype="bfloat16", **SMALL))
    (problem,) = report["engines"]["onnxruntime"]["problems"]
    assert "no bfloat16 kernels" in problem["what"] and "float32 or float16" in problem["do"]
    report = check(path, Options(("tensorrt-rtx",), target="9.0", **SMALL))
    kinds = [problem["what"] for problem in report["engines"]["tensorrt-rtx"]["problems"]]
    assert any("--target 9.0" in what for what in kinds)
    assert any("head_dim 8: TensorRT" in what for what in kinds)
    assert "will not do" in format_check(report)


def test_a_gpus_memory_decides_what_fits(tiny_checkpoint: Checkpoint) -> None:
    path = tiny_checkpoint("llama", head_dim=16)
    options = Options(("tensorrt-rtx",), **SMALL)
    runs = [
        check(path, options, gpu_bytes=size)["engines"]["tensorrt-rtx"]
        for size in (705 << 20, 24 << 30)
    ]
    assert any("KV cache" in p["what"] for p in runs[0]["problems"])
    assert runs[1]["run"]["kv_tokens"] > 1_000_000 and not runs[1]["problems"]
    assert runs[1]["run"]["pool_tokens"] == runs[1]["run"]["wanted_tokens"] == 2 * 64
    token = 2 * 2 * (16 + 16) * 2  # layers, bytes, K and V of a head, KV heads
    assert runs[1]["run"]["kv_token_bytes"] == token
    assert [p["token_ids"]["max"] for p in runs[1]["profiles"]] == [[1, 16], [2, 1]]


def test_disk_and_memory_that_are_short(
    tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, options = tiny_checkpoint("llama"), Options(("onnxruntime",), **SMALL)
    monkeypatch.setattr("seekforge.compile.check.free_disk", lambda _: 1000)
    monkeypatch.setattr("seekforge.compile.check_machine.available_memory", lambda: 1 << 20)
    report = check(path, options)
    text = format_check(report)
    assert not report["ok"] and "1,000" not in text
    assert "are free in" in text and "step 'verify' will take" in text and "--no-verify" in text


def test_compilers_that_break_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A wrapper that links the C++ library statically, one that fails, one that is not there."""

    def said(script: str | None) -> str:
        compiler = tmp_path / "g++"
        if script is None:
            compiler.unlink()
        else:
            compiler.write_text(f"#!/bin/sh\n{script}\n")
            compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        return "; ".join(map(str, compiler_problems()))

    assert said('exec g++ "$@"') == ""
    assert "crash when they are loaded; set CXX to the system's own" in said(
        'exec g++ -static-libstdc++ "$@"'
    )
    assert "cannot make a shared library: no such option" in said(
        'echo "no such option" >&2; exit 1'
    )
    assert "is not there; install g++" in said(None)
    assert any("CXX" in p.do for p in requirements("inductor", "cpu", "float32", "8.9"))


def test_versions_and_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outdated(("torch", "transformers", "onnx")) == []
    monkeypatch.setattr(
        "seekforge.compile.check_machine.installed",
        lambda name: "2.9.1" if name == "torch" else None,
    )
    (problem,) = outdated(("torch", "transformers"))
    assert "torch 2.9.1 is installed; >=2.11 is needed" in problem.what
    assert "pip install 'torch>=2.11'" in problem.do
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")
    assert target_problems("8.9") == []
    assert "7.5, 8.0" in target_problems("9.0")[0].what


def test_a_build_refuses_what_the_check_lists(
    tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    with pytest.raises(InputError, match=r"no C\+\+ compiler: /nonexistent"):
        build(tiny_checkpoint("llama"), tmp_path, Options(("inductor",), **SMALL))
    assert os.listdir(tmp_path) == []  # noqa: PTH208


def test_quantised_twice_is_refused(tiny_checkpoint: Checkpoint) -> None:
    subject = open_subject(tiny_checkpoint("llama"))
    assert int4_options(subject.checkpoint, Options(("inductor",))) is None
    plan = plan_of(subject, Options(("inductor",), quant="rtn-int4", **SMALL), "inductor")
    assert plan.int4 == "rtn-int4" and plan.subject.endswith("inductor cpu rtn-int4")


def test_predictions_are_kept_and_compared(
    tiny_checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, options = tiny_checkpoint("llama"), Options(("onnxruntime",), **SMALL)
    (engine,) = build(path, tmp_path, options)
    manifest = read_manifest(engine)
    assert manifest.predicted is not None
    steps = {step["name"] for step in manifest.steps}
    assert steps == set(manifest.predicted["steps"])
    assert main(["check", str(tmp_path), "--outcomes", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    memory = {row["what"]: row["error"] for row in rows if row["kind"] == "memory"}
    assert set(memory) == steps and max(map(abs, memory.values())) < 0.25, memory
    (size,) = [row for row in rows if row["kind"] == "size"]
    assert size["found"] == sum(entry.size for entry in manifest.files)
    assert abs(size["error"]) < 0.15, size
    assert "memory within 15% in" in format_outcomes(outcomes(tmp_path))
    report = check(path, options)["engines"]["onnxruntime"]
    assert report["steps"]["export"]["recorded"]  # the build's own seconds
    assert report["facts"]["weights"] > 0 and list(report["steps"]) == list(
        manifest.predicted["steps"]
    )


def test_folders_without_predictions(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no engine with predictions"):
        outcomes(tmp_path)


def test_check_on_the_command_line(
    tiny_checkpoint: Checkpoint,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # no build is remembered there
    shutil.copyfile(tiny_checkpoint("deepseek_v3") / "config.json", tmp_path / "config.json")
    arguments = ["check", str(tmp_path), "--backend", "inductor", "--max-len", "64"]
    assert main([*arguments, "--device", "cuda"]) == (0 if torch.cuda.is_available() else 1)
    text = capsys.readouterr().out
    assert " on the GPU" in text
    assert torch.cuda.is_available() or "no GPU is known here: give its memory" in text
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "will build" in text and "(default)" in text and "KV cache" in text
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and report["limits"] == dataclasses.asdict(
        plan_of(open_subject(tmp_path), Options(("inductor",), max_len=64), "inductor").limits
    )
