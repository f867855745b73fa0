"""A Hugging Face checkpoint directory, opened and proven complete before anything is compiled.

In: a folder with config.json, safetensors and, where it has them, generation_config.json and a
tokenizer. Out: a `Checkpoint`, whose tensors are memory-mapped one at a time. transformers fills a
missing tensor with random values and carries on, so completeness is checked here: every parameter
of its module must come from the files or be tied by the configuration.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoTokenizer, PreTrainedConfig

from seekforge.kernels.errors import CheckpointError
from seekforge.kernels.int4 import SYMMETRIC_ZERO, Int4, quantise
from seekforge.kernels.int4 import dequantise as dequantise_int4
from seekforge.models.config import read_config, read_json, read_quantization
from seekforge.models.content import content_digests
from seekforge.models.fp8 import FP8, SCALE_SUFFIX, Block, check_scale, dequantise
from seekforge.models.module import build_module
from seekforge.models.quantized import OPTIONAL, PARTS, read_int4
from seekforge.models.quantized_config import QuantConfig
from seekforge.models.shards import Shard, TensorInfo, read_shards, unindexed_files
from seekforge.models.spec import ModelSpec

FLOATS = ("F32", "F16", "BF16")
INT4 = "INT4"  # of a weight that is stored in parts (models/quantized.py)
# Stored by old releases of transformers, computed from the configuration by newer ones.
COMPUTED_SUFFIXES = (".rotary_emb.inv_freq",)
# One tensor under two names where config.tie_word_embeddings holds: the stored one serves both.
TIED = {
    "lm_head.weight": "model.embed_tokens.weight",
    "model.embed_tokens.weight": "lm_head.weight",
}
# transformers stacks the experts of a layer; published checkpoints hold them one by one.
EXPERTS = {
    "gate_up_proj": ("gate_proj.weight", "up_proj.weight"),
    "down_proj": ("down_proj.weight",),
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
SHOWN = 8  # names listed in one message


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint. `config` holds what is true of the files: a tied configuration whose
    stored lm_head differs from the embedding is untied here. `warnings` are for the user's eyes:
    tensors nobody asked for, a contradiction in the configuration. `notes` are harmless.
    `weight_block` is the size of a block of FP8 weights, None where no weight is FP8; `quant` the
    layout of INT4 weights, which appear in `tensors` as one of dtype INT4 under the plain name."""

    path: Path
    config: PreTrainedConfig
    generation_config: Mapping[str, Any] | None
    spec: ModelSpec
    shards: tuple[Shard, ...]
    tensors: Mapping[str, TensorInfo]
    weight_block: Block | None
    quant: QuantConfig | None
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    def read(self, name: str) -> torch.Tensor:
        """The tensor in its stored dtype, memory-mapped: pages are read when touched. FP8 weights
        are read, multiplied with their scales and returned as float32; INT4 weights likewise."""
        if self.tensors[name].dtype == INT4:
            return dequantise_int4(self._stored_int4(name), torch.float32)
        tensor = _read(self.tensors[name].file, name)
        if self.tensors[name].dtype != FP8:
            return tensor
        assert self.weight_block is not None
        return dequantise(tensor, self.read(name + SCALE_SUFFIX), self.weight_block)

    def int4(self, name: str, group_size: int, symmetric: bool, dtype: torch.dtype) -> Int4:
        """The tensor in INT4 (kernels/int4.py), scales in `dtype`: as it is stored, where it is
        stored so, else rounded to nearest."""
        if self.tensors[name].dtype != INT4:
            return quantise(self.read(name).to(dtype), group_size, symmetric)
        stored = self._stored_int4(name)
        zeros = stored.zeros
        assert stored.group_size == group_size and (zeros is None or not symmetric), name
        if zeros is None and not symmetric:
            zeros = torch.full_like(stored.scales, SYMMETRIC_ZERO, dtype=torch.uint8)
        return Int4(stored.qweight, stored.scales.to(dtype), zeros)

    def _stored_int4(self, name: str) -> Int4:
        assert self.quant is not None
        module = name.removesuffix(".weight")
        found = {part: f"{module}.{part}" for part in PARTS[self.quant.method]}
        parts = {
            part: _read(self.tensors[stored].file, stored)
            for part, stored in found.items()
            if stored in self.tensors
        }
        return read_int4(self.quant, module, parts)

    def digest(self) -> str:
        """sha256 over config.json and every shard's name and content: equal digests mean equal
        tensors, wherever the folder lies. Files are read once and then remembered."""
        digest = hashlib.sha256((self.path / "config.json").read_bytes())
        files = [shard.file for shard in self.shards]
        for file, content in zip(files, content_digests(files), strict=True):
            digest.update(f"{file.name} {content}\n".encode())
        return digest.hexdigest()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text: generation_config.json's, else config.json's, else none."""
        ids = self._token_id("eos_token_id")
        return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a text, from the same two files in the same order."""
        found: int | None = self._token_id("bos_token_id")
        return found

    def _token_id(self, key: str) -> Any:
        generation = (self.generation_config or {}).get(key)
        return generation if generation is not None else getattr(self.config, key, None)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens and checks a checkpoint directory; reads no weights, except a table that may be tied.

    Raises `CheckpointError` for anything missing, truncated, contradictory or not supported.
    """
    path = Path(path)
    config = read_config(path)
    generation_config = None
    if (path / "generation_config.json").is_file():
        generation_config = read_json(path / "generation_config.json")
    spec = ModelSpec.from_config(config)
    shards = tuple(read_shards(path))
    tensors = {name: info for shard in shards for name, info in shard.tensors.items()}
    contradictions = _untie(config, tensors)
    if contradictions:
        spec = ModelSpec.from_config(config)
    quantization = read_quantization(path / "config.json")
    quant = quantization if isinstance(quantization, QuantConfig) else None
    block = None if isinstance(quantization, QuantConfig) else quantization
    if quant is not None:
        tensors |= _int4_weights(quant, tensors)
    checkpoint = Checkpoint(
        path, config, generation_config, spec, shards, tensors, block, quant, (), ()
    )
    notes, warnings = check_complete(checkpoint)
    notes += check_vocabulary(path, spec.vocab_size)
    return replace(checkpoint, notes=(*notes,), warnings=(*contradictions, *warnings))


def check_complete(checkpoint: Checkpoint) -> tuple[list[str], list[str]]:
    """Holds the stored names, shapes and dtypes against transformers' module.

    Returns notes and warnings about tensors that are stored but not used. Raises `CheckpointError`
    that names what is missing or of another shape or dtype.
    """
    module = build_module(checkpoint.config, torch.float32)
    used: set[str] = set()
    missing: list[str] = []
    for fqn, parameter in module.state_dict().items():
        names = _stored_names(checkpoint, fqn)
        used.update(names)
        for name in names:
            if name not in checkpoint.tensors:
                missing.append(name)
                continue
            # A stacked parameter [experts, parts * rows, columns] of tensors [rows, columns].
            shape = tuple(parameter.shape)
            if len(shape) == 3 and name != fqn:
                shape = (shape[0] * shape[1] // len(names), shape[2])
            used.update(_check_tensor(checkpoint, name, shape))
    stray = [file.name for file in unindexed_files(checkpoint.path, checkpoint.shards)]
    if missing:
        hint = f" Files the index does not name were not read: {_some(stray)}." if stray else ""
        raise CheckpointError(
            f"{checkpoint.path}: {len(missing)} tensors are in no file and not tied by config.json "
            f"(tie_word_embeddings is {checkpoint.config.tie_word_embeddings}): {_some(missing)}."
            f"{hint} Fetch the checkpoint again."
        )
    unused = sorted(checkpoint.tensors.keys() - used)
    computed = [name for name in unused if name.endswith(COMPUTED_SUFFIXES)]
    predicting = [name for name in unused if _is_prediction(checkpoint.config, name)]
    unknown = sorted(set(unused) - {*computed, *predicting})
    notes, warnings = [], []
    if computed:
        notes.append(f"{len(computed)} stored tensors are computed instead: {_some(computed)}")
    if predicting:
        notes.append(
            f"{len(predicting)} stored tensors of layers that predict further tokens (MTP) are "
            f"skipped: {_some(predicting)}"
        )
    if stray:
        notes.append(f"files the index does not name are ignored: {_some(stray)}")
    if unknown:
        warnings.append(f"{len(unknown)} stored tensors are unknown to the model: {_some(unknown)}")
    return notes, warnings


def _check_tensor(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> list[str]:
    """Shape and dtype of a stored tensor; returns the names of the other tensors it needs."""
    info = checkpoint.tensors[name]
    if info.shape != shape:
        raise CheckpointError(
            f"{info.file}: {name} has shape {list(info.shape)}, the configuration asks for "
            f"{list(shape)}. config.json and weights belong to different models."
        )
    if info.dtype == INT4:
        assert checkpoint.quant is not None
        names = [f"{name.removesuffix('weight')}{p}" for p in PARTS[checkpoint.quant.method]]
        missing = [
            part
            for part in names
            if part not in checkpoint.tensors and part.rpartition(".")[2] not in OPTIONAL
        ]
        if missing:
            raise CheckpointError(
                f"{info.file}: {name} is stored as INT4, but {', '.join(missing)} is in no file. "
                "Fetch the checkpoint again."
            )
        return [part for part in names if part in checkpoint.tensors]
    if info.dtype == FP8 and len(shape) >= 2 and checkpoint.weight_block is not None:
        return [check_scale(checkpoint.tensors, name, checkpoint.weight_block)]
    if info.dtype not in FLOATS:
        raise CheckpointError(
            f"{info.file}: {name} is stored as {info.dtype}; supported are {', '.join(FLOATS)}, "
            f"and for matrices {FP8} with a quantization_config in config.json. Use the "
            "unquantised checkpoint."
        )
    return []


def _int4_weights(quant: QuantConfig, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The weights that INT4 parts stand for, under their plain names and in their plain shapes."""
    first, found = PARTS[quant.method][0], {}
    for name, info in tensors.items():
        if not name.endswith(f".{first}") or len(info.shape) != 2:
            continue
        if not quant.quantises(name.removesuffix(f".{first}")):
            raise CheckpointError(
                f"{info.file}: {name} is stored, but config.json lists the module under "
                "modules_to_not_convert (ignore). They belong to different checkpoints."
            )
        a, b = info.shape
        shape = {"awq": (8 * b, a), "gptq": (b, 8 * a), "gptq_v2": (b, 8 * a)}.get(
            quant.method, (a, 8 * b)
        )
        found[f"{name.removesuffix(first)}weight"] = replace(info, dtype=INT4, shape=shape)
    return found


def tensors_for_parameter(checkpoint: Checkpoint, fqn: str) -> tuple[str, ...]:
    """The stored tensors that a parameter or buffer of the exported module is made of: concatenated
    along dim 0 and viewed in its shape they are the parameter."""
    names = _stored_names(checkpoint, fqn)
    missing = [name for name in names if name not in checkpoint.tensors]
    assert not missing, f"{missing} in no file; open_checkpoint should have refused"
    return names


def check_vocabulary(path: Path, vocab_size: int) -> list[str]:
    """Every id the tokenizer can produce must have an embedding row; returns notes.

    A vocabulary wider than the tokenizer is ordinary padding.
    """
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        return [f"{path} has no tokenizer: the engine will take token ids only"]
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
        vocabulary = tokenizer.get_vocab()
    except Exception as error:  # transformers and tokenizers raise many kinds
        raise CheckpointError(f"{path}: its tokenizer cannot be read: {error}") from error
    token, largest = max(vocabulary.items(), key=lambda item: item[1], default=("", -1))
    if largest >= vocab_size:
        raise CheckpointError(
            f"{path}: tokenizer and model do not match: token {token!r} has id {largest}, the "
            f"embedding has {vocab_size} rows (vocab_size). Use the tokenizer of this checkpoint."
        )
    return []


def _stored_names(checkpoint: Checkpoint, fqn: str) -> tuple[str, ...]:
    """Where `fqn` is stored, or would be: plain, under its tied name, or one tensor an expert."""
    if fqn in checkpoint.tensors:
        return (fqn,)
    other = TIED.get(fqn) if checkpoint.config.tie_word_embeddings else None
    if other is not None and other in checkpoint.tensors:
        return (other,)
    module, _, leaf = fqn.rpartition(".experts.")
    if leaf in EXPERTS:
        experts = range(checkpoint.spec.num_experts)
        return tuple(f"{module}.experts.{i}.{part}" for i in experts for part in EXPERTS[leaf])
    return (fqn,)


def _is_prediction(config: PreTrainedConfig, name: str) -> bool:
    """Whether a tensor is of a multi-token prediction layer, stored behind the model's own layers:
    `model.layers.61.eh_proj.weight` in a model with 61 layers."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    first, count = config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", 0)
    return match is not None and first <= int(match[1]) < first + count


def _read(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, framework="pt") as shard:
        tensor: torch.Tensor = shard.get_tensor(name)
    return tensor


def _untie(config: PreTrainedConfig, tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Unties a configuration whose files hold two different tables, as transformers does."""
    pair = [name for name in TIED if name in tensors]
    if not config.tie_word_embeddings or len(pair) < 2:
        return []
    head, embedding = (_read(tensors[name].file, name) for name in pair)
    if head.dtype == embedding.dtype and torch.equal(head, embedding):
        return []
    config.tie_word_embeddings = False
    return [
        "config.json ties lm_head to the embedding, but a different lm_head.weight is stored: the "
        "stored one is used, as transformers does. Set tie_word_embeddings to false in config.json."
    ]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
