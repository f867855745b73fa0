"""The weight writer: streams a program's weights from the checkpoint into one safetensors file.

Only one tensor is in memory at a time. The file is plain safetensors, with the data aligned to 64
bytes so that engines can use it in place: AOTInductor maps it, ONNX Runtime and TensorRT read it as
the model's external data. Format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from seekforge.models.checkpoint import Checkpoint
from seekforge.passes.program import Program, Weight

WEIGHTS_NAME = "weights.safetensors"
DTYPE_NAMES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
}  # fmt: skip
ALIGNMENT = 64


def write_weights(
    program: Program,
    checkpoint: Checkpoint,
    path: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Writes all weights of `program` to `path`; returns their bytes. progress(done, total) in
    bytes."""
    # Larger dtypes first: every tensor then starts aligned to its own element.
    names = sorted(program.weights, key=lambda name: (-program.tensor(name).element_size(), name))
    header: dict[str, object] = {}
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
        for name in names:
            for part in parts(program.weights[name], checkpoint):
                part = part.to(program.tensor(name).dtype).contiguous()
                file.write(part.flatten().view(torch.uint8).numpy().data)
                done += part.nbytes
            progress(done, offset)
    assert done == offset, f"{path}: wrote {done} bytes of {offset}"
    return offset


def parts(weight: Weight, checkpoint: Checkpoint) -> Iterator[Tensor]:
    """The tensors that a weight is the concatenation of, one at a time."""
    if weight.value is not None:
        yield weight.value
    for source in weight.sources:
        yield checkpoint.read(source)


def data_offsets(path: Path) -> dict[str, tuple[int, int]]:
    """For each tensor of a safetensors file its absolute offset and length in bytes."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    return {
        name: (
            8 + size + entry["data_offsets"][0],
            entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }
