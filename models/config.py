"""config.json of a checkpoint directory, refused by name where it cannot be compiled.

In: a folder. Out: transformers' configuration object. Reads no weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from seekforge.kernels.errors import CheckpointError
from seekforge.models.families import family_of
from seekforge.models.fp8 import Block, read_block
from seekforge.models.quantized_config import QuantConfig, read_quant_config


def read_config(folder: Path) -> PreTrainedConfig:
    """`parse_config` of the config.json in a folder; raises `CheckpointError` if there is none."""
    file = folder / "config.json"
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a directory. Give a checkpoint directory (config.json, "
            "*.safetensors, tokenizer), a .gguf file, or 'default'."
        )
    if not file.is_file():
        raise CheckpointError(
            f"{folder} is no checkpoint: it has no config.json. Give the directory that holds it."
        )
    return parse_config(file)


def parse_config(file: Path) -> PreTrainedConfig:
    """A config.json as transformers understands it; the architecture is checked first, by name.

    Raises `CheckpointError` for an unreadable file, an unknown architecture, a model without a
    language-model head, weights quantised in a way that is not read, and what transformers itself
    refuses. What the file says about quantised weights is left out: it is true of the stored
    tensors (`read_quantization`), not of the module that is built from the configuration.
    """
    raw = read_json(file)
    family_of(raw.get("model_type"))
    architectures = raw.get("architectures") or []
    if architectures and not any(name.endswith("ForCausalLM") for name in architectures):
        raise CheckpointError(
            f"{file}: architectures {architectures} is no language model with a head; expected a "
            "name that ends in ForCausalLM. Use the checkpoint of the causal language model."
        )
    read_quantization(file)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            file, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises many kinds, its strict validation others
        raise CheckpointError(f"{file}: transformers refuses it: {error}") from error
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def read_quantization(file: Path) -> Block | QuantConfig | None:
    """What a config.json says about its stored weights: rows and columns of the blocks of FP8
    weights, the layout of INT4 weights, or None for weights that are not quantised.

    Raises `CheckpointError` for every other method of quantisation.
    """
    quantization = read_json(file).get("quantization_config")
    if not quantization:
        return None
    if quantization.get("quant_method") == "fp8":
        return read_block(quantization, file)
    try:
        return read_quant_config(quantization)
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from None


def read_weight_block(file: Path) -> Block | None:
    """The blocks of FP8 weights; None where weights are not FP8."""
    found = read_quantization(file)
    return None if isinstance(found, QuantConfig) else found


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; raises `CheckpointError` that names the file."""
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{file} is not readable JSON: {error}. Fetch it again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{file} holds a {type(content).__name__}, expected an object. Fetch it again."
        )
    return content
