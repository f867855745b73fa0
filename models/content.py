"""What files hold, by digest, without reading a file again that has not changed since.

In: files. Out: one digest each. Remembered in `digests.json` of the user's cache folder by device,
inode, size and both of the file system's times: `ctime` can't be set by a program, so a file that
was overwritten in place and given its old modification time is read again too. Neither name nor
folder count: what is renamed or moved with its folder is still known.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from seekforge.models.default import user_cache

Hash = Callable[[Sequence[Path]], list[str]]
REMEMBERED = 4096  # files; those not asked for longest are forgotten
# A file that was changed this short a time before it was read may be changed again without a new
# time: file systems count in steps of up to two seconds (FAT).
SETTLED = 2_000_000_000  # ns


def sha256_of(files: Sequence[Path]) -> list[str]:
    """sha256 of each file in hex, several files side by side."""
    with ThreadPoolExecutor() as pool:  # hashlib lets go of the GIL
        return list(pool.map(_sha256, files))


def content_digests(files: Sequence[Path], hash_files: Hash = sha256_of) -> list[str]:
    """`hash_files(files)`, read only where a file is new or may have changed. Raises OSError."""
    now, known = time.time_ns(), _read()
    keys, stamps = [], []
    for file in files:
        stat = file.stat()
        keys.append(f"{hash_files.__name__} {stat.st_dev} {stat.st_ino}")
        stamps.append([stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns])
    missing = [i for i, key in enumerate(keys) if known.get(key, [None])[:-1] != stamps[i]]
    found = dict(zip(missing, hash_files([files[i] for i in missing]), strict=True))
    digests = [found.get(i) or str(known[key][-1]) for i, key in enumerate(keys)]
    settled = {
        keys[i]: [*stamps[i], digest]
        for i, digest in found.items()
        if max(stamps[i][1:]) < now - SETTLED
    }
    if settled:
        used = {key: known[key] for i, key in enumerate(keys) if i not in found}
        _write(settled | used)
    return digests


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _index() -> Path:
    return user_cache() / "digests.json"


def _read() -> dict[str, list[Any]]:
    try:
        known = json.loads(_index().read_bytes())
        return {k: v for k, v in known.items() if isinstance(v, list) and len(v) == 4}
    except (OSError, ValueError, AttributeError):
        return {}


def _write(new: dict[str, list[Any]]) -> None:
    """Adds to what is there now: another build may have written meanwhile."""
    kept = {key: value for key, value in _read().items() if key not in new} | new
    kept = dict(list(kept.items())[-REMEMBERED:])
    temporary = _index().with_suffix(f".{os.getpid()}")
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(kept, separators=(",", ":")))
        temporary.replace(_index())
    except OSError:  # a read-only cache costs reading again, nothing else
        with contextlib.suppress(OSError):
            temporary.unlink()
