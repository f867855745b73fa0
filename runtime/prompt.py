"""What a user asks -> token ids the engine can take, or one `InputError` that says why not.

Text goes through the tokenizer, messages through its chat template, ids are checked. Nothing here
knows the engine but the size of its vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from seekforge.kernels.errors import InputError

Prompt = str | Sequence[int]


def prompt_ids(tokenizer: Any, prompt: Prompt, vocab_size: int, where: str = "") -> list[int]:
    """At least one id; an empty prompt becomes [BOS] where the tokenizer has a BOS token.

    `where` begins the message of the `InputError` ("prompt 3: ").
    """
    if isinstance(prompt, str):
        token_ids = list(tokenizer.encode(prompt))
    elif isinstance(prompt, Iterable):
        token_ids = list(prompt)
    else:
        raise InputError(f"{where}a prompt is text or a list of token ids, not {prompt!r}")
    if not token_ids:
        if tokenizer.bos_token_id is None:
            raise InputError(
                f"{where}the prompt is empty and this tokenizer has no BOS token to start from"
            )
        token_ids = [tokenizer.bos_token_id]
    check_ids(token_ids, vocab_size, where)
    return token_ids


def chat_ids(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Messages {"role": text, "content": text} -> the prompt that asks for the next one."""
    if not tokenizer.chat_template:
        raise InputError("this model's tokenizer has no chat template: give plain text")
    if not messages:
        raise InputError("messages is empty; at least one message was expected")
    for i, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise InputError(f"messages[{i}]: {key} is {message.get(key)!r}; text was expected")
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, tokenize=False
        )
    except Exception as error:  # the template is a program that came with the checkpoint
        raise InputError(f"the chat template refuses these messages: {error}") from error
    # The template has written the special tokens.
    return list(tokenizer.encode(text, add_special_tokens=False))


def check_ids(token_ids: Sequence[int], vocab_size: int, where: str = "") -> None:
    """Raises `InputError` for the first id the model has no embedding for."""
    for i, token in enumerate(token_ids):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise InputError(
                f"{where}token id {token!r} at position {i}; 0 to {vocab_size - 1} were expected"
            )


def load_tokenizer(directory: Path) -> Any:
    """The tokenizer in an engine directory. Raises `InputError` if there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise InputError(f"{directory}: no tokenizer can be loaded from it ({error})") from error
