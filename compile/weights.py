"""The weight writer: streams a program's weights from the checkpoint into one safetensors file.

Only one tensor is in memory at a time. The file is plain safetensors, with the data aligned to 64
bytes so that engines can use it in place: AOTInductor maps it, ONNX Runtime and TensorRT read it as
the model's external data. Format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from seekforge.compile.build_cache_sources import WEIGHTS, sources_digest
from seekforge.kernels.int4 import Int4, quantise
from seekforge.passes.program import Int4Part, Program

WEIGHTS_NAME = "weights.safetensors"
DTYPE_NAMES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.uint8: "U8",
}  # fmt: skip
ALIGNMENT = 64
SIGNED = 0x88  # XOR: a byte of two nibbles 0..15 to one of two signed INT4, minus 8


class Source(Protocol):
    """Where weights come from: a checkpoint, or one that calibration has smoothed."""

    def digest(self) -> str:
        """Equal digests mean equal tensors."""

    def read(self, name: str) -> Tensor:
        """A tensor by its stored name."""

    def int4(self, name: str, group_size: int, symmetric: bool, dtype: torch.dtype) -> Int4:
        """The same tensor in INT4, with scales in `dtype`."""


def write_weights(
    program: Program,
    checkpoint: Source,
    path: Path,
) -> int:
    """Writes all weights of `program` to `path`; returns their bytes."""
    names = _names(program)
    header: dict[str, Any] = {"__metadata__": {"recipe": recipe(program, checkpoint)}}
    offset = 0
    for name in names:
        meta = program.tensor(name)
        header[name] = {
            "dtype": DTYPE_NAMES[meta.dtype],
            "shape": list(meta.shape),
            "data_offsets": [offset, offset + meta.nbytes],
        }
        offset += meta.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    done = 0
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        start = file.tell()
        for group in write_order(program):
            at = {name: start + header[name]["data_offsets"][0] for name in group}
            for pieces in read_pieces(program, group, checkpoint.read, checkpoint.int4):
                for name, piece in pieces.items():
                    file.seek(at[name])
                    file.write(piece.contiguous().flatten().view(torch.uint8).numpy().data)
                    at[name] += piece.nbytes
                    done += piece.nbytes
    assert done == offset, f"{path}: wrote {done} bytes of {offset}"
    return offset


def _names(program: Program) -> list[str]:
    """Larger dtypes first: every tensor then starts aligned to its own element."""
    return sorted(program.weights, key=lambda name: (-program.tensor(name).element_size(), name))


def write_order(program: Program) -> list[list[str]]:
    """Names that are made from the same checkpoint tensors together, so that each is read once."""
    groups: dict[object, list[str]] = {}
    for name in _names(program):
        groups.setdefault(program.weights[name].sources or name, []).append(name)
    return list(groups.values())


def read_pieces(
    program: Program,
    names: Sequence[str],
    read: Callable[[str], Tensor],
    int4: Callable[[str, int, bool, torch.dtype], Int4] | None = None,
) -> Iterator[dict[str, Tensor]]:
    """The weights `names`, which have the same sources, piece by piece along dimension 0.

    read, int4: as in `Source`; without int4, what `read` gives is rounded to nearest. Only one
    checkpoint tensor is in memory at a time.
    """
    weights = {name: program.weights[name] for name in names}
    dtypes = {name: program.tensor(name).dtype for name in names}
    first = weights[names[0]]
    if first.value is not None:
        yield {name: weight.value.to(dtypes[name]) for name, weight in weights.items()}  # type: ignore[union-attr]
    packed = {name: weight.int4 for name, weight in weights.items() if weight.int4 is not None}
    for source in first.sources:
        pieces: dict[str, Tensor] = {}
        if len(packed) < len(names):
            tensor = read(source)
            pieces = {name: tensor.to(dtypes[name]) for name in names if name not in packed}
        for size, symmetric in {(part.group_size, part.symmetric) for part in packed.values()}:
            dtype = next(dtypes[name] for name, part in packed.items() if part.part == "scales")
            if int4 is None:
                whole = quantise(read(source).to(dtype), size, symmetric)
            else:
                whole = int4(source, size, symmetric, dtype)
            for name, part in packed.items():
                if (part.group_size, part.symmetric) == (size, symmetric):
                    pieces[name] = _part(whole, part)
        yield pieces


def _part(whole: Int4, part: Int4Part) -> Tensor:
    tensor = getattr(whole, part.part)
    assert isinstance(tensor, Tensor), f"{part}: {whole}"
    return tensor ^ SIGNED if part.signed else tensor


def recipe(program: Program, checkpoint: Source) -> str:
    """sha256 of all that decides the file's bytes: the checkpoint, how weights are made, and the
    code that makes them."""
    digest = hashlib.sha256(f"{checkpoint.digest()} {sources_digest(WEIGHTS)}".encode())
    for name, weight in sorted(program.weights.items()):
        meta = program.tensor(name)
        digest.update(
            f"{name} {meta.dtype} {tuple(meta.shape)} {weight.sources} {weight.int4}\n".encode()
        )
        if weight.value is not None:
            digest.update(weight.value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def stored_recipe(path: Path) -> str | None:
    """The recipe a weights file was written by; None where it says nothing or can't be read."""
    try:
        return str(_read_header(path)[1]["__metadata__"]["recipe"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def data_offsets(path: Path) -> dict[str, tuple[int, int]]:
    """For each tensor of a safetensors file its absolute offset and length in bytes."""
    start, header = _read_header(path)
    offsets = {n: entry["data_offsets"] for n, entry in header.items() if n != "__metadata__"}
    return {name: (start + begin, end - begin) for name, (begin, end) in offsets.items()}


def _read_header(path: Path) -> tuple[int, Any]:
    """(offset of the data, parsed header) of a safetensors file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return 8 + size, json.loads(file.read(size))
