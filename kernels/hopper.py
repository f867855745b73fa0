"""Builds the CUDA C++ kernels (*_hopper.cu) from source, where that can be done, and loads them.

They need a Hopper GPU and nvcc; without either `library` is None and callers take their Triton
kernels. A library is built once, in seconds, and kept beside Triton's compiled kernels, under a
name made of its sources and the compiler's version.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

import torch

from seekforge.kernels.errors import SeekforgeError

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


@functools.cache
def library(name: str, device: torch.device) -> ctypes.CDLL | None:
    """kernels/<name>.cu, built and loaded; None where this device or machine cannot have it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    nvcc = compiler()
    if nvcc is None:
        return None
    try:
        return ctypes.CDLL(build(name, nvcc))
    except (OSError, subprocess.CalledProcessError) as failure:
        why = getattr(failure, "stderr", "") or str(failure)
        warnings.warn(f"{name}.cu was not built, the Triton kernel serves: {why}", stacklevel=2)
        return None


def build(name: str, nvcc: str) -> str:
    """The path of the shared library of kernels/<name>.cu; raises where nvcc does."""
    from triton.runtime.cache import get_cache_manager

    source = Path(__file__).with_name(f"{name}.cu")
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    parts = source.read_text(), source.with_name("hopper.cuh").read_text(), version, *FLAGS
    cache = get_cache_manager(hashlib.sha256("\0".join(parts).encode()).hexdigest())
    file = f"{name}.so"
    found = cache.get_file(file)
    if found is not None:
        return str(found)
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
