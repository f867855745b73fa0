"""Calibration on checkpoints: text of every length, invariance, and what INT4 loses with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from seekforge.compile.calibration import Calibration, calibrate
from seekforge.compile.calibration_text import BUILT_IN, calibration_windows
from seekforge.kernels.errors import InputError
from seekforge.kernels.int4 import dequantise, group_size_of
from seekforge.kernels.tolerance import normalised_error
from seekforge.models.checkpoint import Checkpoint, open_checkpoint, tensors_for_parameter

FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3"]
KEPT = ("embed_tokens", "lm_head", "mlp.gate.weight", "kv_b_proj")
WINDOWS = torch.randint(3, 280, (6, 40), generator=torch.Generator().manual_seed(7)).tolist()


def sources(checkpoint: Checkpoint, module: nn.Module) -> dict[str, tuple[str, ...]]:
    return {n: tensors_for_parameter(checkpoint, n) for n, _ in module.named_parameters()}


def int4_tensors(checkpoint: Checkpoint, module: nn.Module, wanted: int = 32) -> dict[str, int]:
    """Group size of each stored matrix that is quantised."""
    sizes = {}
    for name, stored in sources(checkpoint, module).items():
        shape = module.get_parameter(name).shape
        size = group_size_of(shape[-1], wanted)
        if len(shape) > 1 and size and not any(part in name for part in KEPT):
            sizes |= dict.fromkeys(stored, size)
    return sizes


def load(module: nn.Module, checkpoint: Checkpoint, read: Callable[[str], torch.Tensor]) -> None:
    for name, stored in sources(checkpoint, module).items():
        parameter = module.get_parameter(name)
        pieces = torch.cat([read(source).float() for source in stored])
        parameter.data.copy_(pieces.view(parameter.shape))


def calibrated(
    path: Path, module: nn.Module, windows: Any = WINDOWS, symmetric: bool = True
) -> tuple[Checkpoint, dict[str, int], Calibration]:
    checkpoint = open_checkpoint(path)
    sizes = int4_tensors(checkpoint, module)
    return checkpoint, sizes, calibrate(checkpoint, windows, sizes, symmetric, torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_smoothed_checkpoint_is_the_same_model(
    tiny_checkpoint: Callable[..., Path], tiny_model: Callable[..., nn.Module], family: str
) -> None:
    module = tiny_model(family)
    ids = torch.tensor(WINDOWS[:2])
    right = module(ids).logits
    checkpoint, sizes, calibration = calibrated(tiny_checkpoint(family), module)
    load(module, checkpoint, calibration.read)
    assert any(not torch.equal(calibration.read(n), checkpoint.read(n)) for n in sizes)
    assert normalised_error(module(ids).logits, right) < 1e-10
    assert calibration.tokens == 240
    assert set(calibration.clips) == set(sizes)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_no_group_is_worse_than_plain_rounding(
    tiny_checkpoint: Callable[..., Path],
    tiny_model: Callable[..., nn.Module],
    family: str,
    symmetric: bool,
) -> None:
    module = tiny_model(family)
    _, sizes, calibration = calibrated(tiny_checkpoint(family), module, symmetric=symmetric)
    assert {g.layer for g in calibration.groups} == {0, 1}
    for group in calibration.groups:
        assert 0 < group.error <= group.scaled_error * 1.0001 <= group.rtn_error * 1.0002, group
    plain, awq = calibration.mean_errors
    assert awq < plain
    name = next(iter(sizes))
    packed = calibration.int4(name, sizes[name], symmetric, torch.bfloat16)
    assert packed.scales.dtype is torch.bfloat16 and (packed.zeros is None) == symmetric


def test_reported_error_is_that_of_the_layer(
    tiny_checkpoint: Callable[..., Path], tiny_model: Callable[..., nn.Module]
) -> None:
    """The error of q, k, v of layer 0 measured in the model itself: INT4 weights of the smoothed
    model on the smoothed input."""
    module = tiny_model("llama")
    checkpoint, sizes, calibration = calibrated(tiny_checkpoint("llama"), module)
    attention = module.model.layers[0].self_attn  # type: ignore[union-attr, index]
    names = [f"{p}_proj" for p in "qkv"]

    def outputs() -> torch.Tensor:
        seen: list[torch.Tensor] = []
        hooks = [
            getattr(attention, name).register_forward_hook(lambda _m, _i, y: seen.append(y))
            for name in names
        ]
        module(torch.tensor(WINDOWS))
        for hook in hooks:
            hook.remove()
        return torch.cat(seen, -1)

    right = outputs()
    inverse = {}
    for p in names:  # v's rows are scaled for o; its outputs are compared unscaled
        rows = calibration.factors[f"model.layers.0.self_attn.{p}.weight"].rows
        inverse[p] = (
            torch.ones(len(attention.get_submodule(p).weight)) if rows is None else 1 / rows
        )
    load(
        module,
        checkpoint,
        lambda n: (
            dequantise(calibration.int4(n, sizes[n], True, torch.float32))
            if n in sizes
            else calibration.read(n)
        ),
    )
    rounded = outputs() * torch.cat([inverse[p] for p in names])
    error = (rounded - right).square().sum() / right.square().sum()
    group = calibration.groups[0]
    assert group.producer == "input_layernorm.weight"
    assert group.error == pytest.approx(float(error), rel=1e-2)


@pytest.mark.parametrize(("family", "symmetric"), [("qwen2", True), ("deepseek_v3", False)])
def test_error_feedback(
    tiny_checkpoint: Callable[..., Path],
    tiny_model: Callable[..., nn.Module],
    tmp_path: Path,
    family: str,
    symmetric: bool,
) -> None:
    """Kept on disk; no group is worse than without, and the whole model is nearer."""
    module = tiny_model(family)
    checkpoint, sizes, plain = calibrated(tiny_checkpoint(family), module, symmetric=symmetric)
    fed_back = calibrate(checkpoint, WINDOWS, sizes, symmetric, torch.float32, folder=tmp_path)
    assert set(fed_back.files) == set(sizes) and not plain.files
    for one, other in zip(fed_back.groups, plain.groups, strict=True):
        assert one.error <= other.error * 1.0001
    assert fed_back.mean_errors[1] < 0.9 * plain.mean_errors[1]
    for name, size in sizes.items():
        packed = fed_back.int4(name, size, symmetric, torch.float32)
        smoothed = fed_back.read(name)
        assert packed.group_size == size and (packed.zeros is None) == symmetric
        assert normalised_error(dequantise(packed), smoothed) < 0.05, name
    name = next(iter(sizes))
    with pytest.raises(AssertionError, match="was calibrated as"):
        fed_back.int4(name, sizes[name], not symmetric, torch.float32)


def test_experts_without_tokens_are_neutral_and_named(
    tiny_checkpoint: Callable[..., Path], tiny_model: Callable[..., nn.Module]
) -> None:
    """One window of 2 tokens reaches at most 4 of 8 experts."""
    module = tiny_model("deepseek_v3")
    path = tiny_checkpoint("deepseek_v3")
    checkpoint, sizes, calibration = calibrated(path, module, [[5, 6]])
    counts = calibration.expert_tokens[1]
    silent = calibration.neutral_experts[1]
    assert 0 not in calibration.expert_tokens  # a dense layer
    assert sum(counts) == 4 and len(counts) == 8 and len(silent) >= 4
    e = silent[0]
    factors = calibration.factors[f"model.layers.1.mlp.experts.{e}.down_proj.weight"]
    assert factors.columns is not None and (factors.columns == 1).all()
    name = f"model.layers.1.mlp.experts.{e}.down_proj.weight"
    plain = checkpoint.int4(name, sizes[name], True, torch.float32)
    assert torch.equal(
        calibration.int4(name, sizes[name], True, torch.float32).qweight, plain.qweight
    )


def test_only_what_is_int4_is_searched(tiny_checkpoint: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("llama"))
    name = "model.layers.1.mlp.down_proj.weight"
    calibration = calibrate(checkpoint, WINDOWS, {name: 28}, True, torch.float32)
    assert [(g.layer, g.linears) for g in calibration.groups] == [(1, ("mlp.down_proj.weight",))]
    assert set(calibration.clips) == {name}
    assert set(calibration.factors) == {name, "model.layers.1.mlp.up_proj.weight"}
    other = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(calibration.read(other), checkpoint.read(other))


def test_planted_outliers_are_recovered(
    tiny_checkpoint: Callable[..., Path], tiny_model: Callable[..., nn.Module], tmp_path: Path
) -> None:
    """Two input channels x50, compensated in the weights that read them: the same model, of which
    plain rounding loses much more."""
    module = tiny_model("llama")
    for layer in module.model.layers:  # type: ignore[union-attr]
        for norm, readers in (
            (layer.input_layernorm, [getattr(layer.self_attn, f"{p}_proj") for p in "qkv"]),
            (layer.post_attention_layernorm, [layer.mlp.gate_proj, layer.mlp.up_proj]),
        ):
            norm.weight.data[[3, 20]] *= 50
            for reader in readers:
                reader.weight.data[:, [3, 20]] /= 50
    module.save_pretrained(tmp_path)
    checkpoint, sizes, calibration = calibrated(tmp_path, module)
    ids = torch.tensor(WINDOWS)
    right = module(ids).logits
    errors = []
    for source in (checkpoint, calibration):
        rounded = AutoModelForCausalLM.from_pretrained(tmp_path).eval().requires_grad_(False)
        load(
            rounded,
            checkpoint,
            lambda n, s=source: (
                dequantise(s.int4(n, sizes[n], True, torch.float32))  # type: ignore[misc]
                if n in sizes
                else s.read(n)
            ),
        )
        errors.append(normalised_error(rounded(ids).logits, right))
    assert errors[1] < 0.6 * errors[0]
    for group in calibration.groups:
        if "layernorm" in group.producer:
            assert group.ratio > 0 and group.error < 0.6 * group.rtn_error


def tokenizer(text: str) -> SimpleNamespace:
    return SimpleNamespace(input_ids=[len(word) for word in text.split()])


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("a b", [2]),
        ("a " * 5 + "\n\n" + "b " * 134 + "\n" + "c " * 512, [128] * 5 + [11]),
        ("\n\n a b c \n\n\n", [3]),
        ("word " * 129, [128]),  # a rest of one token predicts nothing
    ],
)
def test_text_of_any_length(tmp_path: Path, text: str, lengths: list[int]) -> None:
    """B34: short, uneven and empty lines; fewer samples than asked."""
    file = tmp_path / "text.txt"
    file.write_text(text)
    found = calibration_windows(file, tokenizer, None, 128, 128 * 128)
    assert [len(window) for window in found] == lengths


def test_long_texts_are_sampled_evenly(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(" ".join("x" * (1 + i // 8) for i in range(80)))
    found = calibration_windows(file, tokenizer, None, 8, 32)
    assert [window[0] for window in found] == [1, 3, 6, 8]


def test_folders_are_read_by_name(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("bb bb")
    (tmp_path / "a.txt").write_text("a a")
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe")
    assert calibration_windows(tmp_path, tokenizer, 0, 8, 64) == [[1, 1, 0, 2, 2, 0]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"), ("", "holds no text"), ("\n \n", "holds no text"),
        ("a", "holds 1 tokens; at least 2"),
    ],
)  # fmt: skip
def test_no_text_is_an_error(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InputError, match=message):
        calibration_windows(file, tokenizer, None, 128, 4096)


def test_a_folder_without_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(InputError, match=r"holds no text .*1 empty files"):
        calibration_windows(tmp_path, tokenizer, None, 128, 4096)


def test_built_in_text_is_long_enough_and_small() -> None:
    windows = calibration_windows(None, tokenizer, None, 512, 1 << 20)
    assert sum(map(len, windows)) > 2500  # words
    assert BUILT_IN.stat().st_size < 60_000
