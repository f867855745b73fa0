"""FP8 checkpoints with block scales: read back as the plain formula says, refused by name."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from seekforge.kernels.errors import CheckpointError
from seekforge.models.checkpoint import open_checkpoint, tensors_for_parameter
from seekforge.models.fp8 import dequantise
from seekforge.models.module import load_eager

FP8 = torch.float8_e4m3fn
CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
QUERY = "model.layers.1.self_attn.q_a_proj.weight"
NORM = "model.norm.weight"
SCALE = QUERY + "_scale_inv"


def quantise(weight: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """(E4M3 values, scales) of a matrix; the largest value of a block becomes E4M3's largest."""
    stored = torch.empty(weight.shape, dtype=FP8)
    scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[at].abs().max() / 448
            stored[at] = (weight[at] / scales[i, j]).to(FP8)
    return stored, scales


def plain(stored: Tensor, scales: Tensor, rows: int, columns: int) -> Tensor:
    """One multiplication for each value."""
    values = torch.empty(stored.shape)
    for r, c in itertools.product(range(stored.shape[0]), range(stored.shape[1])):
        values[r, c] = stored[r, c].item() * scales[r // rows, c // columns].item()
    return values


def to_fp8(folder: Path, block: tuple[int, int]) -> dict[str, Tensor]:
    """Quantises what published checkpoints do: all linear layers but the head and the router.
    Returns the tensors as written."""
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("_proj.weight") or "kv_a_proj" in name]:
        weights[name], weights[name + "_scale_inv"] = quantise(weights[name], *block)
    save_file(weights, folder / "model.safetensors")
    edit_config(folder, quantization_config=CONFIG | {"weight_block_size": list(block)})
    return weights


def edit_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.fixture
def copy(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    def make(family: str, **overrides: Any) -> Path:
        return Path(shutil.copytree(tiny_checkpoint(family, **overrides), tmp_path / "checkpoint"))

    return make


@pytest.mark.parametrize(
    ("shape", "block"),
    [((256, 128), (128, 128)), ((144, 130), (128, 128)), ((5, 3), (128, 128)), ((7, 10), (4, 8))],
)
def test_dequantise_is_the_plain_formula(shape: tuple[int, int], block: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    stored, scales = quantise(weight, *block)
    values = dequantise(stored, scales, block)
    assert values.dtype == torch.float32
    assert torch.equal(values, plain(stored, scales, *block))
    assert (values - weight).abs().max() <= weight.abs().max() / 16  # 3 bits of mantissa
    both = dequantise(torch.stack([stored, stored]), torch.stack([scales, 2 * scales]), block)
    assert torch.equal(both, torch.stack([values, 2 * values]))


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
@pytest.mark.parametrize("block", [(128, 128), (16, 12)])
def test_reads_and_runs_as_eager_does(
    copy: Callable[..., Path], family: str, block: tuple[int, int]
) -> None:
    """Eager on a copy that is written with the plain formula; the sizes 24, 40 and 96 are no
    multiples of the blocks."""
    folder = copy(family)
    stored = to_fp8(folder, block)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.warnings == ()
    assert not hasattr(checkpoint.config, "quantization_config")

    right = Path(shutil.copytree(folder, folder.parent / "plain"))
    edit_config(right, quantization_config=None)
    weights = {
        name: plain(weight, stored[name + "_scale_inv"], *block) if weight.dtype == FP8 else weight
        for name, weight in stored.items()
        if not name.endswith("_scale_inv")
    }
    save_file(weights, right / "model.safetensors", metadata={"format": "pt"})
    expected = load_eager(right, torch.float32)
    eager = load_eager(folder, torch.float32)
    for fqn, weight in expected.state_dict().items():
        names = tensors_for_parameter(checkpoint, fqn)
        made = torch.cat([checkpoint.read(name) for name in names]).view(weight.shape)
        assert torch.equal(made, weight), fqn
        assert torch.equal(eager.state_dict()[fqn], weight), fqn
    ids = torch.arange(3, 14)[None]
    assert torch.equal(eager(ids).logits, expected(ids).logits)


def test_eager_agrees_with_transformers_own_dequantisation(copy: Callable[..., Path]) -> None:
    """Which takes only sizes that the number of blocks divides; it needs accelerate."""
    pytest.importorskip("accelerate", reason="transformers reads FP8 only with accelerate")
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    folder = copy("deepseek_v3")
    to_fp8(folder, (8, 8))
    config = FineGrainedFP8Config(weight_block_size=(8, 8), dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float32, attn_implementation="eager"
    )
    ids = torch.arange(3, 14)[None]
    ours = load_eager(folder, torch.float32)
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-5, atol=1e-5)


def test_scales_may_lie_in_another_shard(copy: Callable[..., Path]) -> None:
    folder = copy("deepseek_v3")
    weights = to_fp8(folder, (16, 12))
    whole = open_checkpoint(folder).read(QUERY)
    single = load_eager(folder, torch.float32)
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"part-{'scale' in name}.safetensors" for name in weights}
    for file in set(weight_map.values()):
        part = {name: w for name, w in weights.items() if weight_map[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert torch.equal(open_checkpoint(folder).read(QUERY), whole)
    ids = torch.arange(3, 14)[None]
    assert torch.equal(load_eager(folder, torch.float32)(ids).logits, single(ids).logits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop(SCALE), rf"{QUERY} is stored as F8_E4M3 without its scales, {SCALE}"),
        (lambda w: w.update({SCALE: w[SCALE][1:].clone()}), r"F32 \[1, 3\], expected .*\[2, 3\]"),
        (lambda w: w.update({SCALE: w[SCALE].int()}), r"I32 \[2, 3\], expected a float \[2, 3\]"),
        (lambda w: w.update({QUERY: w[QUERY].float().to(torch.float8_e5m2)}), "stored as F8_E5M2"),
        (lambda w: w.update({NORM: w[NORM].to(FP8)}), rf"{NORM} is stored as F8_E4M3"),
    ],
)  # fmt: skip
def test_damaged_scales_are_named(
    copy: Callable[..., Path], change: Callable[[dict[str, Tensor]], Any], message: str
) -> None:
    folder = copy("deepseek_v3")
    weights = to_fp8(folder, (16, 12))
    change(weights)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (None, "is stored as F8_E4M3; supported are"),
        (CONFIG, "weight_block_size None"),
        (CONFIG | {"weight_block_size": [128]}, r"weight_block_size \[128\]"),
        (CONFIG | {"weight_block_size": [0, 128]}, r"weight_block_size \[0, 128\]"),
        (CONFIG | {"weight_block_size": [128, 128], "fmt": "e5m2"}, "fmt 'e5m2'"),
        (CONFIG | {"weight_block_size": [8, 8], "activation_scheme": "static"}, "scheme 'static'"),
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes'"),
    ],
)
def test_other_quantisation_is_refused(
    copy: Callable[..., Path], quantization: dict[str, Any] | None, message: str
) -> None:
    folder = copy("deepseek_v3")
    to_fp8(folder, (128, 128))
    edit_config(folder, quantization_config=quantization)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)
