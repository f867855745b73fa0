"""The prompts that engines are compared on: plain text, code, lists, other scripts; or a user's
file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from seekforge.kernels.errors import InputError

Prompt = str | list[dict[str, Any]]  # text, or messages for the chat template
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea, there lived a girl who",
    "Water boils at a temperature of",
    "The three most important ideas in physics are:\n1.",
    "Q: What is 12 times 7?\nA:",
    "Die Hauptstadt von Deutschland ist",
    "To make a good cup of tea, first",
)


def read_prompts(path: Path) -> list[Prompt]:
    """One prompt a line, empty lines left out. In a file whose name ends in .jsonl each line is
    {"prompt": text} or {"messages": [{"role", "content"}, …]}; other keys are ignored.

    Raises InputError that names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--prompts {path}: cannot be read as text ({error})") from None
    read = _from_json if path.suffix == ".jsonl" else _plain
    prompts = [
        read(line, f"--prompts {path}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        raise InputError(f"--prompts {path}: no prompt in it; one a line was expected")
    return prompts


def _plain(line: str, where: str) -> Prompt:
    return line


def _from_json(line: str, where: str) -> Prompt:
    expected = '{"prompt": text} or {"messages": [{"role": …, "content": …}]} was expected'
    try:
        found = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where}: not JSON ({error}); {expected}") from None
    if not isinstance(found, dict):
        raise InputError(f"{where}: {line[:60]}; {expected}")
    prompt, messages = found.get("prompt"), found.get("messages")
    if isinstance(prompt, str) and prompt and messages is None:
        return prompt
    messages = messages if prompt is None and isinstance(messages, list) else []
    if messages and all(isinstance(message, dict) for message in messages):
        return messages
    raise InputError(f"{where}: {line[:60]}; {expected}")
