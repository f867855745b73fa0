"""Tiny checkpoints, made on the spot: `tiny_checkpoint("qwen3", num_hidden_layers=1) -> Path`.

Weights are drawn with standard deviation 0.5 (transformers' 0.02 would hide errors under the
tolerance: logits reach about 8 this way), biases with 1, norm weights around 1. The tokenizer is a
real byte-level BPE: 256 bytes, 3 special tokens, 21 merges; the model's vocabulary is 13 ids wider.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

COMMON = {
    "vocab_size": 293,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"hidden_size": 40, "num_key_value_heads": 1, "head_dim": 16},  # 4 * 16 != 40
}
SPECIAL_TOKENS = ["<|begin|>", "<|end|>", "<|pad|>"]  # ids 0, 1, 2
TOKENIZER_SIZE = 280
TEXT = ["the capital of France is Paris and the capital of Spain is Madrid", "one then another"]


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Factory `(family, **config overrides) -> Path`, one folder for each set of arguments.

    Do not change the folder: it is shared (copy it with shutil.copytree). A vocab_size below 280
    leaves the tokenizer out.
    """
    made: dict[str, Path] = {}

    def make(family: str, **overrides: Any) -> Path:
        key = json.dumps([family, overrides], sort_keys=True)
        if key not in made:
            made[key] = tmp_path_factory.mktemp(family)
            write_checkpoint(made[key], family, overrides)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_model(tiny_checkpoint: Callable[..., Path]) -> Callable[..., nn.Module]:
    """Factory `(family, **config overrides) -> nn.Module`: transformers eager, fp32, eval, a fresh
    module in each call with the weights of `tiny_checkpoint` for the same arguments."""

    def make(family: str, **overrides: Any) -> nn.Module:
        path = tiny_checkpoint(family, **overrides)
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        )
        return model.eval().requires_grad_(False)

    return make


def write_checkpoint(folder: Path, family: str, overrides: dict[str, Any]) -> None:
    config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family], **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise if name.endswith("bias") else 1 + 0.1 * noise)
    model.save_pretrained(folder)
    if config.vocab_size >= TOKENIZER_SIZE:
        byte_level_tokenizer().save_pretrained(folder)


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    begin, end, pad = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token=begin, eos_token=end, pad_token=pad
    )
