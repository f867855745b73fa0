"""Perplexity of a text: what a model, eager or compiled, loses on real tokens.

The text's documents (separated by form feeds) become one stream of tokens, each document ended by
the model's end token where it has one; the stream is cut into windows, and each window is scored by
itself. Perplexity is exp of the mean negative log-likelihood of every token but a window's first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seekforge.kernels.errors import InputError

WINDOW = 512  # tokens of a text that are seen together
Score = Callable[[list[int]], Tensor]  # n token ids -> logits [n, vocab]


def read_text(path: Path) -> str:
    """The file's text; raises InputError where it can't be read as UTF-8 or is empty."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as text ({error})") from None
    if not text.strip():
        raise InputError(f"{path}: it holds no text; give a file with some thousand words")
    return text


def text_tokens(tokenizer: Any, text: str, end: int | None) -> list[int]:
    """Token ids of all documents of `text`, one behind the other, `end` after each."""
    stream: list[int] = []
    for document in text.split("\f"):
        if document.strip():
            stream += tokenizer(document.strip("\n")).input_ids
            stream += [] if end is None else [end]
    return stream


def windows(tokens: Sequence[int], length: int, limit: int | None = None) -> Iterator[list[int]]:
    """Consecutive windows of `length` tokens, of the first `limit`; a rest of one is left out.

    Raises InputError where that leaves fewer than two tokens.
    """
    if limit is not None and limit < 2:
        raise InputError(f"--text-tokens {limit}: at least 2 were expected")
    tokens = tokens[:limit]
    if len(tokens) < 2:
        raise InputError("the text has fewer than two tokens; a longer one is needed")
    for start in range(0, len(tokens), length):
        window = list(tokens[start : start + length])
        if len(window) > 1:
            yield window


def perplexity(score: Score, cut: Sequence[list[int]]) -> tuple[float, int]:
    """(perplexity, tokens predicted) over windows; NaN in any logits gives NaN."""
    total, count = 0.0, 0
    for window in cut:
        loss = torch.nn.functional.cross_entropy(
            score(window)[:-1].float(), torch.tensor(window[1:]), reduction="sum"
        )
        total += float(loss)
        count += len(window) - 1
    if not count:
        raise InputError("the text has fewer than two tokens; a longer one is needed")
    return math.exp(total / count) if total == total else math.nan, count
