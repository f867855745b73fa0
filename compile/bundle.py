"""The bundle on disk: engine directories side by side, each written whole or not at all.

Engines are made in a temporary directory beside their place and renamed at the end. Engines of one
bundle that take the same weights share one file (hard links).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from seekforge.compile.weights import WEIGHTS_NAME, stored_recipe
from seekforge.kernels.errors import InputError

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


def copy_tokenizer(checkpoint: Path, folder: Path) -> None:
    """Copies what the runtime needs to turn text into tokens and back."""
    for name in TOKENIZER_FILES:
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, folder / name)


def link_weights(out: Path, folder: Path, recipe: str) -> bool:
    """Links `folder`'s weights to those of another engine below `out` made by the same recipe.

    Returns whether there were any.
    """
    for other in out.glob(f"[!.]*/{WEIGHTS_NAME}"):
        if stored_recipe(other) == recipe:
            link_or_copy(other, folder / WEIGHTS_NAME)
            return True
    return False


def link_or_copy(file: Path, target: Path) -> None:
    """A hard link, or a copy where the file system has none."""
    try:
        os.link(file, target)
    except OSError:
        shutil.copyfile(file, target)


def check_writable(out: Path) -> None:
    """Makes the folder `out`; raises InputError where nothing can be written there."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise InputError(
            f"-o {out}: cannot be written ({error.strerror}); give another folder"
        ) from None


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """A temporary directory that becomes `target` when the body succeeds, and vanishes when it
    fails."""
    for stale in target.parent.glob(f".{target.name}.*"):
        shutil.rmtree(stale, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    folder.chmod(0o755)
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if target.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        target.rename(old / "old")
        folder.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    else:
        folder.rename(target)
