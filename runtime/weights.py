"""An engine's weights file -> tensors on the engine's device, each byte copied as rarely as can be.

In: a safetensors file, a device. Out: tensors by name. On the CPU they are the file's own pages,
read when first touched. To a GPU several threads read pieces of the file into page-locked memory
of their own, which the GPU fetches while they read on: one copy on the host, one over the bus, and
no more host memory than the threads' buffers. What the tensors mean is not known here.
Format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from seekforge.kernels.errors import EngineError

DTYPES = {
    "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64,
    "U8": torch.uint8,
}  # fmt: skip
PIECE = 32 << 20  # bytes; pieces below 8 MB are bound by their calls
READERS = 8  # a thread copies some 6 GB/s out of the page cache, a PCIe 5 bus takes 50


@dataclass(frozen=True, slots=True)
class Piece:
    """`size` bytes of the file from `offset` on belong at `start` of the flat bytes of `name`."""

    name: str
    offset: int
    start: int
    size: int


def load_weights(path: Path, device: torch.device) -> dict[str, Tensor]:
    """All tensors of the file, contiguous. Raises EngineError where the file is cut or strange."""
    if device.type == "cpu":
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    header, begin = read_header(path)
    weights = {
        name: torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]], device=device)
        for name, entry in header.items()
    }
    todo: SimpleQueue[Piece] = SimpleQueue()
    for name, entry in header.items():
        for piece in pieces(name, begin + entry["data_offsets"][0], weights[name].nbytes):
            todo.put(piece)
    flat = {name: tensor.view(-1).view(torch.uint8) for name, tensor in weights.items()}
    with ThreadPoolExecutor(READERS) as pool:
        for done in [pool.submit(_copy, path, todo, flat, device) for _ in range(READERS)]:
            done.result()
    return weights


def read_header(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """(entry of each tensor, offset of the data). Raises EngineError where it can't be read."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
    except (OSError, ValueError) as error:
        raise EngineError(
            f"{path}: no safetensors file ({error}); build the engine again"
        ) from None
    header.pop("__metadata__", None)
    return header, 8 + size


def pieces(name: str, offset: int, nbytes: int) -> Iterator[Piece]:
    """A tensor's bytes, which begin at `offset` in the file, in pieces of at most PIECE."""
    for start in range(0, nbytes, PIECE):
        yield Piece(name, offset + start, start, min(PIECE, nbytes - start))


def _copy(
    path: Path, todo: SimpleQueue[Piece], flat: dict[str, Tensor], device: torch.device
) -> None:
    """One reader: takes pieces until there are none. Two buffers: one is filled while the other
    is fetched."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.default_stream(device))  # the memory may have had a user before
    buffers = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    fetched = [torch.cuda.Event() for _ in buffers]  # type: ignore[no-untyped-call]
    turn = 0
    file = os.open(path, os.O_RDONLY)
    try:
        with torch.cuda.stream(stream):
            while True:
                piece = todo.get_nowait()
                fetched[turn].synchronize()
                part = buffers[turn][: piece.size]
                read_into(file, part.numpy().data, piece.offset, path)
                target = flat[piece.name][piece.start : piece.start + piece.size]
                target.copy_(part, non_blocking=True)
                fetched[turn].record(stream)
                turn = 1 - turn
    except Empty:
        stream.synchronize()
    finally:
        os.close(file)


def read_into(file: int, into: memoryview, offset: int, path: Path) -> None:
    """Fills `into` from the file's `offset`. Raises EngineError where the file ends before."""
    done = 0
    while done < len(into):
        count = os.preadv(file, [into[done:]], offset + done)
        if not count:
            raise EngineError(f"{path} ends at byte {offset + done}: it is cut; build it again")
        done += count
