"""What a build need not do again: requests that name every change, and engines left as they are."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from seekforge.compile import build as building
from seekforge.compile import build_cache_request as requests
from seekforge.compile import build_cache_sources as sources
from seekforge.compile.build import Options, build
from seekforge.compile.build_cache_reuse import NEW, reason_to_build
from seekforge.kernels.errors import BuildError
from seekforge.models.content import content_digests
from seekforge.passes.int4_options import Int4Options
from seekforge.runtime.llm import LLM
from seekforge.runtime.manifest import hash_files, read_manifest

Make = Callable[..., Path]
ORT = Options(backends=("onnxruntime",), max_len=64, verify="none")
IDS = [3, 4, 5, 6]


@pytest.fixture
def checkpoint(tiny_checkpoint: Make, tmp_path: Path) -> Path:
    """A copy that may be changed, of files that are old enough to be remembered."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(tiny_checkpoint("llama"), folder)
    return folder


@pytest.fixture
def nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def heavy(*_: object) -> None:
        raise AssertionError("export was reached")

    monkeypatch.setattr(building, "export_checkpoint", heavy)


def reason(engine: Path, checkpoint: Path, options: Options) -> str | None:
    wanted = requests.request(checkpoint, options, engine.name)
    return reason_to_build(engine, wanted, checkpoint, options)


def change_weight(folder: Path) -> None:
    """One value of one tensor; size and modification time stay what they were."""
    file = folder / "model.safetensors"
    stat = file.stat()
    weights = load_file(file)
    weights["model.norm.weight"][3] += 1e-3
    save_file(weights, file, {"format": "pt"})
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)


def edit_json(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("options", "other", "said"),
    [
        ({}, {"max_len": 128}, "--max-len: 64, now 128"),
        ({}, {"max_batch": 4}, "--max-batch: 8, now 4"),
        ({}, {"block_size": 32}, "--block-size: 16, now 32"),
        ({}, {"dtype": "float16"}, "--dtype: auto, now float16"),
        ({}, {"quant": "rtn-int4"}, "--quant: None, now rtn-int4"),
        ({"quant": "rtn-int4"}, {"int4": Int4Options(64)}, "INT4 group_size: 128, now 64"),
        ({"quant": "rtn-int4"}, {"int4": Int4Options(symmetric=False)}, "INT4 symmetric: True"),
        ({"quant": "rtn-int4"}, {"int4": Int4Options(skip=("o_proj",))}, "INT4 skip: ('lm_head',)"),
        ({"backends": ("tensorrt-rtx",)}, {"target": "8.6"}, "--target: 8.9, now 8.6"),
    ],
)
def test_options_in_the_request(
    options: dict[str, Any], other: dict[str, Any], said: str, checkpoint: Path
) -> None:
    first = dataclasses.replace(ORT, **options)
    second = dataclasses.replace(first, **other)
    backend = first.backends[0]
    before = requests.request(checkpoint, first, backend)
    (change, *more) = requests.changes(before, requests.request(checkpoint, second, backend))
    assert change.startswith(said) or any(each.startswith(said) for each in more)
    assert requests.changes(before, requests.request(checkpoint, first, backend)) == []


def test_options_that_decide_nothing(checkpoint: Path) -> None:
    before = requests.request(checkpoint, ORT, "onnxruntime")
    for same in ({"verify": "full"}, {"cache": False}, {"target": "8.6"},
                 {"backends": ("onnxruntime", "inductor")}):  # fmt: skip
        after = requests.request(checkpoint, dataclasses.replace(ORT, **same), "onnxruntime")
        assert before == after, same


def test_files_in_the_request(checkpoint: Path) -> None:
    before = requests.request(checkpoint, ORT, "onnxruntime")
    change_weight(checkpoint)
    after = requests.request(checkpoint, ORT, "onnxruntime")
    assert requests.changes(before, after) == ["model.safetensors changed"]
    edit_json(checkpoint / "config.json", rms_norm_eps=1e-4)
    (checkpoint / "chat_template.jinja").write_text("{{ messages }}")
    last = requests.request(checkpoint, ORT, "onnxruntime")
    assert requests.changes(after, last) == ["chat_template.jinja new", "config.json changed"]


def test_calibration_text_in_the_request(checkpoint: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("one")
    options = dataclasses.replace(ORT, quant="awq-int4", calib=texts)
    before = requests.request(checkpoint, options, "onnxruntime")
    (texts / "a.txt").write_text("two")
    (change,) = requests.changes(before, requests.request(checkpoint, options, "onnxruntime"))
    assert change.startswith("--calib:")
    alone = dataclasses.replace(options, calib=texts / "a.txt")
    assert requests.changes(before, requests.request(checkpoint, alone, "onnxruntime"))


def test_own_sources_in_the_request(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = requests.request(checkpoint, ORT, "onnxruntime")
    for folder in ("kernels", "models", "passes", "compile", "runtime"):
        shutil.copytree(sources.ROOT / folder, tmp_path / "own" / folder)
    monkeypatch.setattr(sources, "ROOT", tmp_path / "own")
    assert requests.request(checkpoint, ORT, "onnxruntime") == before
    for name in ("passes/swiglu.py", "compile/bench.py"):
        with (tmp_path / "own" / name).open("a") as file:
            file.write("# a comment\n")
    after = requests.request(checkpoint, ORT, "onnxruntime")
    assert requests.changes(before, after) == ["passes/swiglu.py changed"]


def test_versions_and_machine_in_the_request(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = dataclasses.replace(ORT, backends=("inductor",))
    before = requests.request(checkpoint, options, "inductor")
    real = requests.version
    monkeypatch.setattr(requests, "version", lambda n: "9.9" if n == "torch" else real(n))
    monkeypatch.setattr(requests, "cpu", lambda: "another")
    monkeypatch.setattr(requests, "compiler", lambda: "g++ 99")
    monkeypatch.setenv("TORCHINDUCTOR_FREEZING", "1")
    found = requests.changes(before, requests.request(checkpoint, options, "inductor"))
    assert found[0].startswith("torch: ") and found[0].endswith(", now 9.9")
    assert found[1:] == ["processor changed", "compiler changed", "environment changed"]
    onnx = requests.request(checkpoint, options, "onnxruntime")
    assert onnx["machine"] == {}, "an ONNX model is the same for every machine"


def test_every_module_that_a_build_imports_counts() -> None:
    """Whatever lowering, the passes and the weight writer import decides the engine, or is named as
    deciding nothing."""
    script = (
        "import sys, seekforge.compile.lower, seekforge.compile.export, seekforge.compile.weights\n"
        "import seekforge.compile.quantise, seekforge.compile.kernel_cache\n"
        "import seekforge.passes.pipeline\n"
        "print(*(name for name in sys.modules if name.startswith('seekforge.')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    names = [name.split(".")[1:] for name in done.stdout.split()]
    loaded = {"/".join(parts) + ".py" for parts in names if len(parts) == 2}
    assert len(loaded) > 80
    aside = {
        "compile/account.py", "compile/build_cache.py", "compile/build_cache_sources.py",
        "compile/check_machine.py", "compile/check_model.py", "compile/quality.py",
        "compile/failures.py", "compile/failures_inductor.py", "compile/failures_known.py",
        "compile/reference.py", "compile/steps.py", "compile/execute.py", "runtime/prompt.py",
    }  # fmt: skip
    assert loaded - set(sources.source_digests()) <= aside


def test_nothing_changed(
    checkpoint: Path, tmp_path: Path, request: pytest.FixtureRequest, capsys: Any
) -> None:
    (engine,) = build(checkpoint, tmp_path / "out", ORT)
    manifest = (engine / "manifest.json").read_bytes()
    request.getfixturevalue("nothing_is_built")
    assert build(checkpoint, tmp_path / "out", ORT) == [engine]
    assert (engine / "manifest.json").read_bytes() == manifest
    os.utime(checkpoint / "model.safetensors")  # touched, not changed
    assert build(checkpoint, tmp_path / "out", ORT) == [engine]
    out = tmp_path / "ein Ordner ñ 世"  # the folder of engines moves
    (tmp_path / "out").rename(out)
    moved = out / "onnxruntime"
    assert build(checkpoint, out, ORT) == [moved]
    checkpoint.rename(tmp_path / "elsewhere")  # and the checkpoint
    assert build(tmp_path / "elsewhere", out, ORT) == [moved]
    assert read_manifest(moved).model["checkpoint"] == str(tmp_path / "elsewhere")
    assert "unchanged" in capsys.readouterr().err
    with pytest.raises(BuildError, match="export was reached"):
        build(tmp_path / "elsewhere", out, dataclasses.replace(ORT, cache=False))


def test_unchanged_without_torch(checkpoint: Path, tmp_path: Path) -> None:
    """The program says so before anything heavy is imported."""
    out = tmp_path / "out"
    build(checkpoint, out, ORT)
    script = (
        "import sys; from seekforge.compile.cli import main\n"
        "code = main(sys.argv[1:])\n"
        "assert not {'torch', 'transformers', 'onnx'} & set(sys.modules)\n"
        "sys.exit(code)\n"
    )
    arguments = ["build", str(checkpoint), "-o", str(out), "--backend", "onnxruntime"]
    arguments += ["--max-len", "64", "--verify", "none"]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(out / "onnxruntime")]
    assert done.stderr == "unchanged: onnxruntime\n"


def test_a_changed_weight_reaches_the_engine(checkpoint: Path, tmp_path: Path, capsys: Any) -> None:
    """Although size and time of its file are what they were."""
    (engine,) = build(checkpoint, tmp_path / "out", ORT)
    before = LLM(engine).score(IDS)
    change_weight(checkpoint)
    build(checkpoint, tmp_path / "out", ORT)
    assert "rebuilt: model.safetensors changed" in capsys.readouterr().err
    (fresh,) = build(checkpoint, tmp_path / "fresh", ORT)
    after = LLM(engine).score(IDS)
    assert (after != before).any() and (after == LLM(fresh).score(IDS)).all()


def test_verification_counts_when_asked_for(checkpoint: Path, tmp_path: Path) -> None:
    (engine,) = build(checkpoint, tmp_path, ORT)
    cheap, full = (dataclasses.replace(ORT, verify=level) for level in ("cheap", "full"))
    assert reason(engine, checkpoint, cheap) == "it is not verified with --verify cheap"
    build(checkpoint, tmp_path, cheap)
    assert reason(engine, checkpoint, cheap) is reason(engine, checkpoint, ORT) is None
    assert reason(engine, checkpoint, full) == "it is not verified with --verify full"
    manifest = read_manifest(engine)
    assert manifest.receipt is not None and manifest.receipt["executed"]
    assert {"name": "weights", "reused": "of onnxruntime"}.items() <= next(
        step for step in manifest.steps if step["name"] == "weights"
    ).items()


def test_damage_is_repaired(checkpoint: Path, tmp_path: Path) -> None:
    """A flipped byte in the weights does not come back through the weights' own recipe."""
    (engine,) = build(checkpoint, tmp_path, ORT)
    whole = hash_files([engine / "weights.safetensors"])
    file, stat = engine / "weights.safetensors", (engine / "weights.safetensors").stat()
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert reason(engine, checkpoint, ORT) == "weights.safetensors was changed or damaged"
    build(checkpoint, tmp_path, ORT)
    assert hash_files([file]) == whole
    file.write_bytes(bytes(data[:-1]))
    assert reason(engine, checkpoint, ORT) == "weights.safetensors was cut or changed"
    file.unlink()
    assert reason(engine, checkpoint, ORT) == "weights.safetensors is missing"
    (engine / "manifest.json").write_text("{")
    assert "manifest.json" in str(reason(engine, checkpoint, ORT))
    (engine / "manifest.json").unlink()
    assert reason(engine, checkpoint, ORT) == NEW


def test_files_are_read_once(tmp_path: Path) -> None:
    read: list[Path] = []

    def counted(files: Any) -> list[str]:
        read.extend(files)
        return hash_files(files)

    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(b"1")
    other.write_bytes(b"2")
    assert content_digests([one, other], counted) == hash_files([one, other])
    assert read == [one, other]
    read.clear()
    content_digests([one], counted)
    assert read == [one], "so young a file may still be changed within the same tick of the clock"
    for file in (one, other):
        os.utime(file, ns=(0, 1))
    later = max(file.stat().st_ctime_ns for file in (one, other)) + 3 * 10**9
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("seekforge.models.content.time.time_ns", lambda: later)
        content_digests([one, other], counted)
        read.clear()
        one.rename(tmp_path / "renamed")
        assert content_digests([other], counted) == hash_files([other]) and not read
        other.write_bytes(b"3")
        os.utime(other, ns=(0, 1))  # the time it had
        assert content_digests([other], counted) == hash_files([other]) and read == [other]


@pytest.mark.parametrize("there", ["file", "file/folder"])
def test_a_cache_folder_that_takes_nothing(
    there: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path through a file, which even root can not write to: builds go on, files are read."""
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / there))
    later = time.time_ns() + 10_000_000_000
    monkeypatch.setattr("seekforge.models.content.time.time_ns", lambda: later)
    (engine,) = build(checkpoint, tmp_path / "out", ORT)
    assert (
        reason_to_build(engine, requests.request(checkpoint, ORT, "onnxruntime"), checkpoint, ORT)
        is None
    )
