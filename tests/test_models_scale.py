"""The published DeepSeek-V3: 671 billion parameters, 163 files, about 91,000 tensors. Nothing of
the weights exists here: the files are headers over holes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from shutil import copyfile

import pytest
import torch

from seekforge.kernels.errors import CheckpointError
from seekforge.models.checkpoint import open_checkpoint, tensors_for_parameter
from seekforge.models.config import parse_config
from seekforge.models.module import build_module

CONFIGS = Path(__file__).parent / "configs"
SHARDS = 163
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}


def published_tensors(config_file: Path) -> dict[str, tuple[str, list[int]]]:
    """Name -> dtype and shape, as the published FP8 checkpoint stores them."""
    config = parse_config(config_file)
    tensors: dict[str, tuple[str, list[int]]] = {}
    for fqn, tensor in build_module(config, torch.bfloat16).state_dict().items():
        module, _, leaf = fqn.rpartition(".experts.")
        shape = list(tensor.shape)
        if module:
            experts, rows, columns = shape
            parts = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",)
            names = [f"{module}.experts.{i}.{p}.weight" for i in range(experts) for p in parts]
            shape = [rows // len(parts), columns]
        else:
            names = [fqn]
        for name in names:
            if name.endswith("_proj.weight") or "kv_a_proj" in name:
                tensors[name] = ("F8_E4M3", shape)
                tensors[name + "_scale_inv"] = ("F32", [-(-size // 128) for size in shape])
            else:
                tensors[name] = (DTYPES[tensor.dtype], shape)
    return tensors


def write_holes(folder: Path, tensors: dict[str, tuple[str, list[int]]], shards: int) -> None:
    size_of = {"F8_E4M3": 1, "BF16": 2, "F32": 4}
    weight_map: dict[str, str] = {}
    names = list(tensors)
    for index in range(shards):
        file = f"model-{index + 1:05}-of-{shards:06}.safetensors"
        header: dict[str, object] = {}
        offset = 0
        for name in names[index::shards]:
            dtype, shape = tensors[name]
            end = offset + math.prod(shape) * size_of[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
            weight_map[name] = file
            offset = end
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + offset)
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_opening_deepseek_v3(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    copyfile(CONFIGS / "deepseek-v3.json", config)
    tensors = published_tensors(config)
    attention, norms = 2 * 5, 4  # each projection with its scales
    moe = 2 * 3 * 256 + 2 * 3 + 2  # experts, shared expert, router and its bias
    assert len(tensors) == 61 * (attention + norms) + 3 * (2 * 3) + 58 * moe + 3
    write_holes(tmp_path, tensors, SHARDS)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.warnings == () and checkpoint.weight_block == (128, 128)
    names = tensors_for_parameter(checkpoint, "model.layers.60.mlp.experts.gate_up_proj")
    assert (len(names), names[-1]) == (512, "model.layers.60.mlp.experts.255.up_proj.weight")
    del tensors[names[7]], tensors[names[7] + "_scale_inv"]
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    write_holes(tmp_path, tensors, SHARDS)
    with pytest.raises(CheckpointError, match=rf"1 tensors are in no file.*: {names[7]}\."):
        open_checkpoint(tmp_path)
