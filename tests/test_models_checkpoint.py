"""Checkpoint files: completeness, tying, ids; each refusal names what is wrong and where."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from seekforge.kernels.errors import CheckpointError
from seekforge.models.checkpoint import open_checkpoint, tensors_for_parameter
from seekforge.models.module import load_eager

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def copy(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Like tiny_checkpoint, but a folder of the test's own."""

    def make(family: str, **overrides: Any) -> Path:
        return Path(shutil.copytree(tiny_checkpoint(family, **overrides), tmp_path / "checkpoint"))

    return make


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def edit_json(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_reads_every_tensor(tiny_checkpoint: Callable[..., Path]) -> None:
    path = tiny_checkpoint("llama")
    checkpoint = open_checkpoint(str(path))
    weights = load_file(path / "model.safetensors")
    assert checkpoint.tensors.keys() == weights.keys()
    assert (checkpoint.notes, checkpoint.warnings) == ((), ())
    raw = (path / "model.safetensors").read_bytes()
    for name, weight in weights.items():
        info = checkpoint.tensors[name]
        assert torch.equal(checkpoint.read(name), weight), name
        assert (info.dtype, info.shape) == ("F32", tuple(weight.shape)), name
        stored = raw[info.offset : info.offset + info.nbytes]
        assert stored == weight.numpy().tobytes(), name


@pytest.mark.parametrize("stored", ["with", "without"])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_head(copy: Callable[..., Path], tied: bool, stored: str) -> None:
    folder = copy("qwen2", tie_word_embeddings=tied)

    def change(weights: dict[str, torch.Tensor]) -> None:
        if stored == "without":
            weights.pop(HEAD, None)
        elif tied:
            weights[HEAD] = weights[EMBEDDING].clone()

    rewrite(folder, change)
    if not tied and stored == "without":
        with pytest.raises(CheckpointError, match=r"tie_word_embeddings is False.*lm_head\.weight"):
            open_checkpoint(folder)
        return
    checkpoint = open_checkpoint(folder)
    assert checkpoint.warnings == ()
    assert checkpoint.config.tie_word_embeddings is tied
    head = checkpoint.read(*tensors_for_parameter(checkpoint, HEAD))
    assert torch.equal(head, load_eager(folder, torch.float32).get_parameter(HEAD))
    assert torch.equal(head, checkpoint.read(EMBEDDING)) is tied


def test_tied_with_only_the_head_stored(copy: Callable[..., Path]) -> None:
    folder = copy("qwen2", tie_word_embeddings=True)
    rewrite(folder, lambda weights: weights.update({HEAD: weights.pop(EMBEDDING)}))
    checkpoint = open_checkpoint(folder)
    assert tensors_for_parameter(checkpoint, EMBEDDING) == (HEAD,)
    eager = load_eager(folder, torch.float32).get_parameter(EMBEDDING)
    assert torch.equal(checkpoint.read(HEAD), eager)


def test_tied_with_another_head_uses_the_stored_one(copy: Callable[..., Path]) -> None:
    folder = copy("qwen2", tie_word_embeddings=True)
    rewrite(folder, lambda weights: weights.update({HEAD: weights[EMBEDDING] + 1}))
    checkpoint = open_checkpoint(folder)
    assert [warning for warning in checkpoint.warnings if "lm_head" in warning]
    assert (checkpoint.config.tie_word_embeddings, checkpoint.spec.tie_word_embeddings) == (
        False,
        False,
    )
    eager = load_eager(folder, torch.float32)
    for name in (HEAD, EMBEDDING):
        ours = checkpoint.read(*tensors_for_parameter(checkpoint, name))
        assert torch.equal(ours, eager.get_parameter(name)), name


def test_missing_tensor_is_named(copy: Callable[..., Path]) -> None:
    folder = copy("llama")
    rewrite(folder, lambda weights: weights.pop(QUERY))
    with pytest.raises(CheckpointError, match=rf"1 tensors are in no file.*{QUERY}"):
        open_checkpoint(folder)


def test_wrong_shape_is_named(copy: Callable[..., Path]) -> None:
    folder = copy("llama")
    edit_json(folder / "config.json", num_key_value_heads=4)
    with pytest.raises(CheckpointError, match=r"k_proj\.weight has shape \[16, 32\].*\[32, 32\]"):
        open_checkpoint(folder)


@pytest.mark.parametrize(("dtype", "name"), [(torch.float64, "F64"), (torch.int8, "I8")])
def test_unsupported_dtype_is_named(
    copy: Callable[..., Path], dtype: torch.dtype, name: str
) -> None:
    folder = copy("llama")
    rewrite(folder, lambda weights: weights.update({QUERY: weights[QUERY].to(dtype)}))
    with pytest.raises(CheckpointError, match=rf"{QUERY} is stored as {name}.*F32, F16, BF16"):
        open_checkpoint(folder)


def test_half_precision_is_read_as_stored(copy: Callable[..., Path]) -> None:
    folder = copy("llama")
    rewrite(folder, lambda weights: weights.update({k: w.bfloat16() for k, w in weights.items()}))
    assert open_checkpoint(folder).read(QUERY).dtype == torch.bfloat16


def test_unused_tensors_are_reported(copy: Callable[..., Path]) -> None:
    folder = copy("llama")
    skipped, unknown = "model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.0.adapter"
    rewrite(folder, lambda w: w.update({skipped: torch.ones(4), unknown: torch.ones(4)}))
    checkpoint = open_checkpoint(folder)
    assert len(checkpoint.notes) == 1 and skipped in checkpoint.notes[0]
    assert len(checkpoint.warnings) == 1 and unknown in checkpoint.warnings[0]
    assert skipped not in checkpoint.warnings[0]


MOE = ("qwen3_moe", "deepseek_v2", "deepseek_v3")


@pytest.mark.parametrize("family", MOE)
def test_stacked_experts_are_made_of_stored_ones(copy: Callable[..., Path], family: str) -> None:
    checkpoint = open_checkpoint(copy(family))
    assert checkpoint.warnings == ()
    eager = load_eager(checkpoint.path, torch.float32).state_dict()
    prefix = "model.layers.1.mlp.experts."
    up = tensors_for_parameter(checkpoint, prefix + "gate_up_proj")
    assert up[:2] == (f"{prefix}0.gate_proj.weight", f"{prefix}0.up_proj.weight")
    assert (len(up), up[-1]) == (16, f"{prefix}7.up_proj.weight")
    for fqn, weight in eager.items():
        names = tensors_for_parameter(checkpoint, fqn)
        made = torch.cat([checkpoint.read(name) for name in names]).view(weight.shape)
        assert torch.equal(made, weight), fqn


@pytest.mark.parametrize("experts", [1, 8])
def test_experts_stored_as_one_tensor(copy: Callable[..., Path], experts: int) -> None:
    folder = copy("qwen3_moe", num_experts=experts, num_experts_per_tok=1)
    one_by_one = open_checkpoint(folder)
    fqn = "model.layers.0.mlp.experts.down_proj"
    names = tensors_for_parameter(one_by_one, fqn)
    assert len(names) == experts
    stacked = torch.stack([one_by_one.read(name) for name in names])
    rewrite(folder, lambda w: w.update({fqn: stacked}) or [w.pop(name) for name in names])
    checkpoint = open_checkpoint(folder)
    assert tensors_for_parameter(checkpoint, fqn) == (fqn,)
    assert torch.equal(checkpoint.read(fqn), stacked)
    assert checkpoint.warnings == ()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("experts.5.up_proj.weight", None, r"1 tensors are in no file.*experts\.5\.up_proj"),
        ("gate.e_score_correction_bias", None, r"1 tensors are in no .*e_score_correction_bias"),
        ("experts.5.up_proj.weight", lambda w: w[1:].clone(), r"has shape \[15, 32\].*\[16, 32\]"),
        ("experts.5.down_proj.weight", torch.Tensor.double, r"5\.down_proj\..* is stored as F64"),
    ],
)  # fmt: skip
def test_wrong_expert_is_named(
    copy: Callable[..., Path], name: str, change: Callable[..., torch.Tensor] | None, message: str
) -> None:
    folder = copy("deepseek_v3")
    name = f"model.layers.1.mlp.{name}"
    if change is None:
        rewrite(folder, lambda weights: weights.pop(name))
    else:
        rewrite(folder, lambda weights: weights.update({name: change(weights[name])}))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize("rank", [None, 24])
def test_query_projections_follow_q_lora_rank(copy: Callable[..., Path], rank: int | None) -> None:
    checkpoint = open_checkpoint(copy("deepseek_v2", q_lora_rank=rank))
    found = {name for name in checkpoint.tensors if "layers.0.self_attn.q_" in name}
    parts = ("proj",) if rank is None else ("a_proj", "a_layernorm", "b_proj")
    assert found == {f"model.layers.0.self_attn.q_{part}.weight" for part in parts}
    assert checkpoint.spec.q_lora_rank == rank


@pytest.mark.parametrize("layers", [2, 12])
def test_prediction_layers_are_skipped(copy: Callable[..., Path], layers: int) -> None:
    folder = copy("deepseek_v3", num_hidden_layers=layers)
    expected = open_checkpoint(folder)
    assert expected.config.num_nextn_predict_layers == 1
    mtp = [f"model.layers.{layers}.{part}" for part in ("eh_proj.weight", "enorm.weight")]
    unknown = [f"model.layers.{layers + 1}.enorm.weight", "model.layers.1.eh_proj.weight"]
    computed = "model.layers.1.self_attn.rotary_emb.inv_freq"
    extra = {name: torch.ones(3) for name in [*mtp, *unknown, computed]}
    rewrite(folder, lambda weights: weights.update(extra))
    checkpoint = open_checkpoint(folder)
    (note,) = [note for note in checkpoint.notes if "MTP" in note]
    assert "2 stored" in note and all(name in note for name in mtp)
    (warning,) = checkpoint.warnings
    assert "2 stored" in warning and all(name in warning for name in unknown)
    for fqn in ("model.layers.1.self_attn.o_proj.weight", "model.layers.1.mlp.gate.weight"):
        assert torch.equal(checkpoint.read(fqn), expected.read(fqn))


def test_prediction_layers_hide_no_missing_layer(copy: Callable[..., Path]) -> None:
    folder = copy("deepseek_v3")
    rewrite(folder, lambda w: [w.update({n.replace("s.1.", "s.2."): w.pop(n)}) for n in [*w]])
    with pytest.raises(CheckpointError, match=r"are in no file.*model\.layers\.1\."):
        open_checkpoint(folder)


def test_eos_ids_prefer_generation_config(copy: Callable[..., Path]) -> None:
    folder = copy("qwen2")
    file = folder / "generation_config.json"
    edit_json(folder / "config.json", eos_token_id=9, bos_token_id=3)
    edit_json(file, eos_token_id=[9, 7], bos_token_id=4)
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.eos_token_ids, checkpoint.bos_token_id) == ((9, 7), 4)
    edit_json(file, eos_token_id=7)
    assert open_checkpoint(folder).eos_token_ids == (7,)
    edit_json(file, eos_token_id=0)  # an id, not "absent"
    assert open_checkpoint(folder).eos_token_ids == (0,)
    edit_json(file, eos_token_id=None, bos_token_id=None)
    assert open_checkpoint(folder).eos_token_ids == (9,)
    file.unlink()
    checkpoint = open_checkpoint(folder)
    assert checkpoint.generation_config is None
    assert (checkpoint.eos_token_ids, checkpoint.bos_token_id) == ((9,), 3)


def test_vocabulary_wider_than_the_tokenizer_is_fine(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    path = tiny_checkpoint("llama")
    assert len(AutoTokenizer.from_pretrained(path)) == 280
    assert open_checkpoint(path).spec.vocab_size == 293


@pytest.mark.parametrize(("added", "fits"), [(13, True), (14, False)])
def test_tokenizer_ids_must_have_rows(copy: Callable[..., Path], added: int, fits: bool) -> None:
    folder = copy("llama")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<extra{i}>" for i in range(added)])
    tokenizer.save_pretrained(folder)
    if fits:
        open_checkpoint(folder)
    else:
        with pytest.raises(CheckpointError, match=r"'<extra13>' has id 293, .* 293 rows"):
            open_checkpoint(folder)


def test_without_a_tokenizer_there_is_a_note(tiny_checkpoint: Callable[..., Path]) -> None:
    notes = open_checkpoint(tiny_checkpoint("llama", vocab_size=101)).notes
    assert len(notes) == 1 and "no tokenizer" in notes[0]


def test_digest_follows_the_files(copy: Callable[..., Path]) -> None:
    folder = copy("llama")
    rewrite(folder, lambda weights: None)
    first = open_checkpoint(folder).digest()
    assert open_checkpoint(folder).digest() == first
    rewrite(folder, lambda weights: weights[QUERY].add_(1))  # same names, shapes and size
    second = open_checkpoint(folder).digest()
    edit_json(folder / "config.json", rms_norm_eps=1e-4)
    assert len({first, second, open_checkpoint(folder).digest()}) == 3


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere is not a directory"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"it has no config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{bad")
    with pytest.raises(CheckpointError, match=r"config\.json is not readable JSON"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "mamba"}, r"'mamba'.*supported are llama, qwen2, qwen3"),
        ({"model_type": None}, r"model_type None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, r"ForSequenceClassification"),
        ({"quantization_config": {"quant_method": "hqq"}}, r"quant_method 'hqq'"),
        ({"hidden_size": "wide"}, r"transformers refuses it"),
        ({"rope_scaling": {"type": "foo"}, "rope_parameters": None}, r"'foo'.*unknown"),
    ],
)
def test_config_refused(copy: Callable[..., Path], values: dict[str, Any], message: str) -> None:
    folder = copy("llama")
    edit_json(folder / "config.json", **values)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)
