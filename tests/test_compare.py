"""Engines and eager side by side: who is judged by what, what passes, and what is kept of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from seekforge.compile import compare_receipt
from seekforge.compile.build import Options, build
from seekforge.compile.cli import main
from seekforge.compile.compare import compare, eager_dtype
from seekforge.compile.compare_judge import FP64_BYTES, ROOM, judge_device, whole_fp32
from seekforge.compile.compare_receipt import write_receipts
from seekforge.compile.compare_result import Comparison, EngineResult
from seekforge.compile.compare_speaker import Speaker
from seekforge.compile.compare_text import format_table
from seekforge.compile.prompts import read_prompts
from seekforge.kernels.errors import InputError
from seekforge.models.checkpoint import open_checkpoint
from seekforge.passes.int4_options import Int4Options
from seekforge.runtime.manifest import Manifest, read_manifest, write_manifest

Engine = Callable[..., Path]
PROMPTS = ["the capital of France is", "one"]
SMALL = {"prompts": PROMPTS, "max_tokens": 6}


@pytest.fixture(scope="module")
def int4_engine(
    tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    options = Options(
        backends=("onnxruntime",), max_len=256, quant="rtn-int4", int4=Int4Options(16),
        verify="none",
    )  # fmt: skip
    (engine,) = build(tiny_checkpoint("llama"), tmp_path_factory.mktemp("int4"), options)
    return engine


def test_engines_of_several_dtypes_and_eager(tiny_engine: Engine) -> None:
    engines = [tiny_engine("llama", "onnxruntime", dtype) for dtype in ("float32", "float16")]
    result = compare(["eager:bfloat16", *engines, "eager"], **SMALL)  # type: ignore[arg-type]
    full, half = result.engines
    assert full.name != half.name and full.name.endswith("/onnxruntime")
    assert [row.dtype for row in result.eager] == ["bfloat16", "float32", "float16"]
    bf16, fp32, fp16 = result.eager
    assert fp32.max_error == fp32.kl == 0.0 and fp32.tokens == 1.0
    assert full.judged < 2e-4 < fp16.mean_error < bf16.mean_error
    assert half.limit == pytest.approx(1.1 * fp16.judged)
    assert all(row.limit is None for row in result.eager)
    assert full.passed and full.limit is not None
    json.dumps(result.to_dict(), allow_nan=False)
    table = format_table(result)
    assert len(table.splitlines()) == 7 and table.count("pass") == result.passed + full.passed


def test_an_int4_engine_beside_the_unquantised(tiny_engine: Engine, int4_engine: Path) -> None:
    """Each against its own reference alone; together against the checkpoint."""
    engines = [tiny_engine("llama", "onnxruntime"), int4_engine]
    with pytest.raises(InputError, match=r"different references.*--judge checkpoint"):
        compare(engines, **SMALL)  # type: ignore[arg-type]
    (own,) = compare([int4_engine], **SMALL).engines  # type: ignore[arg-type]
    assert own.passed and own.max_error < 1e-3 and own.quantization == "rtn-int4"
    result = compare(engines, judge="checkpoint", text=". ".join(PROMPTS * 9), **SMALL)  # type: ignore[arg-type]
    plain, packed = result.engines
    assert plain.limit is not None and plain.kl < 1e-6
    assert packed.limit is None and packed.passed and packed.kl > 1e-3
    assert result.passed and result.perplexity is not None
    assert plain.perplexity == pytest.approx(result.perplexity, rel=1e-4)
    assert packed.perplexity != pytest.approx(result.perplexity, rel=1e-3)
    assert "the checkpoint's own weights" in format_table(result)


def test_the_checkpoint_as_judge_still_has_limits(
    tiny_checkpoint: Callable[..., Path], tiny_engine: Engine, int4_engine: Path
) -> None:
    """For engines that are not quantised."""
    other = tiny_checkpoint("llama", rms_norm_eps=0.1)
    engines = [tiny_engine("llama", "onnxruntime"), int4_engine]
    result = compare(engines, other, judge="checkpoint", **SMALL)  # type: ignore[arg-type]
    assert [row.passed for row in result.engines] == [False, True] and not result.passed


def test_engines_of_other_weights_are_refused(
    tiny_checkpoint: Callable[..., Path], tiny_engine: Engine
) -> None:
    """Their errors would be blamed on the engine, and kept in its receipt."""
    others = [
        tiny_engine("llama", "onnxruntime", rms_norm_eps=0.1),
        tiny_engine("llama", "onnxruntime", vocab_size=300),
    ]
    for other in others:
        with pytest.raises(InputError, match=r"built from .* config\.json.* differ"):
            compare([tiny_engine("llama", "onnxruntime"), other], **SMALL)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"300 tokens, that of .* 293: they are not of one model"):
        compare([others[1]], tiny_checkpoint("llama"), **SMALL)  # type: ignore[arg-type]


def test_eager_alone(tiny_checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(InputError, match="eager alone: say of which checkpoint"):
        compare(["eager"], **SMALL)  # type: ignore[arg-type]
    result = compare(["eager:bfloat16"], tiny_checkpoint("llama"), **SMALL)  # type: ignore[arg-type]
    (row,) = result.eager
    assert row.dtype == "bfloat16" and row.mean_error > 0 and result.passed


def test_prompts_that_are_cut_are_said(tiny_engine: Engine) -> None:
    engine = tiny_engine("llama", "onnxruntime", "float32")
    result = compare([engine], prompts=["one", "word " * 300], max_tokens=6)
    assert result.cut_prompts == 1 == result.to_dict()["cut_prompts"]
    assert "1 of the prompts were cut" in format_table(result)


def test_names_of_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert eager_dtype("eager") == "float32" and eager_dtype(Path("eager:float16")) == "float16"
    assert eager_dtype("out/eager") is None and eager_dtype("eagerly") is None
    with pytest.raises(InputError, match="eager:int4: unknown dtype; one of float32, bfloat16"):
        eager_dtype("eager:int4")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "eager").mkdir()  # a bundle of that name
    assert eager_dtype("eager") is None


ROW = EngineResult(
    "inductor", "float32", None, 1e-4, 1e-5, 0.0, 1.0, 1.0, judged=2e-4, limit=2e-4, perplexity=10.0
)


@pytest.mark.parametrize(
    ("changed", "passed"),
    [
        ({}, True),
        ({"judged": 2.0001e-4}, False),
        ({"judged": float("nan")}, False),
        ({"judged": 9.0, "limit": None}, True),
        ({"perplexity": 10.00099}, True),
        ({"perplexity": 10.0011}, False),
        ({"perplexity": 10.0011, "limit": None}, True),
        ({"perplexity": 10.0011, "dtype": "float16"}, True),
    ],
)
def test_near_the_limits(changed: dict[str, float], passed: bool) -> None:
    row = replace(ROW, **changed)  # type: ignore[arg-type]
    result = Comparison((row,), (), "", "reference", 1, 1, perplexity=10.0)
    assert result.passed is passed
    verdict = "" if row.limit is None else "pass" if passed else "FAIL"
    assert format_table(result).splitlines()[-1].rpartition("  ")[2] == verdict
    json.dumps(result.to_dict(), allow_nan=False)


def test_receipts(tiny_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last comparison stands beside what the build found; the manifest stays sound."""
    engine = tmp_path / "onnxruntime"
    shutil.copytree(tiny_engine("qwen2", "onnxruntime"), engine)
    before = read_manifest(engine)
    assert before.receipt is not None and before.receipt["executed"]
    for max_tokens in (3, 5):
        result = compare([engine], prompts=PROMPTS, max_tokens=max_tokens)
        assert write_receipts(result, [engine]) == []
        after = read_manifest(engine)  # its own digest and the files' are checked
        assert after.receipt is not None
        receipt = dict(after.receipt)
        compared = receipt.pop("compared")
        assert receipt == {k: v for k, v in before.receipt.items() if k != "compared"}
        assert replace(after, receipt=before.receipt) == before
        assert compared["positions"] == result.num_positions and compared["passed"] is True
        assert compared["judge"] == "reference" and compared["max_error"] < 2e-4
    assert [p.name for p in engine.iterdir() if "manifest" in p.name] == ["manifest.json"]

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compare_receipt, "write_manifest", full)
    (warning,) = write_receipts(result, [engine])
    assert "no receipt written (No space left on device)" in warning


def test_a_manifest_is_written_whole_or_not_at_all(
    tiny_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_engine("qwen2", "onnxruntime"), tmp_path / "onnxruntime")
    manifest = read_manifest(tmp_path / "onnxruntime")

    def cut(self: Path, text: str, encoding: str) -> int:
        self.write_bytes(text[:100].encode())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", cut)
    with pytest.raises(OSError, match="No space"):
        write_manifest(tmp_path / "onnxruntime", replace(manifest, receipt=None))
    monkeypatch.undo()
    assert read_manifest(tmp_path / "onnxruntime") == manifest
    assert isinstance(manifest, Manifest)


def test_the_program(
    tiny_engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(tiny_engine("llama", "onnxruntime"), tmp_path / "onnxruntime")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the capital", "id": 7}\n\n{"prompt": "one then another"}\n')
    arguments = ["compare", str(tmp_path), "eager:float16", "--prompts", str(prompts)]
    assert main([*arguments, "--max-tokens", "4", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["prompts"] == 2 and [row["dtype"] for row in result["eager"]] == ["float16"]
    receipt = read_manifest(tmp_path / "onnxruntime").receipt
    assert receipt is not None and receipt["compared"]["prompts"] == 2
    assert main([*arguments, "--judge", "me"]) == 2
    assert "--judge me: unknown; one of reference, checkpoint" in capsys.readouterr().err


def test_prompts_of_a_user(tmp_path: Path) -> None:
    lines, structured = tmp_path / "a.txt", tmp_path / "b.jsonl"
    lines.write_text('{"prompt": "x"}\n\n  y\n')
    assert read_prompts(lines) == ['{"prompt": "x"}', "  y"]
    messages = [{"role": "user", "content": "hi"}]
    structured.write_text(f'{json.dumps({"messages": messages})}\n{{"prompt": "x", "n": 1}}\n')
    assert read_prompts(structured) == [messages, "x"]
    for wrong in (
        "plain", "[]", "{}", '{"prompt": 3}', '{"messages": []}', '{"messages": ["hi"]}',
        '{"prompt": "x", "messages": [{"role": "user", "content": "hi"}]}',
    ):  # fmt: skip
        structured.write_text(f'{{"prompt": "x"}}\n{wrong}\n')
        with pytest.raises(InputError, match=r'b.jsonl, line 2: .*\{"prompt": text\} or'):
            read_prompts(structured)


def test_messages_go_through_the_chat_template(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    messages = [{"role": "user", "content": "one"}]
    plain = Speaker(open_checkpoint(tiny_checkpoint("llama")), [], 4)
    with pytest.raises(InputError, match="no chat template"):
        plain.tokens(messages)
    shutil.copytree(tiny_checkpoint("llama"), tmp_path / "chat")
    template = "{% for m in messages %}<|begin|>{{ m.content }}<|end|>{% endfor %}"
    (tmp_path / "chat" / "chat_template.jinja").write_text(template)
    chat = Speaker(open_checkpoint(tmp_path / "chat"), [], 4)
    assert chat.tokens(messages) == [0, *plain.tokens("one"), 1]
    assert len(chat.tokens("one " * 300)) == 256 - 4
    with pytest.raises(InputError, match="max_tokens 256 leaves no room"):
        Speaker(open_checkpoint(tmp_path / "chat"), [], 256).tokens("one")


def test_eager_runs_where_an_engine_does(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the GPU has room for it in fp64."""
    cpu = read_manifest(tiny_engine("llama", "onnxruntime"))
    cuda = replace(cpu, device="cuda")
    parameters = 1000
    free = ROOM + FP64_BYTES * parameters
    assert judge_device([cpu, cuda], parameters).type == "cpu", "there is no GPU here"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))
    assert judge_device([cpu, cuda], parameters) == torch.device("cuda", 0)
    assert judge_device([cpu, cuda], parameters + 1).type == "cpu"
    assert judge_device([cpu, cpu], parameters).type == judge_device([], parameters).type == "cpu"


def test_the_judge_knows_no_tf32() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        with pytest.raises(ZeroDivisionError), whole_fp32():
            assert torch.get_float32_matmul_precision() == "highest"
            raise ZeroDivisionError
        assert torch.get_float32_matmul_precision() == "high", "as it was"
    finally:
        torch.set_float32_matmul_precision(before)
