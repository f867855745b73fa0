"""Whether the engine in its place is already what a build would give, and if not, what has changed.

In: a place, a request. Out: nothing to do, or the reason to build. Imports nothing heavy.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from seekforge.compile.build_cache_request import Request, changes, request
from seekforge.compile.options import LEVELS, Options
from seekforge.kernels.errors import CheckpointError, EngineError
from seekforge.models.content import content_digests
from seekforge.runtime.fit import unfit_reason
from seekforge.runtime.manifest import (
    MANIFEST_NAME,
    Manifest,
    hash_files,
    read_manifest,
    write_manifest,
)

NEW = "there is none yet"
SHOWN = 3  # changes named in one line
NVIDIA = ("/dev/nvidiactl", "/dev/dxg")  # of the driver: on Linux, in WSL


def reusable(checkpoint: Path, out: Path, options: Options) -> list[Path] | None:
    """The engines below `out`, if a build with these options would change none of them."""
    engines = [out / backend for backend in options.backends]
    if not options.cache or not all((engine / MANIFEST_NAME).is_file() for engine in engines):
        return None
    try:
        for engine in engines:
            wanted = request(checkpoint, options, engine.name)
            if reason_to_build(engine, wanted, checkpoint, options) is not None:
                return None
    except (OSError, CheckpointError):  # the build says it in the user's terms
        return None
    return engines


def reason_to_build(
    engine: Path, wanted: Request, checkpoint: Path, options: Options
) -> str | None:
    """Why `engine` must be built: NEW, or what differs; None: it is whole and what is wanted."""
    if not options.cache:
        return NEW
    if not (engine / MANIFEST_NAME).is_file():
        return NEW
    try:
        manifest = read_manifest(engine, check_files=False)
    except EngineError:
        return f"its {MANIFEST_NAME} is of another version, or damaged"
    if manifest.built_from is None:
        return "it does not say what it was built from"
    found = changes(manifest.built_from, wanted)
    if found:
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        return f"{', '.join(found[:SHOWN])}{more}"
    if not _is_verified(manifest, options.verify):
        return f"it is not verified with --verify {options.verify}"
    damaged = _damaged(engine, manifest)
    if damaged is None and manifest.model["checkpoint"] != str(checkpoint.resolve()):
        # The same files elsewhere: what compares the engine with them must find them.
        model = manifest.model | {"checkpoint": str(checkpoint.resolve())}
        write_manifest(engine, dataclasses.replace(manifest, model=model))
    return damaged


def _is_verified(manifest: Manifest, level: str) -> bool:
    """Whether its passes were proven at this level or above, and it was compared with eager or
    can't be on this machine."""
    if level == "none":
        return True
    proven = (manifest.proof or {}).get("level", "none")
    executed = (manifest.receipt or {}).get("executed")
    return LEVELS.index(proven) >= LEVELS.index(level) and (bool(executed) or _cannot_run(manifest))


def _cannot_run(manifest: Manifest) -> bool:
    if manifest.device == "cuda" and not any(Path(device).exists() for device in NVIDIA):
        return True  # without asking torch, whose import takes a second
    return unfit_reason(manifest) is not None


def _damaged(engine: Path, manifest: Manifest) -> str | None:
    files = [engine / entry.path for entry in manifest.files]
    for file, entry in zip(files, manifest.files, strict=True):
        if not file.is_file():
            return f"{entry.path} is missing"
        if file.stat().st_size != entry.size:
            return f"{entry.path} was cut or changed"
    for digest, entry in zip(content_digests(files, hash_files), manifest.files, strict=True):
        if digest != entry.sha256:
            return f"{entry.path} was changed or damaged"
    return None
