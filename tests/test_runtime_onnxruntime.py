"""ONNX Runtime on a GPU, with stand-ins for its library and for torch's streams: what it is asked
for, in which order a step runs, and what is refused. Engines on the CPU: test_engines.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from seekforge.kernels.errors import EngineError
from seekforge.runtime.fit import CUDA_PROVIDER, unfit_reason
from seekforge.runtime.manifest import Manifest, read_manifest
from seekforge.runtime.onnxruntime import CPU_PROVIDER, OnnxRuntimeSession

Engine = Callable[..., Path]


class Stream:
    """Notes what waits for what."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name, self.cuda_stream = log, name, 4711

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


class Library(SimpleNamespace):
    """onnxruntime, whose sessions have the given providers and only note that they run."""

    def __init__(self, log: list[str], providers: list[str]) -> None:
        binding = SimpleNamespace(bind_input=lambda *a: None, bind_output=lambda *a: None)
        entries: dict[str, str] = {}
        self.made: dict[str, Any] = {}

        def session(path: str, options: Any, **asked: Any) -> Any:
            self.made.update(asked)
            return SimpleNamespace(
                get_providers=lambda: providers,
                io_binding=lambda: binding,
                run_with_iobinding=lambda _, given: log.append(f"run {given.entries}"),
            )

        super().__init__(
            __version__="1.31.1",
            SessionOptions=SimpleNamespace,
            RunOptions=lambda: SimpleNamespace(
                entries=entries, add_run_config_entry=entries.__setitem__
            ),
            InferenceSession=session,
        )


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(calls, "its stream"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(calls, "torch"))
    return calls


@pytest.fixture
def manifest(tiny_engine: Engine) -> Manifest:
    return replace(read_manifest(tiny_engine("llama", "onnxruntime")), device="cuda")


def test_a_step_on_a_gpu_is_ordered_by_streams(
    manifest: Manifest, log: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library(log, [CUDA_PROVIDER, CPU_PROVIDER])
    monkeypatch.setitem(sys.modules, "onnxruntime", library)
    session = OnnxRuntimeSession(tmp_path, manifest)
    assert session.device == torch.device("cuda", 1)
    (name, asked), last = library.made["providers"]
    assert (name, last) == (CUDA_PROVIDER, CPU_PROVIDER) and not library.made["enable_fallback"]
    assert asked["device_id"] == "1" and asked["user_compute_stream"] == "4711"
    assert asked["use_tf32"] == "0"
    session.device = torch.device("cpu")  # this machine's memory, for the tensors
    session.allocate(2, 4)
    one = torch.zeros(1, 1, dtype=torch.long)
    given = {"token_ids": one, "positions": one, "block_tables": one, "past_lens": one[0]}
    outputs = session._run(given | {"logits_rows": one[0]} | session.pools)
    assert outputs["logits"].shape == (1, manifest.vocab_size)
    run = "run {'disable_synchronize_execution_providers': '1'}"
    assert log == ["its stream waits for torch", run, "torch waits for its stream"]


def test_a_fall_back_to_the_cpu_is_refused(
    manifest: Manifest, log: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", Library(log, [CPU_PROVIDER]))
    with pytest.raises(EngineError, match=r"1\.31\.1 cannot load its CUDA.*on the CPU"):
        OnnxRuntimeSession(tmp_path, manifest)


def test_a_package_without_cuda_is_named(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that is installed for tests is."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    reason = unfit_reason(manifest)
    assert reason is not None and f"no {CUDA_PROVIDER}" in reason and "onnxruntime-gpu" in reason
    assert unfit_reason(replace(manifest, device="cpu")) is None
