"""Provoked failures: every message has cause, advice and log, and docs/errors.md shows them."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from provoked import message, outside, row, situations
from provoked_onnx import ADD, model_of, open_onnxruntime

from seekforge.compile.failures import caught, explained, failure
from seekforge.compile.failures_known import KNOWN, known
from seekforge.compile.onnx_nodes import OnnxNodes
from seekforge.compile.steps import Steps
from seekforge.compile.tensorrt_messages import builder_failure
from seekforge.kernels.errors import BuildError, EngineError, InputError

DOCUMENT = Path(__file__).parent.parent / "docs" / "errors.md"
Checkpoint = Callable[..., Path]


@pytest.mark.parametrize("situation", situations())
def test_the_document_shows_what_a_user_sees(situation: str, tmp_path: Path) -> None:
    if "a TensorRT-RTX engine" in situation and torch.cuda.is_available():
        pytest.skip("with a GPU, TensorRT says something else")
    text = message(situation, tmp_path)
    assert row(situation, text) in DOCUMENT.read_text(encoding="utf-8").splitlines(), text
    assert "not known" not in text
    if "\n" in text and "cannot be loaded" not in text:
        lines = [line.strip() for line in text.splitlines()[1:]]
        keys = [line.partition(": ")[0] for line in lines]
        assert keys.index("cause") + 1 == keys.index("do"), text
    if "  log: " in text:
        log = Path(text.rpartition("  log: OUT/")[2])
        assert (tmp_path / log).stat().st_size > 20


def test_the_document_has_no_other_rows() -> None:
    if importlib.util.find_spec("tensorrt_rtx") is None:
        pytest.skip("tensorrt-rtx is not installed")
    rows = DOCUMENT.read_text(encoding="utf-8").splitlines()
    shown = [line.split(" | ")[0].removeprefix("| ") for line in rows if line.startswith("| ")]
    assert sorted(shown[1:]) == sorted(situations()) and len(shown) > 30


@pytest.mark.parametrize(
    ("backend", "text", "cause"),
    [
        (
            "tensorrt",
            "Could not find any implementation for node {ForeignNode[a...b]}.",
            "no kernel",
        ),
        (
            "tensorrt-rtx",
            "Error Code 2: OutOfMemory (Requested size was 9 bytes.)",
            "memory ran out",
        ),
        ("tensorrt", "cudaError 100: no CUDA-capable device is detected", "sees no NVIDIA GPU"),
        ("tensorrt-rtx", "The engine is not compatible with the current GPU", "another compute"),
        ("inductor", "torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB", "memory ran out"),
        ("inductor", "package.so: undefined symbol: _ZNSt", "another C++ library"),
        ("onnxruntime", "[Errno 28] No space left on device", "disk is full"),
        ("onnxruntime", "Non-zero status code. Attempting to broadcast an axis", "do not fit"),
    ],
)
def test_messages_that_cannot_be_provoked_here(backend: str, text: str, cause: str) -> None:
    found = known(backend, text)
    assert found is not None and cause in found.cause, found


def test_a_backend_is_not_told_anothers_causes() -> None:
    assert known("onnxruntime", "UNSUPPORTED_NODE") is None
    assert known("inductor", "Non-zero zero point") is None
    assert all(row.cause and row.advice and not row.advice.endswith(".") for row in KNOWN)


def test_a_builders_layer_ends_the_chain(tmp_path: Path) -> None:
    import onnx

    onnx.save(model_of(ADD), tmp_path / "model.onnx")
    said = "Could not find any implementation for node {ForeignNode[sum...sum]}."
    error = builder_failure("tensorrt-rtx", OnnxNodes(tmp_path / "model.onnx"), [said], tmp_path)
    assert re.search(
        r"at: modeling_toy\.py:41 in forward: made Add -> FX node sum_0 -> ONNX node 'sum' \(Add\) "
        r"-> layer \{ForeignNode\[sum\.\.\.sum\]\}\n  cause: TensorRT has no kernel",
        str(error),
    ), error


def test_what_a_user_did_is_not_reworded(tmp_path: Path) -> None:
    with (
        pytest.raises(InputError, match="--quant x"),
        caught("inductor", tmp_path / "log", Steps("none"), tmp_path / "none"),
    ):
        raise InputError("--quant x: unknown")
    assert not (tmp_path / "log").exists()
    with (
        pytest.raises(KeyboardInterrupt),
        caught("inductor", tmp_path / "log", Steps("none"), tmp_path / "none"),
    ):
        raise KeyboardInterrupt


def test_an_unknown_message_names_the_line_it_came_from(tmp_path: Path) -> None:
    log = tmp_path / "onnxruntime.log"
    log.write_text("of an earlier build")
    with (
        pytest.raises(BuildError) as error,
        caught("onnxruntime", log, Steps("none"), tmp_path / "none"),
    ):
        raise RuntimeError("the moon\nis full")
    text = str(error.value)
    assert "at: tests/test_failures.py" in text and 'raise RuntimeError("the moon' in text
    assert "onnxruntime says: RuntimeError: the moon is full" in text
    assert "Traceback" in log.read_text() and "earlier" not in log.read_text()


def test_long_messages_are_cut_and_the_first_log_is_named() -> None:
    text = str(failure("inductor", "could not build", "word " * 500, Path("x.log")))
    assert len(text) < 1000 and text.endswith(" …\n  log: x.log")


def test_engines_that_do_not_load_are_explained() -> None:
    error = EngineError("model.engine: cannot be loaded: cudaError 35: driver version insufficient")
    assert "\n  cause: there is no NVIDIA driver here" in explained(error)
    assert explained(EngineError("no such engine directory")) == "no such engine directory"
    assert explained(InputError("cudaError 35")) == "cudaError 35"


def test_weights_are_found_wherever_the_process_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B48: looked up beside the model, not in the current directory."""
    model = model_of("g (float[4] x) => (float[4] y) { [sum] y = Add(x, w) }")
    model.graph.initializer.append(outside("w", "weights.safetensors"))
    folder, decoy = tmp_path / "ein Ordner ñ 世", tmp_path / "decoy"
    for each in (folder, decoy):
        each.mkdir()
    (decoy / "weights.safetensors").write_bytes(b"x" * 16)
    monkeypatch.chdir(decoy)
    with pytest.raises(BuildError, match="not beside the model"):
        open_onnxruntime(folder, model)
    (folder / "weights.safetensors").write_bytes(b"x" * 16)
    open_onnxruntime(folder, model)


def test_two_builds_into_one_folder_keep_their_weights(
    tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """B48: the second export does not overwrite the first one's data, although the first had linked
    its weights to a third engine."""
    from seekforge.compile.build import Options, build

    def weights(model: str, dtype: str, backend: str) -> Path:
        options = Options((backend,), dtype, max_len=64, max_chunk=16, verify="none")
        (engine,) = build(tiny_checkpoint(model), tmp_path, options)
        return engine / "weights.safetensors"

    first = weights("llama", "float32", "onnxruntime")
    kept = tmp_path / "kept"
    kept.hardlink_to(first)
    before = kept.read_bytes()
    second = weights("qwen2", "float32", "onnxruntime")
    assert second == first and kept.read_bytes() == before != second.read_bytes()
