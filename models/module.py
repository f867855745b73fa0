"""transformers' own modules: without weights for export, and with weights as the oracle.

In: a configuration or a checkpoint directory. Out: an `nn.Module` in eval mode without gradients.
Knows nothing about graphs or engines.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from seekforge.models.config import read_weight_block
from seekforge.models.fp8 import write_dequantised
from seekforge.models.shards import INDEX_FILE, SINGLE_FILE, indexed_files


def build_module(config: PreTrainedConfig, dtype: torch.dtype) -> nn.Module:
    """The model's module with every parameter on the meta device, whatever its size. Where
    transformers loads a tensor as float32 whatever the dtype (routers), it is float32 here.

    Buffers that no checkpoint stores (the RoPE frequencies) are real, float32 and on the CPU: they
    are computed from the configuration, never from files. The attention implementation is the one
    named in `config._attn_implementation`.
    """
    with torch.device("meta"):
        module: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    for name, part in list(module.named_modules()):
        computed = part._non_persistent_buffers_set
        if computed and any(part.get_buffer(buffer).is_meta for buffer in computed):
            parent, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(parent), leaf, type(part)(config=config))
    # transformers 5.17 does so only when it loads weights: V3's bias would be rounded to bf16.
    kept = getattr(module, "_keep_in_fp32_modules_strict", None) or ()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if any(part in name for part in kept):
            tensor.data = tensor.data.float()
    return module.eval().requires_grad_(False)


def count_parameters(config: PreTrainedConfig) -> int:
    """Elements of all parameters; a tied embedding counts once. Allocates nothing."""
    with torch.device("meta"):
        module: nn.Module = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return sum(parameter.numel() for parameter in module.parameters())


def load_eager(
    path: str | Path, dtype: torch.dtype, attn_implementation: str = "eager"
) -> nn.Module:
    """The checkpoint as transformers itself loads and computes it, on the CPU: the oracle.

    It reads the files with its own code, not ours. Open the checkpoint with `open_checkpoint`
    first: transformers fills missing tensors with random values and only prints a report. FP8
    weights are the exception: it is given a temporary copy of the checkpoint with plain weights,
    which takes 2 (float32: 4) bytes a parameter of disk.
    """
    path = Path(path)
    block = read_weight_block(path / "config.json")
    stray = (path / INDEX_FILE).is_file() and (path / SINGLE_FILE).is_file()
    if block is None and not stray:
        return _load(path, dtype, attn_implementation)
    with tempfile.TemporaryDirectory(prefix="seekforge-") as folder:
        if block is not None:
            # transformers' own dequantisation wants sizes that the number of blocks divides: it
            # refuses the 576 rows of V3's kv_a_proj_with_mqa (5 blocks).
            write_dequantised(path, Path(folder), block, dtype)
        else:
            # transformers prefers a left-over model.safetensors to the index: show it only what
            # counts.
            for file in [*path.glob("*.json"), *indexed_files(path)]:
                (Path(folder) / file.name).symlink_to(file.resolve())
        return _load(Path(folder), dtype, attn_implementation)


def _load(path: Path, dtype: torch.dtype, attn_implementation: str) -> nn.Module:
    module: nn.Module = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation=attn_implementation, local_files_only=True
    )
    return module.eval().requires_grad_(False)
