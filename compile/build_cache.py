"""What heavy steps made, kept for later builds: one folder for each key in the user's cache folder.

    builds/KEY/meta.json, model.pt2, …

In: a key that names everything that decides the files (build_cache_lower.py). Files are hard links
to those of the engine they were made for, so an entry takes disk space only when that engine is
gone; another file system gets copies. Whatever goes wrong here costs a build its time, nothing
else: a cache that can't be written is left alone, a damaged entry is thrown away and made again.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seekforge.kernels.errors import EngineError
from seekforge.models.default import user_cache
from seekforge.runtime.manifest import FileEntry, hash_files

META = "meta.json"
UNFINISHED = ".new-"
BOUND = 20 << 30  # bytes that only the cache holds; beyond them what was used longest ago goes
ABANDONED = 24 * 3600  # s after which an unfinished entry is of a killed build


@dataclass(frozen=True, slots=True)
class Entry:
    """model: of what, such as "llama 30x576 float32". seconds: what making it took. steps: those of
    the build that it stands for. facts: fields of the manifest, as JSON. weights: whether the
    engine directory keeps its weights file beside these files."""

    key: str
    model: str
    backend: str
    seconds: float
    steps: list[str]
    weights: bool
    facts: dict[str, Any]
    files: tuple[FileEntry, ...]

    @property
    def path(self) -> Path:
        return builds() / self.key

    @property
    def used(self) -> float:
        """When it was last made or taken, in seconds since 1970."""
        return _time(self.path / META)

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(file.size for file in self.files)

    def held(self) -> int:
        """Bytes that would be free without it: of files that no engine shares."""
        try:
            stats = [(self.path / file.path).stat() for file in self.files]
        except OSError:  # it is just being removed
            return 0
        return sum(stat.st_size for stat in stats if stat.st_nlink == 1)


def builds() -> Path:
    """Where entries are kept."""
    return user_cache() / "builds"


def take(key: str, folder: Path) -> Entry | None:
    """Puts the files of the entry `key` into `folder`; None where there is none, or it is damaged
    (it is gone then)."""
    entry = _read(builds() / key)
    if entry is None:
        remove(builds() / key)
        return None
    targets = [folder / file.path for file in entry.files]
    try:
        for file, target in zip(entry.files, targets, strict=True):
            target.parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(entry.path / file.path, target)
        whole = hash_files(targets) == [file.sha256 for file in entry.files]
    except OSError:
        whole = False
    if not whole:
        for target in targets:
            target.unlink(missing_ok=True)
        remove(entry.path)
        return None
    with suppress(OSError):  # read-only
        os.utime(entry.path / META)
    return entry


def put(entry: Entry, folder: Path) -> None:
    """Keeps the entry's files, which are in `folder`; drops others where that makes too much."""
    if entry.size > BOUND:
        return
    try:
        builds().mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=builds()))
    except OSError:
        return
    try:
        for file in entry.files:
            (made / file.path).parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(folder / file.path, made / file.path)
        (made / META).write_text(json.dumps(dataclasses.asdict(entry), indent=1))
        made.rename(entry.path)  # refused where another build was faster
    except OSError:
        shutil.rmtree(made, ignore_errors=True)
        return
    prune(BOUND, keep=entry.key)


def entries() -> list[Entry]:
    """All entries that can be read, the one used longest ago first."""
    found = [entry for path in _folders() if (entry := _read(path)) is not None]
    return sorted(found, key=lambda entry: entry.used)


def prune(
    most: int | None = None, older_than: float | None = None, keep: str | None = None
) -> list[Entry]:
    """Removes entries and returns them: those not used for `older_than` seconds, and of the others,
    the one used longest ago first, until the cache holds at most `most` bytes by itself. None: no
    limit of this kind. Left-overs of killed builds and unreadable entries go as well."""
    now = time.time()
    known, gone = entries(), []
    readable = {entry.path for entry in known}
    for path in _folders():
        unfinished = path.name.startswith(UNFINISHED)
        if path not in readable and not (unfinished and now - _time(path) < ABANDONED):
            remove(path)
    held = {entry.key: entry.held() for entry in known}
    total = sum(held.values())
    for entry in known:
        old = older_than is not None and now - entry.used > older_than
        much = most is not None and total > most and held[entry.key] > 0
        if entry.key != keep and (old or much):
            remove(entry.path)
            total -= held[entry.key]
            gone.append(entry)
    return gone


def remove(path: Path) -> None:
    """An entry goes in one move, so that nobody takes half of it."""
    if not path.exists():
        return
    with suppress(OSError):  # read-only, or another process has removed it
        out_of_the_way = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=builds()))
        with suppress(OSError):
            path.rename(out_of_the_way / path.name)
        shutil.rmtree(out_of_the_way, ignore_errors=True)


def link_or_copy(file: Path, target: Path) -> None:
    """A hard link, or a copy where the file system has none."""
    try:
        os.link(file, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(file, target)


def file_entries(folder: Path, names: Iterable[str]) -> tuple[FileEntry, ...]:
    """Entries for the named files in `folder`."""
    files = [folder / name for name in names]
    return tuple(
        FileEntry(file.relative_to(folder).as_posix(), digest, file.stat().st_size)
        for file, digest in zip(files, hash_files(files), strict=True)
    )


def _folders() -> list[Path]:
    try:
        return [path for path in builds().iterdir() if path.is_dir()]
    except OSError:
        return []


def _time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return time.time()


def _read(path: Path) -> Entry | None:
    try:
        data = json.loads((path / META).read_bytes())
        files = tuple(FileEntry(**file) for file in data.pop("files"))
        entry = Entry(**data, files=files)
        sizes = [(path / file.path).stat().st_size for file in files]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, EngineError):
        return None
    whole = entry.key == path.name and sizes == [file.size for file in files]
    return entry if whole else None
