"""The runtime cache of TensorRT-RTX: kernels it compiled on this GPU, kept beside the engine.

An RTX engine is finished on the GPU that runs it, kernel by kernel as steps need them. What is
compiled goes into a cache, which is read when the engine is opened and written when its session is
closed, or at the latest when the process ends. The file is no part of the engine: it is in no
manifest and no checksum, and TensorRT-RTX refuses one of another GPU, driver or version, whereupon
an empty one takes its place. Has not run on a GPU yet.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

CACHE_NAME = "runtime.cache"


def cached_config(engine: Any, path: Path) -> tuple[Any, Any]:
    """(IRuntimeConfig, IRuntimeCache) with what `path` holds, where it fits this machine."""
    config = engine.create_runtime_config()
    cache = config.create_runtime_cache()
    try:
        stored = path.read_bytes()
    except OSError:
        stored = b""  # not there yet
    if stored:
        cache.deserialize(stored)  # False, and the cache stays empty: made on another machine
    config.set_runtime_cache(cache)
    return config, cache


def save_cache(cache: Any, path: Path) -> None:
    """Writes the cache in one move, so that a reader never sees half of it."""
    memory = cache.serialize()
    if memory is None:  # the GPU is gone already
        return
    try:
        descriptor, part = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(memoryview(memory))
        Path(part).replace(path)
    except OSError:
        return  # an engine on a read-only disk is compiled anew each time, nothing else


def save_at_end(owner: object, cache: Any, path: Path) -> Callable[[], Any]:
    """Saves when `owner` goes or the process ends; or when what is returned is called, once."""
    return weakref.finalize(owner, save_cache, cache, path)
