"""The cache of heavy steps: what is taken, what is not, and what goes when there is too much."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from seekforge.compile import build_cache as cache
from seekforge.compile import build_cache_lower, build_cache_request
from seekforge.compile.build_cache import Entry, entries, file_entries, prune, put, take
from seekforge.compile.build_cache_graph import graph_digest
from seekforge.compile.build_cache_lower import lower_or_reuse, lowering_key
from seekforge.compile.cli import main
from seekforge.compile.lower import Lowering
from seekforge.compile.steps import Steps
from seekforge.compile.tensorrt_options import TensorRTOptions
from seekforge.kernels.rms_norm import rms_norm
from seekforge.passes.kv_cache import GraphInput
from seekforge.passes.pipeline import run_pipeline
from seekforge.passes.program import Int4Part, Program
from seekforge.runtime.manifest import KVLayout, Limits, TensorSpec

KEYS = [letter * 64 for letter in "abcdef"]
DAY = 24 * 3600


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def made(folder: Path, key: str, size: int = 1000, days: float = 0) -> Entry:
    """An entry of one file in an engine directory `folder`, last used some days ago."""
    folder.mkdir(exist_ok=True)
    (folder / "model.engine").write_bytes(key[:1].encode() * size)
    entry = Entry(
        key, "llama 2x32", "tensorrt-rtx", 9.0, ["tensorrt-rtx build"], False,
        {"layers": {"a": 1}}, file_entries(folder, ["model.engine"]),
    )  # fmt: skip
    put(entry, folder)
    used = time.time() - days * DAY
    if entry.path.is_dir():  # it was put
        os.utime(entry.path / "meta.json", (used, used))
    return entry


def test_taken_as_it_was_put(tmp_path: Path) -> None:
    entry = made(tmp_path / "engine", KEYS[0], days=3)
    (tmp_path / "other").mkdir()
    assert take(KEYS[0], tmp_path / "other") == entry
    assert (tmp_path / "other" / "model.engine").samefile(tmp_path / "engine" / "model.engine")
    assert time.time() - entry.used < DAY, "taking it counts as use"
    assert take(KEYS[1], tmp_path / "other") is None


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "meta"])
def test_damaged_entries_are_made_again(damage: str, tmp_path: Path) -> None:
    entry = made(tmp_path / "engine", KEYS[0])
    file = entry.path / "model.engine"
    if damage == "flipped":
        file.write_bytes(b"b" + file.read_bytes()[1:])
    elif damage == "cut":
        file.write_bytes(b"a")
    elif damage == "gone":
        file.unlink()
    else:
        (entry.path / "meta.json").write_text("{")
    (tmp_path / "other").mkdir()
    assert take(KEYS[0], tmp_path / "other") is None
    assert list((tmp_path / "other").iterdir()) == []
    again = made(tmp_path / "engine", KEYS[0])
    assert take(KEYS[0], tmp_path / "other") == again


def test_a_cache_that_cannot_be_written_costs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file is in the way")
    made(tmp_path / "engine", KEYS[0])
    assert take(KEYS[0], tmp_path) is None and entries() == [] and prune() == []
    (tmp_path / "cache").unlink()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(cache.os, "link", full)
        patch.setattr(cache.shutil, "copyfile", full)
        made(tmp_path / "engine", KEYS[0])
    assert list(cache.builds().iterdir()) == []


def test_copies_where_there_are_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(cache.os, "link", none)
    entry = made(tmp_path / "engine", KEYS[0])
    assert entry.held() == entry.size == 1000


def test_two_builds_put_the_same(tmp_path: Path) -> None:
    folders = [tmp_path / str(i) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda folder: made(folder, KEYS[0]), folders))
    assert [entry.key for entry in entries()] == KEYS[:1]
    assert [path.name for path in cache.builds().iterdir()] == KEYS[:1]


def test_what_was_used_longest_ago_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i, days in enumerate((1, 4, 2, 3)):
        made(tmp_path / str(i), KEYS[i], 1000, days)
        if i != 1:  # of the second, which is the oldest, an engine is left
            shutil.rmtree(tmp_path / str(i))
    assert [entry.key[0] for entry in entries()] == ["b", "d", "c", "a"]
    assert sum(entry.held() for entry in entries()) == 3000
    assert prune(most=3000) == []
    assert [entry.key[0] for entry in prune(most=2999)] == ["d"], "b takes no space of its own"
    assert [entry.key[0] for entry in prune(older_than=1.5 * DAY)] == ["b", "c"]
    monkeypatch.setattr(cache, "BOUND", 1500)
    made(tmp_path / "4", KEYS[4])
    shutil.rmtree(tmp_path / "4")
    made(tmp_path / "5", KEYS[5], 1400)
    assert [entry.key[0] for entry in entries()] == ["e", "f"], "1 + 1 KB were too much"
    made(tmp_path / "6", "9" * 64, 1501)
    assert [entry.key[0] for entry in entries()] == ["e", "f"], "larger than all"


def test_leftovers_go(tmp_path: Path) -> None:
    made(tmp_path / "engine", KEYS[0])
    old, young = cache.builds() / ".new-old", cache.builds() / ".new-young"
    for folder in (old, young, cache.builds() / "no entry"):
        folder.mkdir()
    os.utime(old, (0, 0))
    assert prune() == []
    assert sorted(path.name for path in cache.builds().iterdir()) == [".new-young", KEYS[0]]


def test_the_verb(tmp_path: Path, capsys: Any) -> None:
    for i in (0, 1):
        made(tmp_path / str(i), KEYS[i], 10**6, days=2 * i)
    shutil.rmtree(tmp_path / "0")
    assert main(["cache", "list"]) == 0
    text = capsys.readouterr().out.splitlines()
    assert text[1].split()[:8] == [
        "b" * 12, "tensorrt-rtx", "1.0", "MB", "0.0", "MB", "9", "s",
    ] and "2.0 days ago, llama 2x32" in text[1]  # fmt: skip
    assert text[2].split()[4:6] == ["1.0", "MB"]
    assert "2 kept, 2.0 MB, of which 1.0 MB are in no engine (at most 20 GiB)" in text[3]
    assert main(["cache", "prune", "--older-than", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["removed"] == [KEYS[1]] and [e["key"] for e in report["entries"]] == KEYS[:1]
    assert main(["cache", "prune", "--all"]) == 0
    assert "removed 1" in capsys.readouterr().out and entries() == []
    assert main(["cache", "prune"]) == 2, "says neither what goes nor that all goes"


@pytest.fixture
def lowered(
    exported: Callable[..., tuple[Program, Any]],
) -> Callable[..., tuple[Program, list[GraphInput]]]:
    def make(max_len: int = 64, **config: Any) -> tuple[Program, list[GraphInput]]:
        program, _ = exported("llama", **config)
        _, inputs = run_pipeline(program, "ragged", max_len, None)
        return program, inputs

    return make


def first(program: Program, target: Any) -> fx.Node:
    return program.nodes(target)[0]


def another_eps(program: Program) -> None:
    node = first(program, rms_norm)
    node.args = (*node.args[:2], 1e-5)


def another_edge(program: Program) -> None:
    """The second layer's down projection reads what the first one's read."""
    linears = [n for n in program.nodes(torch.ops.aten.linear.default) if "down" in str(n.args[1])]
    linears[1].args = (linears[0].args[0], linears[1].args[1])


def another_output(program: Program) -> None:
    program.outputs = [*program.outputs, "more"]


def another_packing(program: Program) -> None:
    name = next(iter(program.weights))
    part = Int4Part("qweight", 32, True)
    program.weights[name] = dataclasses.replace(program.weights[name], int4=part)


@pytest.mark.parametrize("change", [another_eps, another_edge, another_output, another_packing])
def test_every_change_of_a_graph_shows(change: Callable[[Program], None], lowered: Any) -> None:
    (program, inputs), (again, _) = lowered(), lowered()
    before = graph_digest(program, inputs)
    assert graph_digest(again, inputs) == before
    change(program)
    assert graph_digest(program, inputs) != before


def test_the_graph_holds_sizes_and_inputs(lowered: Any) -> None:
    program, inputs = lowered()
    before = graph_digest(program, inputs)
    assert graph_digest(program, inputs[::-1]) != before
    assert graph_digest(*lowered(max_len=128)) != before, "rows of the RoPE table"
    assert graph_digest(*lowered(rms_norm_eps=1e-4)) != before


@pytest.fixture
def job(lowered: Any, tmp_path: Path) -> Callable[..., Lowering]:
    program, inputs = lowered()

    def make(backend: str, **other: Any) -> Lowering:
        folder = tmp_path / f"job{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        kv = KVLayout(2, 16, {"k": (2, 8), "v": (2, 8)}, "float32", True)
        made = Lowering(
            backend, program, inputs, folder, "float32", "cpu", Limits(64, 8, 64), kv,
            TensorRTOptions(), tmp_path, Steps("test"),
        )  # fmt: skip
        return dataclasses.replace(made, **other)

    return make


def test_what_reaches_the_backend_is_in_the_key(
    job: Callable[..., Lowering], monkeypatch: pytest.MonkeyPatch
) -> None:
    def key(backend: str, recipe: str = "one", **other: Any) -> str:
        return lowering_key(job(backend, **other), recipe)

    rtx, package = key("tensorrt-rtx"), key("inductor")
    assert key("tensorrt-rtx") == rtx
    for other in (
        {"limits": Limits(64, 4, 64)}, {"tensorrt": TensorRTOptions(("8.6",))},
        {"dtype": "float16"}, {"recipe": "another"},
    ):  # fmt: skip
        assert key("tensorrt-rtx", **other) != rtx, other
    assert key("tensorrt") != rtx
    for same in ({"limits": Limits(64, 4, 64)}, {"recipe": "another"}):
        assert key("inductor", **same) == package, same
    assert key("inductor", device="cuda") != package
    monkeypatch.setattr(build_cache_request, "cpu", lambda: "another")
    assert key("inductor") != package and key("tensorrt-rtx") == rtx
    monkeypatch.setattr(build_cache_request, "version", lambda name: "9.9")
    assert key("tensorrt-rtx") != rtx


def test_lowered_once(job: Callable[..., Lowering], monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {
        "layers": {"fused": [1]}, "profiles": ({"x": {"min": [1]}},), "device": "cuda",
        "inputs": (TensorSpec("x", "int64", ("tokens", 2)),), "compute_capability": None,
    }  # fmt: skip
    calls: list[str] = []

    def lower(one: Lowering) -> dict[str, Any]:
        calls.append("lower")
        with one.steps.step("build"):
            (one.folder / "model.engine").write_bytes(b"plan")
        if one.backend == "tensorrt-rtx":
            (one.folder / "weights.safetensors").unlink()
        return facts

    def run(backend: str, cache: bool = True) -> Lowering:
        calls.clear()
        one = job(backend)

        def weights() -> None:
            calls.append("weights")
            (one.folder / "weights.safetensors").touch()

        assert lower_or_reuse(one, "recipe", weights, "tiny", cache) == facts
        return one

    monkeypatch.setattr(build_cache_lower, "lower", lower)
    first = run("tensorrt-rtx")
    assert calls == ["weights", "lower"] and "reused" not in first.steps.done[0]
    other = run("tensorrt-rtx")
    assert calls == [], "the engine holds its weights"
    assert [path.name for path in other.folder.iterdir()] == ["model.engine"]
    (step,) = other.steps.done
    assert step["name"] == "build" and step["reused"].startswith("from the cache")
    run("inductor")
    assert calls == ["weights", "lower"]
    assert len(list(run("inductor").folder.iterdir())) == 2 and calls == ["weights"]
    run("tensorrt-rtx", cache=False)
    assert calls == ["weights", "lower"] and len(entries()) == 2
    run("onnxruntime")
    assert calls == ["weights", "lower"] and len(entries()) == 2, "made anew in no time"
