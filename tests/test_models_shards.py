"""safetensors files: sharded, left over, missing, truncated, damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from seekforge.kernels.errors import CheckpointError
from seekforge.models.checkpoint import open_checkpoint
from seekforge.models.module import load_eager

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
NORM = "model.norm.weight"


@pytest.fixture
def sharded(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """Two shards and an index, NORM in the second."""
    folder = Path(shutil.copytree(tiny_checkpoint("llama"), tmp_path / "sharded"))
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [name for name in sorted(weights) if name != NORM]
    parts = (names[:9], [*names[9:], NORM])
    for file, part in zip(SHARDS, parts, strict=True):
        save_file({name: weights[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in zip(SHARDS, parts, strict=True) for name in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def test_sharded_equals_single(sharded: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    ours, single = open_checkpoint(sharded), open_checkpoint(tiny_checkpoint("llama"))
    assert ours.tensors.keys() == single.tensors.keys()
    assert ours.tensors[NORM].file == sharded / SHARDS[1]
    assert all(torch.equal(ours.read(name), single.read(name)) for name in single.tensors)


def test_only_indexed_files_are_read(sharded: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    """A left-over model.safetensors: transformers alone would prefer it to the index."""
    right = load_file(tiny_checkpoint("llama") / "model.safetensors")[NORM]
    save_file({NORM: right + 1}, sharded / "model.safetensors")
    checkpoint = open_checkpoint(sharded)
    assert torch.equal(checkpoint.read(NORM), right)
    assert any("model.safetensors" in note for note in checkpoint.notes)
    assert torch.equal(load_eager(sharded, torch.float32).get_parameter(NORM), right)


def test_missing_tensor_names_the_unindexed_file(sharded: Path) -> None:
    weights = load_file(sharded / SHARDS[1])
    save_file({NORM: weights.pop(NORM)}, sharded / "extra.safetensors")
    save_file(weights, sharded / SHARDS[1])
    edit_index(sharded, lambda weight_map: weight_map.pop(NORM))
    with pytest.raises(CheckpointError, match=rf"{NORM}.*not read: extra\.safetensors"):
        open_checkpoint(sharded)


def test_missing_shard(sharded: Path) -> None:
    (sharded / SHARDS[0]).unlink()
    with pytest.raises(CheckpointError, match=rf"missing shard .*{SHARDS[0]}"):
        open_checkpoint(sharded)


def test_shards_without_index(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    with pytest.raises(CheckpointError, match=rf"{SHARDS[0]}.*neither.*{INDEX}"):
        open_checkpoint(sharded)


def test_index_that_disagrees_with_the_file(sharded: Path) -> None:
    edit_index(sharded, lambda weight_map: weight_map.update({NORM: SHARDS[0]}))
    with pytest.raises(CheckpointError, match=rf"places tensor {NORM} in {SHARDS[0]}"):
        open_checkpoint(sharded)


def test_tensor_stored_twice(sharded: Path) -> None:
    weights = load_file(sharded / SHARDS[0])
    save_file(weights | {NORM: torch.ones(32)}, sharded / SHARDS[0])
    with pytest.raises(CheckpointError, match=rf"{NORM} is stored twice.*{SHARDS[0]}.*{SHARDS[1]}"):
        open_checkpoint(sharded)


def test_index_that_leads_out_of_the_folder(sharded: Path) -> None:
    edit_index(sharded, lambda weight_map: weight_map.update({NORM: "../other.safetensors"}))
    with pytest.raises(CheckpointError, match=r"'\.\./other\.safetensors' leads out"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("content", ["{bad", "[]", '{"weight_map": 3}', '{"weight_map": {}}'])
def test_damaged_index(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match=rf"{INDEX} is damaged"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_shard(sharded: Path, keep: int) -> None:
    file = sharded / SHARDS[1]
    raw = file.read_bytes()[:keep]
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match=rf"{SHARDS[1]} is truncated: {len(raw)} bytes"):
        open_checkpoint(sharded)


def test_truncated_shard_says_the_right_size(sharded: Path) -> None:
    file = sharded / SHARDS[0]
    raw = file.read_bytes()
    file.write_bytes(raw[:-4])
    with pytest.raises(CheckpointError, match=rf"{len(raw) - 4} bytes, expected {len(raw)}\."):
        open_checkpoint(sharded)
    file.write_bytes(raw + b"tail")
    with pytest.raises(CheckpointError, match=rf"too long: {len(raw) + 4} .*expected {len(raw)}\."):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"not json", "unreadable header"),
        (b"[]", "unreadable header"),
        (b'{"w": {"dtype": "F32", "shape": [3]}}', "unreadable header"),
        (
            b'{"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}',
            r"w has 8 bytes for F32 \(3,\)",
        ),
    ],
)
def test_damaged_header(sharded: Path, header: bytes, message: str) -> None:
    data = len(header).to_bytes(8, "little") + header + bytes(8)
    (sharded / SHARDS[0]).write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"{SHARDS[0]} is damaged: {message}"):
        open_checkpoint(sharded)


def test_git_lfs_pointer(sharded: Path) -> None:
    (sharded / SHARDS[0]).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        open_checkpoint(sharded)


def test_pickles_and_nothing(sharded: Path) -> None:
    for file in (*SHARDS, INDEX):
        (sharded / file).unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        open_checkpoint(sharded)
    (sharded / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"pickle files \(pytorch_model\.bin\)"):
        open_checkpoint(sharded)
