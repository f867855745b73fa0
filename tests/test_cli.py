"""The program `seekforge`: every verb on a tiny model, and one clear message for each bad input."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from seekforge.compile.cli import main
from seekforge.runtime.manifest import FORMAT_VERSION, MANIFEST_NAME

Checkpoint = Callable[..., Path]
Engine = Callable[..., Path]


def test_export_shows_the_graphs(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    out = tmp_path / "graphs"
    assert main(["export", str(tiny_checkpoint("llama")), "-o", str(out)]) == 0
    assert "aten.rsqrt" in (out / "exported.txt").read_text()
    ragged = (out / "ragged.txt").read_text()
    assert "seekforge.paged_attention" in ragged and "aten.rsqrt" not in ragged
    assert "seekforge.gathered_attention" in (out / "padded.txt").read_text()
    report = json.loads((out / "report.json").read_text())
    assert {r["name"]: r["fired"] for r in report["ragged"]}["qkv"] == 2


def test_build_prints_the_engines(
    tiny_checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["build", str(tiny_checkpoint("llama")), "-o", str(tmp_path / "e"), "--backend",
                 "onnxruntime", "--max-len", "64", "--json"])  # fmt: skip
    assert code == 0
    (engine,) = json.loads(capsys.readouterr().out)
    assert (Path(engine) / MANIFEST_NAME).is_file()


def test_compare_passes_and_says_so(
    tiny_engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the capital of France\n\none then another\n")
    engine = str(tiny_engine("llama", "onnxruntime"))
    arguments = ["compare", engine, "--prompts", str(prompts), "--max-tokens", "9"]
    assert main(arguments) == 0
    assert "pass" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["prompts"] == 2 and result["engines"][0]["tokens"] == 1.0


def test_compare_with_another_checkpoint_fails(
    tiny_engine: Engine, tiny_checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights of the right shapes that are not the engine's: exit code 1."""
    other = tiny_checkpoint("llama", rms_norm_eps=0.1)
    engine = str(tiny_engine("llama", "onnxruntime"))
    assert main(["compare", engine, "--checkpoint", str(other), "--max-tokens", "4"]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_inspect(
    tiny_engine: Engine, tiny_checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = tiny_engine("llama", "onnxruntime")
    assert main(["inspect", str(engine)]) == 0
    text = capsys.readouterr().out
    assert "swiglu" in text and "Attention 2" in text and "256 tokens a sequence" in text
    assert main(["inspect", str(tiny_checkpoint("qwen3")), "--json"]) == 0
    described = json.loads(capsys.readouterr().out)["checkpoint"]
    assert described["head_dim"] == 16 and described["expected_fusions"]["rms_norm"] == 9


def test_generate(tiny_engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    engine = str(tiny_engine("llama", "onnxruntime"))
    assert main(["generate", engine, "the capital", "--max-tokens", "6"]) == 0
    streamed = capsys.readouterr().out
    assert main(["generate", engine, "the capital", "--max-tokens", "6", "--json"]) == 0
    assert streamed == json.loads(capsys.readouterr().out)["text"] + "\n"


def test_bench_prints_ratios(tiny_engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    engine = str(tiny_engine("llama", "onnxruntime"))
    assert (
        main(["bench", engine, "--batch", "1,2", "--tokens", "4", "--rounds", "1", "--json"]) == 0
    )
    rows = json.loads(capsys.readouterr().out)
    assert [(r["engine"], r["batch"]) for r in rows] == [
        ("eager", 1), ("onnxruntime", 1), ("eager", 2), ("onnxruntime", 2),
    ]  # fmt: skip
    assert all(row["roof"] > 0 and row["unit"] == "tokens/s" for row in rows)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """Runs a command that must be refused with exit code 2 and one message; returns that."""
    assert main(list(map(str, arguments))) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("seekforge: ") == 1 and "Traceback" not in captured.err
    return " ".join(captured.err.split())


def test_bad_checkpoints(
    tiny_checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("-o", tmp_path / "out", "--backend", "onnxruntime")
    assert "nowhere" in refusal(capsys, "build", tmp_path / "nowhere", *out)
    (tmp_path / "empty").mkdir()
    assert "config.json" in refusal(capsys, "build", tmp_path / "empty", *out)

    def copy(name: str) -> Path:
        shutil.copytree(tiny_checkpoint("llama"), tmp_path / name)
        return tmp_path / name

    def edit(folder: Path, file: str, **values: object) -> None:
        data = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(data | values))

    unknown = copy("unknown")
    edit(unknown, "config.json", model_type="mamba9", architectures=["Mamba9ForCausalLM"])
    assert "mamba9" in refusal(capsys, "build", unknown, *out)
    narrow = copy("narrow")
    edit(narrow, "config.json", vocab_size=250)
    assert "250" in refusal(capsys, "build", narrow, *out)
    missing = copy("missing")
    (missing / "model.safetensors").unlink()
    assert "safetensors" in refusal(capsys, "build", missing, *out)
    assert "300" in refusal(capsys, "build", tiny_checkpoint("llama"), *out, "--max-len", "300")
    assert not any((tmp_path / "out").glob("*")) if (tmp_path / "out").exists() else True


def test_bad_engines(
    tiny_engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no such" in refusal(capsys, "generate", tmp_path / "nothing", "hi")
    engine = tiny_engine("llama", "onnxruntime")
    long = "word " * 400
    assert "256" in refusal(capsys, "generate", engine, long)
    assert "temperature" in refusal(capsys, "generate", engine, "hi", "--temperature", "-1")
    older = tmp_path / "older"
    shutil.copytree(engine, older)
    version = f'"format_version": {FORMAT_VERSION}'
    text = (older / MANIFEST_NAME).read_text().replace(version, '"format_version": 0')
    (older / MANIFEST_NAME).write_text(text)
    message = refusal(capsys, "generate", older, "hi")
    assert "version 0" in message and "seekforge build" in message
    flipped = tmp_path / "flipped"
    shutil.copytree(engine, flipped)
    data = bytearray((flipped / "model.onnx").read_bytes())
    data[100] ^= 4
    (flipped / "model.onnx").write_bytes(data)
    assert "model.onnx" in refusal(capsys, "inspect", flipped)


def test_unwritable_output(
    tiny_checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    message = refusal(
        capsys, "build", tiny_checkpoint("llama"), "-o", tmp_path / "file" / "out",
        "--backend", "onnxruntime",
    )  # fmt: skip
    assert "cannot be written" in message


@pytest.mark.parametrize(
    "arguments",
    ["compare x --max-tokens 0", "compare x --max-tokens -3", "cache prune --max-size nan",
     "cache prune --older-than -1", "check x --gpu-memory inf", "bench x --rounds 0"],
)  # fmt: skip
def test_numbers_that_make_no_sense(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments.split())
    assert stop.value.code == 2 and "was expected" in capsys.readouterr().err


def test_a_checkpoint_without_a_tokenizer_is_known_before_the_build(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(tiny_checkpoint("llama"), tmp_path / "checkpoint")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    what = [str(folder), "--backend", "onnxruntime", "--max-len", "64"]
    assert main(["check", *what]) == 1
    assert "has no tokenizer" in " ".join(capsys.readouterr().out.split())
    assert main(["build", *what, "-o", str(tmp_path / "out")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "has no tokenizer" in said and "export" not in said
