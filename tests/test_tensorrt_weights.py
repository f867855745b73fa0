"""Engines without weights: what the builder says here, refit and streaming in the runtime (through
objects that record what is called, in order), the runtime cache, and plans that are kept."""

from __future__ import annotations

import dataclasses
import gc
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from test_runtime_manifest import example

from seekforge.compile.build import build
from seekforge.compile.options import Options
from seekforge.compile.tensorrt import TensorRTResult
from seekforge.compile.tensorrt_options import TensorRTOptions
from seekforge.compile.tensorrt_plan import keep_plan, plan_digest
from seekforge.kernels.errors import EngineError
from seekforge.runtime.manifest import Manifest, file_entries, read_manifest, write_manifest
from seekforge.runtime.profiles import Profile, ShapeRange
from seekforge.runtime.tensorrt import TensorRTSession
from seekforge.runtime.tensorrt_cache import CACHE_NAME

trt = pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")


class Recorder:
    """The library, an engine, a refitter and a runtime config, all in one; keeps the calls."""

    num_io_tensors = 0

    def __init__(self, missing: tuple[str, ...] = (), refittable: bool = True) -> None:
        self.calls: list[str] = []
        self.missing, self.is_refittable = list(missing), refittable
        self.total, self.budget, self.cached, self.fits = 1000, -1, b"compiled", True

    def said(self, what: str, result: Any = True) -> Any:
        self.calls.append(what)
        return result

    @property
    def refittable(self) -> bool:
        return self.is_refittable

    def Refitter(self, engine: Any, logger: Any) -> Recorder:
        assert engine is self
        return self.said("Refitter", self)

    def OnnxParserRefitter(self, refitter: Any, logger: Any) -> Recorder:
        return self.said("OnnxParserRefitter", self)

    num_errors = 0

    def refit_from_file(self, path: str) -> bool:
        return self.said(f"refit_from_file {Path(path).name}")

    def get_missing_weights(self) -> list[str]:
        return self.said("get_missing_weights", self.missing)

    def refit_cuda_engine(self) -> bool:
        return self.said("refit_cuda_engine")

    @property
    def streamable_weights_size(self) -> int:
        return self.total

    @property
    def weight_streaming_budget_v2(self) -> int:
        return self.budget

    @weight_streaming_budget_v2.setter
    def weight_streaming_budget_v2(self, value: int) -> None:
        self.budget = self.said(f"budget {value}", value)

    def create_runtime_config(self) -> Recorder:
        return self.said("create_runtime_config", self)

    def create_runtime_cache(self) -> Recorder:
        return self.said("create_runtime_cache", self)

    def deserialize(self, content: bytes) -> bool:
        return self.said(f"deserialize {content.decode()}", self.fits)

    def serialize(self) -> bytes:
        return self.said("serialize", self.cached)

    def set_runtime_cache(self, cache: Any) -> bool:
        return self.said("set_runtime_cache")

    def create_execution_context(self, config: Any = None) -> Recorder:
        return self.said("create_execution_context" + (" with config" if config else ""), self)


REFIT = ["Refitter", "OnnxParserRefitter", "refit_from_file model.onnx", "get_missing_weights",
         "refit_cuda_engine"]  # fmt: skip
CACHE = ["create_runtime_config", "create_runtime_cache", "set_runtime_cache"]
CONTEXT = ["create_execution_context with config"]


def manifest(**tensorrt: Any) -> Manifest:
    return example(
        backend="tensorrt-rtx", device="cuda", form="padded", inputs=(), outputs=(), profiles=(),
        tensorrt={"plan": "", "stripped": False, "streaming_bytes": None, **tensorrt},
    )  # fmt: skip


@pytest.fixture
def open_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TensorRTSession]:
    log = SimpleNamespace(errors=[])
    for name, stand_in in (
        ("process_logger", lambda _: None), ("capture", lambda _: nullcontext(log)),
    ):  # fmt: skip
        monkeypatch.setattr(f"seekforge.runtime.tensorrt_weights.{name}", stand_in)

    def open_engine(engine: Recorder, backend: str = "tensorrt-rtx", **asked: Any) -> Any:
        monkeypatch.setattr("seekforge.runtime.tensorrt_weights.import_tensorrt", lambda _: engine)
        described = dataclasses.replace(manifest(**asked), backend=backend)
        return TensorRTSession(tmp_path, described, engine=engine, device="cpu")

    return open_engine


def test_the_recorder_has_only_what_tensorrt_has() -> None:
    real = {"Refitter", "OnnxParserRefitter"}
    for kind in (trt.Refitter, trt.OnnxParserRefitter, trt.ICudaEngine, trt.IRuntimeConfig,
                 trt.IRuntimeCache):  # fmt: skip
        real |= set(dir(kind))
    named = {name for name in vars(Recorder) if not name.startswith("_")} - {"said"}
    assert named <= real, named - real


def test_weights_are_in_place_before_a_context_is_made(
    open_with: Callable[..., TensorRTSession],
) -> None:
    def calls(backend: str = "tensorrt-rtx", **asked: Any) -> list[str]:
        engine = Recorder()
        session = open_with(engine, backend, **asked)
        made = list(engine.calls)
        session.close()
        return made

    assert calls(stripped=True, streaming_bytes=400) == [*REFIT, "budget 400", *CACHE, *CONTEXT]
    assert calls(streaming_bytes=5000)[0] == "budget 1000"  # all weights: streaming is off
    assert calls("tensorrt", stripped=True) == [*REFIT, "create_execution_context"]


def test_an_engine_with_its_weights_is_left_alone(
    open_with: Callable[..., TensorRTSession],
) -> None:
    engine = Recorder()
    session = open_with(engine)
    assert engine.calls == CACHE + CONTEXT
    session.close()


def test_weights_that_do_not_fit_are_named(open_with: Callable[..., TensorRTSession]) -> None:
    engine = Recorder(missing=("layers.3.weight", "norm"))
    with pytest.raises(EngineError, match=r"2 weights are missing, first 'layers.3.weight'"):
        open_with(engine, stripped=True)
    assert "refit_cuda_engine" not in engine.calls and not set(CONTEXT) & set(engine.calls)
    with pytest.raises(EngineError, match="the engine takes none; build it again"):
        open_with(Recorder(refittable=False), stripped=True)
    none = Recorder()
    none.total = 0
    with pytest.raises(EngineError, match="built without weight streaming"):
        open_with(none, streaming_bytes=1)


def test_the_runtime_cache_lies_beside_the_engine(
    open_with: Callable[..., TensorRTSession], tmp_path: Path
) -> None:
    first = Recorder()
    session = open_with(first)
    assert not (tmp_path / CACHE_NAME).exists()
    session.close()
    session.close()  # once is enough
    assert (tmp_path / CACHE_NAME).read_bytes() == b"compiled"
    assert first.calls.count("serialize") == 1
    second = Recorder()
    second.cached, second.fits = b"compiled for another GPU", False
    session = open_with(second)
    assert second.calls == [*CACHE[:2], "deserialize compiled", CACHE[2], *CONTEXT]
    del session  # never closed
    gc.collect()
    assert (tmp_path / CACHE_NAME).read_bytes() == b"compiled for another GPU"
    assert [path.name for path in tmp_path.iterdir()] == [CACHE_NAME]


def changed(checkpoint: Path, folder: Path) -> Path:
    """The same model with other weights."""
    shutil.copytree(checkpoint, folder)
    file = folder / "model.safetensors"
    save_file({n: t + 0.125 for n, t in load_file(file).items()}, file, {"format": "pt"})
    return folder


def test_new_weights_keep_the_plan(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The builder is replaced: a refittable plan needs a GPU."""
    built: list[Path] = []

    def build_tensorrt(model: Path, out: Path, **asked: Any) -> TensorRTResult:
        assert asked["options"].strip and model.is_file()
        built.append(out)
        out.write_bytes(f"plan {len(built)}".encode())
        profiles: list[Profile] = asked["profiles"]
        return TensorRTResult(
            out, 6, "1.7", ("8.9",), (), (), tuple(profiles), {"network": {}}, (), (), 0.0, out
        )  # fmt: skip

    monkeypatch.setattr("seekforge.compile.tensorrt.build_tensorrt", build_tensorrt)
    monkeypatch.setattr("seekforge.compile.build.requirements", lambda *_: [])
    checkpoint, out = tiny_checkpoint("llama", head_dim=16), tmp_path / "engines"
    options = Options(("tensorrt-rtx",), max_len=64, max_chunk=16, strip=True, cache=False)
    (engine,) = build(checkpoint, out, options)
    first = read_manifest(engine)
    assert {"model.engine", "model.onnx", "weights.safetensors"} <= {f.path for f in first.files}
    weights = (engine / "weights.safetensors").read_bytes()

    build(changed(checkpoint, tmp_path / "changed"), out, options)
    second = read_manifest(engine)
    assert len(built) == 1 and (engine / "model.engine").read_bytes() == b"plan 1"
    assert (engine / "weights.safetensors").read_bytes() != weights
    assert second.tensorrt == first.tensorrt and second.layers == first.layers
    assert second.profiles == first.profiles

    recorder, asked = Recorder(), second.tensorrt
    monkeypatch.setattr("seekforge.runtime.tensorrt_weights.import_tensorrt", lambda _: recorder)
    bare: Any = SimpleNamespace(
        profiles=(), inputs=(), outputs=(), backend="tensorrt-rtx", tensorrt=asked
    )
    TensorRTSession(engine, bare, engine=recorder, device="cpu")
    assert recorder.calls[:5] == REFIT


def test_only_what_a_plan_is_built_from_is_in_its_digest(tmp_path: Path) -> None:
    model, weights = tmp_path / "model.onnx", tmp_path / "weights.safetensors"
    model.write_bytes(b"graph")
    profile = {"x": ShapeRange((1,), (2,), (4,))}

    def digest(top: int = 4, **options: Any) -> str:
        profiles = [profile, {"x": ShapeRange((1,), (2,), (top,))}]
        return plan_digest(model, "tensorrt-rtx", profiles, TensorRTOptions(**options))

    first = digest()
    weights.write_bytes(b"other weights")
    assert digest() == first
    others = [
        digest(top=5),
        digest(targets=("8.6",)),
        digest(streaming_bytes=1),
        digest(strip=True),
    ]
    assert len({first, *others}) == 5
    assert digest(streaming_bytes=1) == digest(streaming_bytes=2), "the size is the runtime's"
    model.write_bytes(b"another graph")
    assert digest() != first


def test_a_plan_is_kept_only_where_it_is_whole(tmp_path: Path) -> None:
    earlier, plan = tmp_path / "earlier", tmp_path / "model.engine"
    earlier.mkdir()
    assert keep_plan(earlier, "a", plan) is None
    (earlier / "model.engine").write_bytes(b"plan")
    files = file_entries(earlier)
    kept = dataclasses.replace(manifest(plan="a", stripped=True), files=files)
    write_manifest(earlier, kept)
    assert keep_plan(earlier, "b", plan) is None
    (earlier / CACHE_NAME).write_bytes(b"kernels")
    assert file_entries(earlier) == files and read_manifest(earlier) == kept
    facts = keep_plan(earlier, "a", plan)
    assert facts is not None and facts["backend_version"] == kept.backend_version
    assert plan.read_bytes() == b"plan"
    assert plan.with_name(CACHE_NAME).read_bytes() == b"kernels"
    plan.unlink()
    (earlier / "model.engine").write_bytes(b"dust")
    assert keep_plan(earlier, "a", plan) is None and not plan.exists()
    write_manifest(earlier, dataclasses.replace(manifest(plan="a"), files=file_entries(earlier)))
    assert keep_plan(earlier, "a", plan) is None, "it holds its weights"
