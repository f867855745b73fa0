"""The bundle on disk: engine directories side by side, each written whole or not at all.

Engines are made in a temporary directory beside their place and renamed at the end, by one process
at a time. Engines of one bundle that take the same weights share one file (hard links). What a
killed build had finished is taken over by the next.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO

from seekforge.compile.build_cache import link_or_copy as link_or_copy
from seekforge.compile.weights import WEIGHTS_NAME, stored_recipe
from seekforge.kernels.errors import EngineError, InputError
from seekforge.models.content import content_digests
from seekforge.runtime.manifest import hash_files, read_manifest

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


def tokenizer_missing(checkpoint: Path) -> str | None:
    """What is to be said of a checkpoint without a tokenizer: its engine can't be verified."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if any((checkpoint / name).is_file() for name in names):
        return None
    return f"{checkpoint} has no tokenizer (none of {', '.join(names)}), and verifying needs one"


def copy_tokenizer(checkpoint: Path, folder: Path) -> None:
    """Copies what the runtime needs to turn text into tokens and back."""
    for name in TOKENIZER_FILES:
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, folder / name)


def link_weights(out: Path, folder: Path, recipe: str) -> str | None:
    """Gives `folder` weights that are there already, made by the same recipe: its own, which a
    killed build left, or those of another engine below `out`, if they are what its manifest says.

    Returns where they are from; None where there are none.
    """
    mine = folder / WEIGHTS_NAME
    if stored_recipe(mine) == recipe:
        return "of a build that was killed"
    mine.unlink(missing_ok=True)
    for other in out.glob(f"[!.]*/{WEIGHTS_NAME}"):
        if stored_recipe(other) == recipe and _is_listed(other):
            try:
                write_whole(mine, partial(link_or_copy, other))
            except FileNotFoundError:
                continue  # the engine is just being replaced
            return f"of {other.parent.name}"
    return None


def _is_listed(file: Path) -> bool:
    try:
        files = read_manifest(file.parent, check_files=False).files
        (digest,) = content_digests([file], hash_files)
    except (EngineError, OSError):
        return False
    return any(entry.path == file.name and entry.sha256 == digest for entry in files)


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Calls `write` with a path beside `path` and renames what it wrote: whatever has the name
    `path` is whole, even if the machine loses its power."""
    part = path.with_name(f"{path.name}.part")
    write(part)
    with part.open("rb") as file:
        os.fsync(file.fileno())  # 0.2 s for 540 MB
    part.replace(path)


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
def exclusive(target: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """One process at a time makes `target`; the others call `waiting` and wait here.

    The lock is a file beside it, which the operating system unlocks with the process that held it:
    a killed build keeps nobody waiting. Where the file system has no locks, nobody waits at all.
    """
    path = target.parent / f".{target.name}.lock"
    while True:
        with path.open("w") as file:
            if _locked(file, waiting) and not _is_still(path, file):
                continue  # whoever held it has removed it
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _locked(file: IO[str], waiting: Callable[[], None]) -> bool:
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def _is_still(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


@contextmanager
def atomic_directory(target: Path, keep: str | None = None) -> Iterator[Path]:
    """A temporary directory that becomes `target` when the body succeeds, and vanishes when it
    fails. The caller holds `exclusive(target)`, so what others left there is of killed builds.

    keep: pattern of their files that the new directory begins with (`write_whole` wrote them).
    """
    stale = [path for path in target.parent.glob(f".{target.name}.*") if path.is_dir()]
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    folder.chmod(0o755)
    for old in stale:
        for file in old.glob(keep) if keep else ():
            file.replace(folder / file.name)
        shutil.rmtree(old, ignore_errors=True)
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
