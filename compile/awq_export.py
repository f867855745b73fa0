"""Writes a checkpoint with INT4 weights in the AutoAWQ GEMM layout, for other readers and ours.

In: a checkpoint, a source of (smoothed) weights, which tensors become INT4. Out: a checkpoint
directory, whose config.json describes it as transformers' own loader expects. One shard is in
memory at a time. The layout is documented in models/quantized.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from seekforge.compile.bundle import copy_tokenizer
from seekforge.compile.weights import Source
from seekforge.kernels.errors import InputError
from seekforge.models.checkpoint import Checkpoint
from seekforge.models.config import read_json
from seekforge.models.fp8 import SCALE_SUFFIX
from seekforge.models.quantized import to_awq
from seekforge.models.quantized_config import awq_config
from seekforge.models.shards import INDEX_FILE

SHARD_BYTES = 1 << 29
DTYPE = torch.float16  # of scales and of all other tensors: what AutoAWQ's kernels compute in


def awq_tensors(
    checkpoint: Checkpoint, sizes: Mapping[str, int], group_size: int
) -> tuple[dict[str, int], list[str]]:
    """(tensors that the layout can hold, modules that stay as they are). The layout has one group
    size for all, and words of 8 output features."""
    fits = {
        name: size
        for name, size in sizes.items()
        if size == group_size and not checkpoint.tensors[name].shape[0] % 8
    }
    matrices = [
        name.removesuffix(".weight")
        for name, info in checkpoint.tensors.items()
        if len(info.shape) == 2 and name.endswith(".weight") and name not in fits
    ]
    return fits, [name for name in matrices if "embed_tokens" not in name]


def write_awq(
    checkpoint: Checkpoint,
    source: Source,
    sizes: Mapping[str, int],
    group_size: int,
    symmetric: bool,
    out: Path,
) -> None:
    """Writes the checkpoint into the folder `out`. sizes: of `tensors_to_quantise`.

    Raises InputError where nothing fits the layout.
    """
    fits, kept = awq_tensors(checkpoint, sizes, group_size)
    if not fits:
        raise InputError(
            f"no weight has groups of {group_size} and a multiple of 8 output features, which is "
            "what the AutoAWQ layout holds; give another --group-size"
        )
    index: dict[str, str] = {}
    total = 0
    files: list[str] = []
    for shard in _shards(checkpoint, source, fits, symmetric):
        name = f"model-{len(files) + 1:05}.safetensors"
        files.append(name)
        save_file(shard, out / name, {"format": "pt"})
        index |= dict.fromkeys(shard, name)
        total += sum(tensor.nbytes for tensor in shard.values())
        del shard  # before the next one is made
    (out / INDEX_FILE).write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
    )
    config: dict[str, Any] = read_json(checkpoint.path / "config.json")
    config["quantization_config"] = awq_config(group_size, kept)
    config["dtype"] = str(DTYPE).removeprefix("torch.")
    (out / "config.json").write_text(json.dumps(config, indent=2))
    copy_tokenizer(checkpoint.path, out)


def _shards(
    checkpoint: Checkpoint, source: Source, fits: Mapping[str, int], symmetric: bool
) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name in checkpoint.tensors:
        for stored, tensor in _tensors(checkpoint, source, fits, symmetric, name):
            shard[stored] = tensor
            size += tensor.nbytes
        if size >= SHARD_BYTES:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard


def _tensors(
    checkpoint: Checkpoint, source: Source, fits: Mapping[str, int], symmetric: bool, name: str
) -> Iterator[tuple[str, Tensor]]:
    if name in fits:
        module = name.removesuffix(".weight")
        packed = source.int4(name, fits[name], symmetric, DTYPE)
        yield from ((f"{module}.{part}", t) for part, t in to_awq(packed, module).items())
    elif checkpoint.tensors[name].dtype == "F32" and len(checkpoint.tensors[name].shape) < 2:
        yield name, source.read(name).contiguous()  # routers' biases are fp32 for a reason
    elif not name.endswith(SCALE_SUFFIX):  # FP8 weights come with their scales applied
        yield name, source.read(name).to(DTYPE).contiguous()
