"""Texts as tokens that every engine takes, and eager's continuations of them.

In: a checkpoint with its tokenizer, the engines and how many tokens they will add. Knows nothing of
what is done with the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import AutoTokenizer

from seekforge.compile.compare_judge import eager_texts
from seekforge.compile.perplexity import WINDOW, text_tokens, windows
from seekforge.compile.prompts import Prompt
from seekforge.kernels.errors import InputError
from seekforge.models.checkpoint import Checkpoint
from seekforge.runtime.llm import LLM
from seekforge.runtime.prompt import chat_ids


class Speaker:
    """Speaks as engines do: with their end tokens, and never an id the tokenizer does not know."""

    def __init__(self, checkpoint: Checkpoint, llms: Sequence[LLM], max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.cut = 0  # prompts so far that were too long
        self.tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint.path, local_files_only=True)
        lengths = [llm.max_len for llm in llms]
        self.max_len = min(lengths or [checkpoint.spec.max_position_embeddings])
        eos, vocab_size = checkpoint.eos_token_ids, checkpoint.spec.vocab_size
        if llms:
            manifest = llms[0].manifest
            eos, vocab_size = manifest.generation.eos_token_ids, manifest.vocab_size
        self.experts = checkpoint.spec.num_experts > 0
        known = set(self.tokenizer.get_vocab().values())
        self.end_tokens = list(eos)
        self.unknown = [i for i in range(vocab_size) if i not in known]

    def tokens(self, prompt: Prompt) -> list[int]:
        """A prompt cut so that it and max_tokens more fit every engine."""
        room = self.max_len - self.max_tokens
        if room < 1:
            raise InputError(f"max_tokens {self.max_tokens} leaves no room for a prompt; lower it")
        if isinstance(prompt, str):
            tokens = list(self.tokenizer(prompt).input_ids)
        else:
            tokens = chat_ids(self.tokenizer, prompt)
        self.cut += len(tokens) > room
        return tokens[:room]

    def windows(self, text: str, limit: int | None) -> list[list[int]]:
        """Windows of the text's first `limit` tokens, for perplexities."""
        stream = text_tokens(self.tokenizer, text, self.end_tokens[0] if self.end_tokens else None)
        return list(windows(stream, min(WINDOW, self.max_len), limit))

    def continuations(self, model: nn.Module, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """transformers' own greedy ones."""
        return eager_texts(model, prompts, self.max_tokens, self.end_tokens, self.unknown)
