"""Ready-made INT4 checkpoints in and out, calibrations kept on disk, the account of a model."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from seekforge.compile.build import Options, build
from seekforge.compile.calibration_file import load_calibration
from seekforge.compile.cli import main
from seekforge.compile.execute import materialise
from seekforge.compile.export import export_checkpoint
from seekforge.compile.quality import CommonRounding
from seekforge.compile.quantise import format_report, quantise_checkpoint
from seekforge.compile.reference import load_dequantised
from seekforge.kernels.errors import CheckpointError, InputError
from seekforge.kernels.int4 import dequantise, unpack
from seekforge.kernels.tolerance import assert_close
from seekforge.models.checkpoint import open_checkpoint
from seekforge.passes.int4 import Int4Options, insert_int4, int4_tensors
from seekforge.passes.pipeline import run_fusions

Make = Callable[..., Path]
SIZES: dict[str, Any] = {"intermediate_size": 64, "moe_intermediate_size": 32, "v_head_dim": 16}
IDS = torch.arange(3, 21).view(2, 9)
POSITIONS = torch.arange(9).expand(2, 9)
TEXT = "Paris is the capital of France. " * 40


@pytest.fixture(scope="module")
def quantised(tiny_checkpoint: Make, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A tiny DeepSeek-V3 quantised with AWQ, and its account."""
    out = tmp_path_factory.mktemp("quantised")
    (out / "calib.txt").write_text(TEXT)
    source = tiny_checkpoint("deepseek_v3", q_lora_rank=32, **SIZES)
    options = Int4Options(32, symmetric=False)
    report = quantise_checkpoint(
        source, out / "awq", "awq-int4", options, out / "calib.txt", TEXT, 200
    )
    return out / "awq", report


def test_account(quantised: tuple[Path, Any]) -> None:
    out, report = quantised
    text = format_report(report)
    assert "AWQ takes back" in text and "saw" in text and str(out) in text
    assert report["calibration"]["error"] < report["calibration"]["rtn_error"]
    assert report["perplexity"]["tokens"] == 199
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "awq" and config["group_size"] == 32
    assert "lm_head" in config["modules_to_not_convert"]
    assert any("kv_b_proj" in module for module in config["modules_to_not_convert"])


def test_imported_weights_are_the_exported_ones(
    quantised: tuple[Path, Any], tiny_checkpoint: Make
) -> None:
    """Bit for bit, and an engine of the import computes what its weights decode to."""
    out, report = quantised
    source = open_checkpoint(tiny_checkpoint("deepseek_v3", q_lora_rank=32, **SIZES))
    key = report["calibration"]["key"]
    kept = load_calibration(source, out.with_name("awq.calibration"), key)
    assert kept is not None and kept.key == key
    imported = open_checkpoint(out)
    assert not imported.warnings
    names = [name for name, info in imported.tensors.items() if info.dtype == "INT4"]
    assert len(names) == report["tensors"]
    for name in names:
        a = kept.int4(name, 32, False, torch.float16)
        b = imported.int4(name, 32, False, torch.float16)
        assert torch.equal(a.qweight, b.qweight) and torch.equal(a.scales, b.scales), name
        assert a.zeros is not None and b.zeros is not None and torch.equal(a.zeros, b.zeros), name
    program = export_checkpoint(imported, "float32", 64)
    run_fusions(program, 64)
    insert_int4(program, Int4Options(32, False, (), frozenset(names)))
    tensors = int4_tensors(program)
    assert set(tensors) == set(names)
    module = materialise(program, imported.read, int4=imported.int4)
    reference = load_dequantised(
        imported, imported, {"tensors": tensors, "symmetric": False}, torch.float32
    )
    with torch.inference_mode():
        (logits,) = module(IDS, POSITIONS, False)
        expected = reference(input_ids=IDS, position_ids=POSITIONS).logits
    assert_close(logits, expected, "imported")


def test_damaged_or_other_calibrations_are_not_taken(
    quantised: tuple[Path, Any], tiny_checkpoint: Make, tmp_path: Path
) -> None:
    out, report = quantised
    source = open_checkpoint(tiny_checkpoint("deepseek_v3", q_lora_rank=32, **SIZES))
    key = report["calibration"]["key"]
    shutil.copytree(out.with_name("awq.calibration"), tmp_path / "kept")
    (folder,) = (tmp_path / "kept").iterdir()
    assert load_calibration(source, tmp_path / "kept", key) is not None
    assert load_calibration(source, tmp_path / "kept", key[::-1]) is None
    other = open_checkpoint(tiny_checkpoint("deepseek_v3"))
    assert load_calibration(other, tmp_path / "kept", key) is None
    (folder / "smoothing.safetensors").write_bytes(b"cut")
    assert load_calibration(source, tmp_path / "kept", key) is None


def test_a_weight_without_its_scales_is_refused(
    quantised: tuple[Path, Any], tmp_path: Path
) -> None:
    out, _ = quantised
    shutil.copytree(out, tmp_path / "cut")
    (file,) = (tmp_path / "cut").glob("*.safetensors")
    tensors = load_file(file)
    lost = next(name for name in tensors if name.endswith(".scales"))
    del tensors[lost]
    save_file(tensors, file)
    index = json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())
    del index["weight_map"][lost]
    (tmp_path / "cut" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=re.escape(lost)):
        open_checkpoint(tmp_path / "cut")


def test_flags_without_quantisation_are_refused(tiny_checkpoint: Make, tmp_path: Path) -> None:
    model = str(tiny_checkpoint("llama"))
    for flags in (["--group-size", "64"], ["--asymmetric"], ["--skip", "x"], ["--calib", "x"]):
        assert main(["build", model, "-o", str(tmp_path), *flags]) == 2, flags
    quant = ["--quant", "rtn-int4", "--backend", "onnxruntime"]
    for flags in (["--calib", "x"], ["--skip", "donw_proj"], ["--group-size", "8"]):
        assert main(["build", model, "-o", str(tmp_path / "e"), *quant, *flags]) == 2, flags


def test_refusals(quantised: tuple[Path, Any], tiny_checkpoint: Make, tmp_path: Path) -> None:
    out, _ = quantised
    options = Int4Options(32)
    with pytest.raises(InputError, match="holds INT4 weights already"):
        quantise_checkpoint(out, tmp_path / "x", "rtn-int4", options, None, None, None)
    with pytest.raises(InputError, match="holds INT4 weights already"):
        build(out, tmp_path / "e", Options(backends=("onnxruntime",), quant="rtn-int4"))
    plain = tiny_checkpoint("llama", intermediate_size=64)
    with pytest.raises(InputError, match="not empty"):
        quantise_checkpoint(plain, out, "rtn-int4", options, None, None, None)
    with pytest.raises(InputError, match="--quant int3: unknown"):
        quantise_checkpoint(plain, tmp_path / "x", "int3", options, None, None, None)
    with pytest.raises(InputError, match="--group-size 7"):
        dataclasses.replace(Options(), int4=Int4Options(7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_common_rounding(tiny_checkpoint: Make, dtype: torch.dtype) -> None:
    """The baseline that is quoted elsewhere: worse than ours, by the unused sixteenth value."""
    checkpoint = open_checkpoint(tiny_checkpoint("llama"))
    name = "model.layers.0.self_attn.q_proj.weight"
    weight = checkpoint.read(name).float()
    packed = CommonRounding(checkpoint).int4(name, 32, True, dtype)
    largest = weight.view(*packed.scales.shape, 32).abs().amax(-1)
    assert torch.equal(packed.scales, (largest / 7).to(dtype))
    errors = [
        float((dequantise(found, torch.float32) - weight).square().mean())
        for found in (packed, checkpoint.int4(name, 32, True, dtype))
    ]
    assert 0 < errors[1] < errors[0]
    assert torch.equal((dequantise(packed, dtype) == 0), (unpack(packed.qweight) == 8))
