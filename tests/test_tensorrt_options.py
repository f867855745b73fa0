"""Targets of TensorRT-RTX engines, one and several: what is asked, built, kept and checked."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from provoked import model_of
from test_runtime_manifest import example

from seekforge.compile.check import _runs_here, check
from seekforge.compile.check_machine import Machine, requirements, target_problems
from seekforge.compile.options import Options
from seekforge.compile.tensorrt import TensorRTResult, build_tensorrt
from seekforge.compile.tensorrt_config import TIMING_CACHE, load_timing, save_timing
from seekforge.compile.tensorrt_options import TensorRTOptions, parse_targets
from seekforge.kernels.errors import BuildError, InputError
from seekforge.runtime.fit import unfit_reason
from seekforge.runtime.manifest import Manifest
from seekforge.runtime.profiles import ShapeRange

trt = pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")

TEXT = "g (float16[n,64] x) => (float16[n,64] y) { [linear] z = MatMul(x, w) [sum] y = Add(z, x) }"


def build(folder: Path, **options: Any) -> TensorRTResult:
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float16)
    onnx.save(model_of(TEXT, w=weight), folder / "model.onnx")
    profile = {"x": ShapeRange((1, 64), (4, 64), (8, 64))}
    return build_tensorrt(
        folder / "model.onnx", folder / "model.engine", product="tensorrt-rtx",
        profiles=[profile], options=TensorRTOptions(**options),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("8.9", ("8.9",)), ("sm_89", ("8.9",)), ("sm_86,sm_89", ("8.6", "8.9")),
        ("12.0, sm_80 8.0", ("8.0", "12.0")), ("sm120", ("12.0",)),
    ],
)  # fmt: skip
def test_targets_are_read_as_people_write_them(text: str, targets: tuple[str, ...]) -> None:
    assert parse_targets(text) == targets
    assert Options(target=text).tensorrt.targets == targets


@pytest.mark.parametrize("text", ["ada", "sm_89a", "8.9.1", "", "sm_89,ada", "9"])
def test_what_is_no_target_is_refused_at_once(text: str) -> None:
    with pytest.raises(InputError, match=r"--target .* such as sm_89 or 8.9 were expected"):
        Options(target=text)


@pytest.mark.parametrize(
    "targets",
    [("8.0",), ("8.6",), ("8.9",), ("12.0",), ("8.6", "8.9"), ("8.0", "8.6", "8.9", "12.0")],
)  # fmt: skip
def test_builds_for_each_target_and_for_several(tmp_path: Path, targets: tuple[str, ...]) -> None:
    result = build(tmp_path, targets=targets)
    assert result.compute_capabilities == targets and result.size > 10_000
    log = result.log_path.read_text(encoding="utf-8")
    assert f"Number of target compute capabilities: {len(targets)}" in log


def test_unknown_targets_are_named_with_the_list(tmp_path: Path) -> None:
    known = "7.5, 8.0, 8.6, 8.9, 12.0"
    with pytest.raises(BuildError, match=f"capability 9.0, 10.0: tensorrt-rtx builds for {known}"):
        build(tmp_path, targets=("8.9", "9.0", "10.0"))
    assert target_problems("sm_86,sm_89,12.0") == []
    (problem,) = target_problems("sm_89,sm_90")
    assert f"--target sm_89,sm_90: compute capability 9.0: tensorrt-rtx builds for {known}" in str(
        problem
    )


def engine_for(targets: str | None) -> Manifest:
    return example(backend="tensorrt-rtx", device="cuda", compute_capability=targets)


def test_any_of_an_engines_targets_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 9))
    for targets in ("8.9", "8.6,8.9", "8.6, 8.9", None):
        assert unfit_reason(engine_for(targets)) is None, targets
    reason = unfit_reason(engine_for("8.6,12.0"))
    assert reason == "it was built for compute capability 8.6, 12.0 and this GPU has 8.9"
    assert unfit_reason(engine_for("18.9")) is not None  # no part of a number
    ada = Machine(0, "a GPU", 0, "8.9", None, {})
    assert _runs_here("tensorrt-rtx", "cuda", ("8.6", "8.9"), ada)
    assert not _runs_here("tensorrt-rtx", "cuda", ("8.6",), ada)


def test_options_of_tensorrt_need_a_tensorrt_engine() -> None:
    with pytest.raises(InputError, match="--strip: only TensorRT engines have it"):
        Options(("inductor",), strip=True)
    with pytest.raises(InputError, match="--weight-streaming: only TensorRT"):
        Options(("onnxruntime",), weight_streaming=1.0)
    for wrong in (-1.0, float("nan")):
        with pytest.raises(InputError, match=f"--weight-streaming {wrong}"):
            Options(weight_streaming=wrong)
    assert Options(weight_streaming=0.5).tensorrt.streaming_bytes == 1 << 29
    assert Options(weight_streaming=0).tensorrt.streaming_bytes == 0


def test_the_check_knows_that_stripping_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert requirements("tensorrt-rtx", "cpu", "float16", "8.9") == []
    (problem,) = requirements("tensorrt-rtx", "cpu", "float16", "8.9", strip=True)
    assert "--strip" in problem.what and "on a GPU" in problem.what
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert requirements("tensorrt-rtx", "cpu", "float16", "8.9", strip=True) == []


def test_weight_streaming_changes_no_kernel(tmp_path: Path) -> None:
    plain = build(tmp_path)
    streaming = build(tmp_path, streaming_bytes=0)
    assert abs(streaming.size - plain.size) < 1000
    assert streaming.layers["profiles"] == plain.layers["profiles"]


def test_rtx_ignores_timing_caches() -> None:
    """Why none is kept for it: the library says so itself."""
    config = trt.Builder(trt.Logger(trt.Logger.ERROR)).create_builder_config()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        config.set_timing_cache(config.create_timing_cache(b""), False)
    assert any("no-ops in TensorRT-RTX" in str(warning.message) for warning in said)


class Config:
    """`IBuilderConfig` of data-centre TensorRT, as far as its timing cache goes."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []

    def create_timing_cache(self, content: bytes) -> Config:
        self.said.append(("create", content))
        return self

    def set_timing_cache(self, cache: Config, ignore_mismatch: bool) -> bool:
        self.said.append(("set", ignore_mismatch))
        return self.said[-2][1] != b"of another GPU"

    def serialize(self) -> bytes:
        return b"measured"


def test_a_timing_cache_is_kept_with_the_bundle(tmp_path: Path) -> None:
    assert {n for n in vars(Config) if n[0] != "_"} <= {
        *dir(trt.IBuilderConfig),
        *dir(trt.ITimingCache),
    }
    path, config = tmp_path / TIMING_CACHE, Config()
    save_timing(load_timing(config, path), path)
    assert config.said == [("create", b""), ("set", False)]
    again = Config()
    load_timing(again, path)
    assert again.said == [("create", b"measured"), ("set", False)]
    path.write_bytes(b"of another GPU")
    stale = Config()
    save_timing(load_timing(stale, path), path)
    assert [word for word, *_ in stale.said] == ["create", "set", "create", "set"]
    assert stale.said[2] == ("create", b"") and path.read_bytes() == b"measured"
    assert load_timing(Config(), None) is None
    assert [file.name for file in tmp_path.iterdir()] == [TIMING_CACHE]


def test_streamed_weights_leave_room_for_the_cache(tiny_checkpoint: Callable[..., Path]) -> None:
    path = tiny_checkpoint("llama", head_dim=16)

    def run(**options: Any) -> dict[str, Any]:
        asked = Options(("tensorrt-rtx",), max_len=64, max_chunk=16, **options)
        found: dict[str, Any] = check(path, asked, gpu_bytes=8 << 30)["engines"]["tensorrt-rtx"]
        return {**found["run"], "problems": found["problems"]}

    plain, streamed = run(target="sm_86,sm_89"), run(weight_streaming=0)
    assert plain["problems"] == streamed["problems"] == []
    assert plain["weights_bytes"] > 0 == streamed["weights_bytes"]
    assert streamed["kv_tokens"] > plain["kv_tokens"]
    assert run(weight_streaming=100)["weights_bytes"] == plain["weights_bytes"]
