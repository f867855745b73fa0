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


def read_config(folder: Path) -> PreTrainedConfig:
    """config.json as transformers understands it; the architecture is checked first, by name.

    Raises `CheckpointError` for a folder without a readable one, an unknown architecture, a model
    without a language-model head, quantised weights, and what transformers itself refuses.
    """
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
    raw = read_json(file)
    family_of(raw.get("model_type"))
    architectures = raw.get("architectures") or []
    if architectures and not any(name.endswith("ForCausalLM") for name in architectures):
        raise CheckpointError(
            f"{file}: architectures {architectures} is no language model with a head; expected a "
            "name that ends in ForCausalLM. Use the checkpoint of the causal language model."
        )
    if quantization := raw.get("quantization_config"):
        raise CheckpointError(
            f"{file}: weights quantised with {quantization.get('quant_method')!r} cannot be "
            "read yet. Use the unquantised checkpoint."
        )
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises many kinds, its strict validation others
        raise CheckpointError(f"{file}: transformers refuses it: {error}") from error
    return config


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
