"""The build as a transaction: what it refuses beforehand, and what a failure leaves behind."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from seekforge.compile import build as building
from seekforge.compile import compare_result, lower
from seekforge.compile.build import Options, build
from seekforge.compile.weights import data_offsets
from seekforge.kernels.errors import BuildError, EngineError, InputError
from seekforge.passes.rule import PassResult
from seekforge.runtime.fit import resolve_engine
from seekforge.runtime.manifest import read_manifest

Checkpoint = Callable[..., Path]
ORT = Options(backends=("onnxruntime",), max_len=64)


def leftovers(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir()) if folder.exists() else []


def test_manifest_tells_what_was_built(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("qwen2")
    (engine,) = build(checkpoint, tmp_path / "out", ORT)
    manifest = read_manifest(engine)
    assert manifest.form == "padded" and manifest.dtype == "float32"
    assert manifest.limits.max_len == 64 and manifest.kv.pools["k"] == (2, 8)
    assert [spec.name for spec in manifest.inputs[:6]] == [
        "token_ids", "positions", "block_tables", "past_lens", "logits_rows", "k_pool_0",
    ]  # fmt: skip
    fired = {result["name"]: result["fired"] for result in manifest.passes}
    assert fired["qkv"] == fired["swiglu"] == fired["rope"] == 2 and fired["add_rms_norm"] == 4
    assert manifest.receipt is not None and manifest.receipt["passed"]
    assert {"export", "passes", "weights", "ONNX", "verify"} <= {s["name"] for s in manifest.steps}
    assert all(s["peak_bytes"] > 0 for s in manifest.steps)
    assert leftovers(tmp_path / "out") == ["onnxruntime"]


def test_rebuild_replaces(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    build(tiny_checkpoint("llama"), tmp_path, ORT)
    build(tiny_checkpoint("qwen3"), tmp_path, ORT)
    assert read_manifest(tmp_path / "onnxruntime").model["model_type"] == "qwen3"
    assert leftovers(tmp_path) == ["onnxruntime"]


@pytest.mark.parametrize("max_len", [1, 3])
def test_short_engines(max_len: int, tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Shorter than the sample that export traces with."""
    options = dataclasses.replace(ORT, max_len=max_len, verify="none")
    (engine,) = build(tiny_checkpoint("llama"), tmp_path, options)
    assert read_manifest(engine).limits.max_len == max_len


def test_fp64_settles_what_is_beyond_the_limit(
    tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large weights make fp32 eager itself uncertain. That a wrong engine does not pass so is the
    next test's matter."""
    monkeypatch.setattr(compare_result, "FP32_LIMIT", 1e-9)
    (engine,) = build(tiny_checkpoint("deepseek_v3"), tmp_path, ORT)
    receipt = read_manifest(engine).receipt
    assert receipt is not None and receipt["passed"] and 1e-9 < receipt["judged"] < 1e-4


def test_failed_step_leaves_nothing(
    tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise BuildError("planted")

    monkeypatch.setattr(lower.onnx, "write_onnx", fail)
    with pytest.raises(BuildError, match="planted"):
        build(tiny_checkpoint("llama"), tmp_path, ORT)
    assert leftovers(tmp_path) == []


def test_wrong_engine_does_not_pass_verification(
    tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: half of one norm's weights are zero."""
    write = building.write_weights

    def off(program, checkpoint, path, *rest):  # type: ignore[no-untyped-def]
        size = write(program, checkpoint, path, *rest)
        data = bytearray(path.read_bytes())
        start, length = data_offsets(path)["model.norm.weight"]
        data[start : start + length // 2] = bytes(length // 2)
        path.write_bytes(data)
        return size

    monkeypatch.setattr(building, "write_weights", off)
    with pytest.raises(BuildError, match="does not compute what the checkpoint computes"):
        build(tiny_checkpoint("llama"), tmp_path, ORT)
    assert leftovers(tmp_path) == []


def test_too_few_fusions_end_the_build(
    tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "seekforge.passes.pipeline.fuse_qkv", lambda program: PassResult("qkv", fired=1)
    )
    with pytest.raises(BuildError, match="qkv: expected 2 matches, found 1"):
        build(tiny_checkpoint("llama"), tmp_path, ORT)


def test_killed_build_leaves_no_engine(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path\n"
        "from seekforge.compile import build as b, lower\n"
        "lower.onnx.write_onnx = lambda *a: (print('reached', flush=True), time.sleep(60))\n"
        "b.build(Path(sys.argv[1]), Path(sys.argv[2]), b.Options(backends=('onnxruntime',)))\n"
    )
    command = [sys.executable, "-c", script, str(tiny_checkpoint("llama")), str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None and process.stdout.readline().strip() == b"reached"
    process.kill()
    process.wait()
    assert leftovers(tmp_path / "out") != []  # the killed build could not clean up …
    with pytest.raises(EngineError):
        resolve_engine(tmp_path / "out")  # … but nothing of it loads
    build(tiny_checkpoint("llama"), tmp_path / "out", ORT)
    assert leftovers(tmp_path / "out") == ["onnxruntime"]  # and the next build sweeps it away


def test_interrupted_compile_ends_its_processes(
    tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*args, **kwargs):  # type: ignore[no-untyped-def]
        process = popen(*args, **kwargs)
        started.append(process)
        if len(started) == 2:
            raise KeyboardInterrupt
        return process

    monkeypatch.setattr("seekforge.compile.inductor.subprocess.Popen", start)
    with pytest.raises(KeyboardInterrupt):
        build(tiny_checkpoint("llama"), tmp_path, Options(backends=("inductor",), max_len=64))
    assert leftovers(tmp_path) == []
    started[1].kill()
    deadline = time.monotonic() + 10
    while started[0].poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert started[0].poll() is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backends": ("vulkan",)}, "vulkan"),
        ({"backends": ()}, "no backend"),
        ({"dtype": "int3"}, "int3"),
        ({"device": "tpu"}, "tpu"),
        ({"max_batch": 0}, "max-batch is 0"),
        ({"max_len": -4}, "max-len is -4"),
    ],
)
def test_options_are_checked(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Options(**options)  # type: ignore[arg-type]


def test_refusals_before_anything_heavy(
    tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def heavy(*_: object) -> None:
        raise AssertionError("export was reached")

    monkeypatch.setattr(building, "export_checkpoint", heavy)
    checkpoint = tiny_checkpoint("llama")
    with pytest.raises(InputError, match=r"257.*256"):
        build(checkpoint, tmp_path, Options(max_len=257))
    with pytest.raises(InputError, match="bfloat16"):
        build(checkpoint, tmp_path, Options(backends=("onnxruntime",), dtype="bfloat16"))
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(InputError, match="cannot be written"):
        build(checkpoint, blocked / "out", ORT)
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    data = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(InputError, match=r"truncated|bytes"):
        build(broken, tmp_path / "out", ORT)
    assert leftovers(tmp_path / "out") == []
