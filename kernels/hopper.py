"""Builds the CUDA C++ kernels (*_hopper.cu) from source, where that can be done, and loads them.

They need a Hopper GPU and nvcc; without either, callers take their Triton kernels. A library is
built by the first eager call that could use it, in about ten seconds, or before by `prepare`; never
at import and never while a CUDA graph is captured. It is kept beside Triton's compiled kernels,
under a name made of its sources and the compiler's version, and put there in one move: processes
that build at the same time do not disturb each other.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import torch

from seekforge.kernels.errors import SeekforgeError

logger = logging.getLogger(__name__)
FLAGS = (
    "-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-shared", "-Xcompiler", "-fPIC",
)  # fmt: skip


def compiler() -> str | None:
    """nvcc, on the path or in the folder where torch looks for CUDA."""
    found = shutil.which("nvcc")
    if found is None:
        from torch.utils.cpp_extension import CUDA_HOME

        if CUDA_HOME is not None:
            found = shutil.which("nvcc", path=str(Path(CUDA_HOME) / "bin"))
    return found


@functools.lru_cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


class Libraries:
    """Those loaded so far, or None in place of one that can't be had."""

    def __init__(self) -> None:
        self._found: dict[str, ctypes.CDLL | None] = {}
        self._lock = threading.Lock()

    def get(self, name: str) -> ctypes.CDLL | None:
        if name not in self._found:
            if torch.cuda.is_current_stream_capturing():
                return None  # this graph keeps the Triton kernel
            with self._lock:
                if name not in self._found:
                    self._found[name] = load(name)
        return self._found[name]


_libraries = Libraries()


def library(name: str, device: torch.device) -> ctypes.CDLL | None:
    """kernels/<name>.cu, built and loaded; None where this device or machine cannot have it."""
    return _libraries.get(name) if is_hopper(device) else None


def prepare(device: torch.device) -> bool:
    """Builds all of them now. Returns whether they serve on this device."""
    names = sorted(source.stem for source in Path(__file__).parent.glob("*_hopper.cu"))
    return None not in [library(name, device) for name in names]


def load(name: str) -> ctypes.CDLL | None:
    nvcc = compiler()
    if nvcc is None:
        logger.debug("%s: no nvcc, the Triton kernel serves", name)
        return None
    try:
        return ctypes.CDLL(build(name, nvcc))
    except (OSError, subprocess.CalledProcessError) as failure:
        why = getattr(failure, "stderr", "") or str(failure)
        logger.warning("%s.cu was not built, the Triton kernel serves: %s", name, why)
        return None


def build(name: str, nvcc: str) -> str:
    """The path of the shared library of kernels/<name>.cu; raises where nvcc does."""
    from triton.runtime.cache import get_cache_manager

    source = Path(__file__).with_name(f"{name}.cu")
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    headers = (header.read_text() for header in sorted(source.parent.glob("*.cuh")))
    parts = source.read_text(), *headers, version, *FLAGS
    cache = get_cache_manager(hashlib.sha256("\0".join(parts).encode()).hexdigest())
    file = f"{name}.so"
    found = cache.get_file(file)
    if found is not None:
        return str(found)
    logger.info("building %s.cu", name)
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / file
        command = [nvcc, *FLAGS, "-o", str(made), str(source)]
        subprocess.run(command, capture_output=True, text=True, check=True)
        return str(cache.put(made.read_bytes(), file))


def arguments(*values: int) -> ctypes.Array[ctypes.c_int64]:
    """A C struct of 64-bit integers and addresses."""
    return (ctypes.c_int64 * len(values))(*values)


def check(status: int, name: str) -> None:
    if status != 0:
        raise SeekforgeError(
            f"{name}: the launch failed with CUDA error {status}"
            if status > 0
            else f"{name}: the driver refused a map of the pool"
        )


def stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)
