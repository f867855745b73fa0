"""The text that calibration looks at: a file, a folder or the built-in one, as windows of tokens.

In: a path and a tokenizer. Out: windows of token ids and how many tokens they hold. The built-in
text (calibration.txt) is plain English prose of several kinds, written for this purpose, then
documents and code of this project as they once were: about 14,000 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seekforge.compile.perplexity import read_text, text_tokens, windows
from seekforge.kernels.errors import InputError

BUILT_IN = Path(__file__).with_name("calibration.txt")
SUFFIXES = (".txt", ".md", ".text")


def calibration_windows(
    path: Path | None, tokenizer: Any, end: int | None, length: int, limit: int
) -> list[list[int]]:
    """At most `limit` tokens in windows of `length`, spread evenly over the text (the last may be
    shorter).

    path: a text file, a folder of them (every .txt, .md and .text in it, by name), or None for the
    built-in text. Raises InputError where there is no text.
    """
    stream: list[int] = []
    for file in _files(BUILT_IN if path is None else path):
        stream += text_tokens(tokenizer, read_text(file), end)
    if len(stream) < 2:
        raise InputError(
            f"calibration: {path or BUILT_IN} holds {len(stream)} tokens; at least 2 are needed, "
            "some thousand are useful. Give another --calib FILE|DIR."
        )
    return spread(list(windows(stream, length)), max(1, limit // length))


def spread(cut: Sequence[list[int]], count: int) -> list[list[int]]:
    """`count` windows at even distances; all of them where there are no more."""
    if len(cut) <= count:
        return list(cut)
    return [cut[i * len(cut) // count] for i in range(count)]


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and file.is_file())
    filled = [file for file in files if file.read_bytes().strip()]
    if not filled:
        raise InputError(
            f"--calib {path}: the folder holds no text ({', '.join(SUFFIXES)}; {len(files)} empty "
            "files). Give a folder or a file with some thousand words."
        )
    return filled
