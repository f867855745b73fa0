"""FP8 weights with one scale a block, as DeepSeek publishes V3 and R1, read as float32.

Format (`quant_method` "fp8" with a `weight_block_size`): a weight [..., rows, columns] in E4M3, and
beside it `<name>_scale_inv` [..., ceil(rows / 128), ceil(columns / 128)]; despite its name the
scale multiplies: value = stored * scale of its block. The last blocks are cut off where a size is
no multiple of 128, such as the 576 rows of V3's kv_a_proj_with_mqa. Knows nothing about models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from shutil import copyfile
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from seekforge.kernels.errors import CheckpointError
from seekforge.models.shards import INDEX_FILE, TensorInfo, read_shards

FP8 = "F8_E4M3"  # as safetensors spells the dtype
SCALE_SUFFIX = "_scale_inv"
SCALE_DTYPES = ("F32", "F16", "BF16")

Block = tuple[int, int]


def read_block(quantization: Mapping[str, Any], file: Path) -> Block:
    """Rows and columns of a block, from the quantization_config of `file` (config.json).

    Raises `CheckpointError` for scales of another kind than one a block and E4M3 weight.
    """
    block = quantization.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int for n in block)):
        raise CheckpointError(
            f"{file}: quantization_config has weight_block_size {block!r}, expected two numbers "
            "such as [128, 128]: FP8 weights are read with one scale a block only."
        )
    if min(block) < 1:
        raise CheckpointError(f"{file}: weight_block_size {block} has a size below 1. Correct it.")
    kinds = {"fmt": "e4m3", "activation_scheme": "dynamic"}
    for key, only in kinds.items():
        if (value := quantization.get(key, only)) != only:
            raise CheckpointError(
                f"{file}: quantization_config has {key} {value!r}; FP8 weights are read with "
                f"{only!r} only."
            )
    return block[0], block[1]


def check_scale(tensors: Mapping[str, TensorInfo], name: str, block: Block) -> str:
    """The name of the scales of the FP8 tensor `name`; raises `CheckpointError` if they are missing
    or do not cover it."""
    info, scale = tensors[name], name + SCALE_SUFFIX
    if scale not in tensors:
        raise CheckpointError(
            f"{info.file}: {name} is stored as {info.dtype} without its scales, {scale}: its "
            "values cannot be known. Fetch the checkpoint again."
        )
    found = tensors[scale]
    rows, columns = info.shape[-2:]
    grid = (*info.shape[:-2], -(-rows // block[0]), -(-columns // block[1]))
    if found.shape != grid or found.dtype not in SCALE_DTYPES:
        raise CheckpointError(
            f"{found.file}: {scale} is {found.dtype} {list(found.shape)}, expected a float "
            f"{list(grid)}: one for each block of {block[0]} x {block[1]} in {list(info.shape)}. "
            "Correct weight_block_size in config.json, or fetch the checkpoint again."
        )
    return scale


def dequantise(weight: Tensor, scale: Tensor, block: Block) -> Tensor:
    """weight [..., rows, columns] E4M3, scale [..., row blocks, column blocks] -> float32.

    In memory at once: the result, and one row of blocks.
    """
    rows, columns = block
    values = weight.float()
    scale = scale.float()
    for i in range(scale.shape[-2]):
        a_row = scale[..., i, None, :].repeat_interleave(columns, dim=-1)[..., : values.shape[-1]]
        values[..., i * rows : (i + 1) * rows, :].mul_(a_row)
    return values


def write_dequantised(folder: Path, target: Path, block: Block, dtype: torch.dtype) -> None:
    """Writes a copy of an FP8 checkpoint into `target` with plain weights of `dtype`, shard by
    shard; scales are left out."""
    shards = read_shards(folder)
    tensors = {name: info for shard in shards for name, info in shard.tensors.items()}
    for file in folder.glob("*.json"):
        copyfile(file, target / file.name)
    config = json.loads((folder / "config.json").read_bytes())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    weight_map = {}
    for shard in shards:
        part = {}
        for name, info in shard.tensors.items():
            if name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) in tensors:
                continue
            part[name] = _read(info.file, name)
            if info.dtype == FP8:
                scale = check_scale(tensors, name, block)
                values = dequantise(part[name], _read(tensors[scale].file, scale), block)
                part[name] = values.to(dtype)
            weight_map[name] = shard.file.name
        save_file(part, target / shard.file.name, metadata={"format": "pt"})
    (target / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _read(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as shard:
        tensor: Tensor = shard.get_tensor(name)
    return tensor
