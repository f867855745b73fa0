"""What is left of builds killed (SIGKILL) in each step, and of two builds at once."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import pytest

from seekforge.compile.build import Options, build
from seekforge.compile.build_cache import entries
from seekforge.compile.bundle import exclusive
from seekforge.kernels.errors import EngineError
from seekforge.runtime.fit import resolve_engine
from seekforge.runtime.llm import LLM
from seekforge.runtime.manifest import read_manifest

Make = Callable[..., Path]
Kill = Callable[[Path, Path, Options, str], None]
KILLED = Path(__file__).with_name("killed.py")
ORT = Options(backends=("onnxruntime",), max_len=64, verify="none")


@pytest.fixture(scope="module")
def builder() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, str(KILLED)], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def kill(builder: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kill:
    """`kill(checkpoint, out, options, step)`: a build, killed in the middle of `step`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    commands: Any = builder.stdin
    said: IO[str] = builder.stdout  # type: ignore[assignment]

    def run(checkpoint: Path, out: Path, options: Options, step: str) -> None:
        fields = (field.name for field in dataclasses.fields(options))
        given = {n: getattr(options, n) for n in fields if n != "int4"}
        given["calib"] = options.calib and str(options.calib)
        case = {"checkpoint": str(checkpoint), "out": str(out), "options": given, "step": step}
        print(json.dumps(case | {"cache": str(tmp_path / "cache")}), file=commands, flush=True)
        pid = int(said.readline().split()[1])
        assert said.readline() == "reached\n"
        os.kill(pid, signal.SIGKILL)
        assert said.readline() == "ended\n"

    return run


def reused(engine: Path) -> list[str]:
    return [step["name"] for step in read_manifest(engine).steps if "reused" in step]


def contents(engine: Path) -> dict[str, str]:
    return {entry.path: entry.sha256 for entry in read_manifest(engine).files}


def leftovers(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir())


@pytest.fixture(scope="module")
def whole(
    tiny_checkpoint: Make, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, str]]:
    """What an uninterrupted build of a model gives: the digests of its files."""
    made: dict[str, dict[str, str]] = {}

    def make(model: str) -> dict[str, str]:
        if model not in made:
            (engine,) = build(tiny_checkpoint(model), tmp_path_factory.mktemp("whole"), ORT)
            made[model] = contents(engine)
        return made[model]

    return make


@pytest.mark.parametrize(
    ("step", "found"), [("weights", []), ("lower", ["weights"]), ("verify", ["weights"])]
)
def test_killed(
    step: str, found: list[str], kill: Kill, whole: Any, tiny_checkpoint: Make, tmp_path: Path
) -> None:
    kill(tiny_checkpoint("llama"), tmp_path / "out", ORT, step)
    assert leftovers(tmp_path / "out") != []
    with pytest.raises(EngineError):
        resolve_engine(tmp_path / "out")
    (engine,) = build(tiny_checkpoint("llama"), tmp_path / "out", ORT)
    assert reused(engine) == found and contents(engine) == whole("llama")
    assert leftovers(tmp_path / "out") == ["onnxruntime"]


def test_killed_weights_of_another_model_are_not_taken(
    kill: Kill, whole: Any, tiny_checkpoint: Make, tmp_path: Path
) -> None:
    kill(tiny_checkpoint("qwen2"), tmp_path / "out", ORT, "verify")
    (engine,) = build(tiny_checkpoint("llama"), tmp_path / "out", ORT)
    assert reused(engine) == [] and contents(engine) == whole("llama")


def test_killed_calibration(
    kill: Kill, tiny_checkpoint: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The layers that were finished are not searched again."""
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("the capital of France is Paris and the capital of Spain is Madrid\n" * 20)
    options = dataclasses.replace(ORT, quant="awq-int4", calib=text)
    kill(tiny_checkpoint("llama"), out, options, "calibration")
    (engine,) = build(tiny_checkpoint("llama"), out, options)
    assert "1 layers were found by a build that was killed" in capsys.readouterr().err
    (whole,) = build(tiny_checkpoint("llama"), tmp_path / "whole", options)
    assert contents(engine) == contents(whole)
    one, other = (read_manifest(each).quantization for each in (engine, whole))
    assert one == other
    assert leftovers(out) == ["calibration", "onnxruntime"]
    assert len(leftovers(out / "calibration")) == 1


def test_killed_behind_a_tensorrt_build(
    kill: Kill, tiny_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B48 on the way: built from another directory, into a folder with a space and other letters.
    The engine that the killed build had is taken from the cache, and by every later build whose
    graph and weights are the same."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    checkpoint = tiny_checkpoint("llama", hidden_size=64)  # fused attention: heads of 16
    options = Options(backends=("tensorrt-rtx",), max_len=64, max_chunk=16, verify="none")
    out = tmp_path / "ein Ordner mit ď 世"
    kill(checkpoint, out, options, "checksums")
    (entry,) = entries()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (engine,) = build(checkpoint, Path("..") / out.name, options)
    assert reused(engine) == ["ONNX", "tensorrt-rtx build"]
    assert (engine / "model.engine").samefile(entry.path / "model.engine")
    assert leftovers(out) == ["tensorrt-rtx"] and "model.engine" in contents(engine)
    manifest = read_manifest(engine)
    assert manifest.layers and manifest.profiles and manifest.inputs[0].name == "token_ids"
    (proven,) = build(checkpoint, out, dataclasses.replace(options, verify="cheap"))
    assert reused(proven) == ["ONNX", "tensorrt-rtx build"]
    assert contents(proven) == contents(engine)


def compilations(out: Path) -> list[str]:
    """Processes whose command names a file below `out`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            found.append((process / "cmdline").read_text())
    return [command for command in found if f"{out}/" in command]


@pytest.mark.slow
def test_killed_compilation(kill: Kill, tiny_checkpoint: Make, tmp_path: Path) -> None:
    """It takes its processes along. What was finished is taken from the cache, also by a build that
    asks for other limits, which a package does not depend on."""
    checkpoint, out = tiny_checkpoint("llama", num_hidden_layers=1), tmp_path / "out"
    options = Options(backends=("inductor",), max_len=64, max_chunk=16, verify="none")
    kill(checkpoint, out, options, "compile")
    deadline = time.monotonic() + 10
    while compilations(out) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert compilations(out) == [] and entries() == []
    kill(checkpoint, out, options, "checksums")
    other = dataclasses.replace(options, max_batch=2, verify="cheap")
    (engine,) = build(checkpoint, out, other)
    assert reused(engine) == ["weights", "compile"]
    assert read_manifest(engine).receipt["passed"]  # type: ignore[index]
    assert len(LLM(engine).score([3, 4, 5])) == 3


def test_one_build_at_a_time(
    tiny_checkpoint: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second waits for the first, and then has nothing to do."""
    out = tmp_path / "out"
    out.mkdir()
    with ThreadPoolExecutor(2) as pool:
        with exclusive(out / "onnxruntime"):
            running = [pool.submit(build, tiny_checkpoint("llama"), out, ORT) for _ in range(2)]
            said, deadline = "", time.monotonic() + 60
            while said.count("another build makes it; waiting") < 2 and time.monotonic() < deadline:
                time.sleep(0.05)
                said += capsys.readouterr().err
            assert not any(each.done() for each in running) and leftovers(out) != ["onnxruntime"]
        assert [each.result() for each in running] == [[out / "onnxruntime"]] * 2
    said += capsys.readouterr().err
    assert said.count("unchanged") == said.count("  export ") == 1, said
    assert leftovers(out) == ["onnxruntime"] and read_manifest(out / "onnxruntime")


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path\n"
        "from seekforge.compile.bundle import exclusive\n"
        "with exclusive(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "engine")]
    process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    process.kill()
    process.wait()
    waited: list[None] = []
    with exclusive(tmp_path / "engine", lambda: waited.append(None)):
        assert waited == []
        with pytest.raises(KeyError), exclusive(tmp_path / "other"):
            raise KeyError
    assert leftovers(tmp_path) == []
