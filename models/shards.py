"""Where each tensor of a checkpoint lies: safetensors headers and the shard index, checked.

In: a folder. Out: its `Shard`s, with a `TensorInfo` by tensor name. Only headers are read.
Format: https://github.com/huggingface/safetensors (8-byte little-endian header length, JSON header,
data). Knows nothing about models.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seekforge.kernels.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
# Bits an element, by the format's dtype names; a name not listed here is not checked for its size.
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor: `offset` and `nbytes` are bytes in `file`, from the file's beginning."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file: its size in bytes, and tensors."""

    file: Path
    size: int
    tensors: Mapping[str, TensorInfo]


def read_shards(folder: Path) -> list[Shard]:
    """The headers of all files that make up the checkpoint; raises `CheckpointError`.

    With an index only the files it names are read: others are left-overs, whatever their names.
    """
    shards = [read_shard(file) for file in indexed_files(folder)]
    owner: dict[str, Path] = {}
    for shard in shards:
        for name in shard.tensors:
            if name in owner:
                raise CheckpointError(
                    f"tensor {name} is stored twice, in {owner[name]} and in {shard.file}; it must "
                    f"be in one of the files of {INDEX_FILE}. Fetch the checkpoint again."
                )
            owner[name] = shard.file
    for name, file_name in _weight_map(folder).items():
        if owner.get(name) != folder / file_name:
            raise CheckpointError(
                f"{folder / INDEX_FILE} places tensor {name} in {file_name}, which does not "
                "contain it. Index and files belong to different versions: fetch both again."
            )
    return shards


def indexed_files(folder: Path) -> list[Path]:
    """The files that make up the checkpoint; raises `CheckpointError` if one is missing."""
    weight_map = _weight_map(folder)
    if not weight_map:
        if (folder / SINGLE_FILE).is_file():
            return [folder / SINGLE_FILE]
        raise CheckpointError(_no_weights(folder))
    files = [folder / name for name in sorted(set(weight_map.values()))]
    for file in files:
        if not file.is_file():
            raise CheckpointError(
                f"missing shard {file}, which {INDEX_FILE} names. Fetch the checkpoint again."
            )
    return files


def has_weights(folder: Path) -> bool:
    """Whether the folder holds, or by its index should hold, weights of any format."""
    patterns = (INDEX_FILE, "*.safetensors", "*.bin")
    return any(True for pattern in patterns for _ in folder.glob(pattern))


def unindexed_files(folder: Path, shards: Sequence[Shard]) -> list[Path]:
    """safetensors files in the folder that are not part of the checkpoint."""
    return sorted(set(folder.glob("*.safetensors")) - {shard.file for shard in shards})


def read_shard(file: Path) -> Shard:
    """Parses one file's header and holds it against the file's size."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if start == b"version ":
            raise CheckpointError(f"{file} is a Git LFS pointer, not weights. Run `git lfs pull`.")
        length = int.from_bytes(start, "little")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(_damaged(file, f"it claims a header of {length} bytes"))
        if size < 8 + length or not length:
            raise CheckpointError(_wrong_size(file, size, 8 + max(length, 2)))
        header = stream.read(length)
    try:
        entries: dict[str, Any] = json.loads(header)
        entries.pop("__metadata__", None)
        tensors = {name: _tensor(file, 8 + length, entry) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(_damaged(file, f"unreadable header: {error}")) from error
    for name, tensor in tensors.items():
        bits = BITS.get(tensor.dtype)
        if bits is not None and tensor.nbytes * 8 != math.prod(tensor.shape) * bits:
            raise CheckpointError(
                _damaged(
                    file, f"{name} has {tensor.nbytes} bytes for {tensor.dtype} {tensor.shape}"
                )
            )
    end = max((tensor.offset + tensor.nbytes for tensor in tensors.values()), default=8 + length)
    if size != end:
        raise CheckpointError(_wrong_size(file, size, end))
    return Shard(file, size, tensors)


def _tensor(file: Path, data: int, entry: Mapping[str, Any]) -> TensorInfo:
    begin, end = entry["data_offsets"]
    return TensorInfo(file, entry["dtype"], tuple(entry["shape"]), data + begin, end - begin)


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file name as the index says; empty without an index."""
    index = folder / INDEX_FILE
    if not index.is_file():
        return {}
    try:
        weight_map: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        names = set(weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(_damaged(index, f"no readable weight_map: {error!r}")) from error
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(_damaged(index, f"file name {name!r} leads out of the folder"))
    if not names:
        raise CheckpointError(_damaged(index, "its weight_map is empty"))
    return weight_map


def _no_weights(folder: Path) -> str:
    if stray := sorted(file.name for file in folder.glob("*.safetensors")):
        return (
            f"{folder}: found {', '.join(stray[:4])} ({len(stray)} files) but neither "
            f"{SINGLE_FILE} nor {INDEX_FILE}. Fetch the index, or rename a single file."
        )
    if pickles := sorted(file.name for file in folder.glob("*.bin")):
        return (
            f"{folder}: the weights are pickle files ({', '.join(pickles[:4])}), which can run "
            "code when read. Convert them: load with transformers, save_pretrained to a new folder."
        )
    return (
        f"{folder}: no weights: neither {SINGLE_FILE} nor {INDEX_FILE}. Fetch the checkpoint again."
    )


def _wrong_size(file: Path, size: int, expected: int) -> str:
    what = "truncated" if size < expected else "too long"
    return f"{file} is {what}: {size} bytes, expected {expected}. Fetch the file again."


def _damaged(file: Path, what: str) -> str:
    return f"{file} is damaged: {what}. Fetch the file again."
