"""A GGUF file turned into an ordinary checkpoint directory: float32 safetensors and the tokenizer.

transformers reads the file; about 17 s for 135M parameters on two cores, of which most goes into
parsing the vocabulary three times (configuration, weights, tokenizer). The whole model is in memory
while it is converted: 4 bytes a parameter. Knows nothing about where files come from.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from shutil import copyfile

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
)

from seekforge.kernels.errors import CheckpointError, InputError
from seekforge.models.checkpoint import open_checkpoint
from seekforge.models.spec import ModelSpec

README = """Converted by seekforge from {name} ({size} bytes).

The weights are float32 here, but hold no more than that file did: where it is quantised (Q4_1 in a
file's name means 4 bits a weight) they carry its rounding. Accuracy figures for this folder are
relative to these weights, not to the model that the GGUF file was made from.
"""


def convert_gguf(file: Path, target: Path, licences: Iterable[Path] = ()) -> Path:
    """Writes `target`, which appears complete or not at all, and opens as a checkpoint.

    Raises `CheckpointError` if `file` is no GGUF file or of an architecture that is not supported,
    `InputError` if the parent of `target` cannot be written.
    """
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise CheckpointError(f"{file} is no GGUF file: it does not begin with 'GGUF'.")
    config = _read_config(file)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".converting-") as temporary:
            folder = Path(temporary) / target.name
            _write(file, config, folder)
            for licence in licences:
                copyfile(licence, folder / licence.name)
            open_checkpoint(folder)
            try:
                folder.rename(target)
            except OSError:
                if not target.is_dir():  # otherwise another process was faster
                    raise
    except OSError as error:
        raise InputError(
            f"cannot write the converted checkpoint to {target}: {error}. Free the space, or set "
            "XDG_CACHE_HOME to a folder that can be written."
        ) from error
    return target


def _read_config(file: Path) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    except Exception as error:  # transformers and gguf raise many kinds
        raise CheckpointError(f"{file}: transformers cannot read it: {error}") from error
    ModelSpec.from_config(config)
    return config


def _write(file: Path, config: PreTrainedConfig, folder: Path) -> None:
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, config=config, dtype=torch.float32
        )
    except Exception as error:
        raise CheckpointError(f"{file}: transformers cannot read it: {error}") from error
    # The weights are plain float32 by now; without this save_pretrained refuses ("quantized").
    vars(model).update(hf_quantizer=None, is_quantized=False)
    for leftover in ("quantization_config", "_model_name_or_path"):
        vars(model.config).pop(leftover, None)
    ids = {key: getattr(config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**ids)  # type: ignore[no-untyped-call]
    tokenizer.model_max_length = config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.txt").write_text(
        README.format(name=file.name, size=file.stat().st_size), encoding="utf-8"
    )
