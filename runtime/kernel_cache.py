"""An engine's compiled kernels -> where Triton looks for them, so that a process compiles nothing.

An engine for a GPU has a folder `kernels` with what Triton kept when the build ran every kind of
step (compile/kernel_cache.py): for each kernel a folder named by Triton's key (of source, types,
options, Triton and GPU) with its cubin and metadata. A kernel that is not there is compiled when
it is first needed, as always.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path

FOLDER = "kernels"
GROUP = "__grp__"  # Triton's list of a kernel's files, by their absolute paths


def install_kernels(engine: Path) -> int:
    """Copies the engine's kernels to Triton's cache; those already there stay. Returns how many
    were new."""
    source = engine / FOLDER
    if not source.is_dir():
        return 0
    from triton import knobs

    new = 0
    for folder in source.iterdir():
        target = Path(knobs.cache.dir) / folder.name
        names = sorted(path.name for path in folder.iterdir())
        if all((target / name).exists() for name in names):
            continue
        target.mkdir(parents=True, exist_ok=True)
        # The lists last: a kernel without one is compiled, one with a list must be whole.
        for name in sorted(names, key=lambda name: name.startswith(GROUP)):
            content = (folder / name).read_bytes()
            if name.startswith(GROUP):
                content = relocate(content, target)
            written = target / f".{name}.{os.getpid()}"
            written.write_bytes(content)
            written.replace(target / name)
        new += 1
    return new


def relocate(group: bytes, folder: Path, suffixes: Collection[str] = ()) -> bytes:
    """A list of files as it must be for files in `folder`; of those with `suffixes`, where given:
    Triton takes a list with a missing file for none."""
    names = json.loads(group)["child_paths"]
    if suffixes:
        names = [name for name in names if Path(name).suffix in suffixes]
    return json.dumps({"child_paths": {name: str(folder / name) for name in names}}).encode()
