"""What decides an engine, by name: equal requests give equal engines.

In: a checkpoint directory, options, a backend. Out: {"checkpoint": {"model.safetensors": …},
"options": …, "versions": …, "machine": …, "sources": …}, which the manifest keeps. So a build whose
request is that of the engine in its place has nothing to do, and any other build can say what has
changed. Imports nothing heavy: the answer is there before torch would be.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from seekforge.compile.build_cache_sources import source_digests
from seekforge.compile.options import PACKAGES, Options
from seekforge.models.content import content_digests
from seekforge.models.shards import indexed_files

Request = dict[str, dict[str, str]]
DIGITS = 16
CHECKPOINT = ("*.json", "*.jinja", "*.model", "merges.txt")  # beside the weights
TEXTS = (".txt", ".md", ".text")  # of a folder given as --calib
# Options that do not decide what an engine is, or only that of some backends.
ASIDE = ("backends", "verify", "cache", "calib", "int4")
ONLY = {
    "device": ("inductor", "onnxruntime"),
    "target": ("tensorrt-rtx",),
    "strip": ("tensorrt", "tensorrt-rtx"),
    "weight_streaming": ("tensorrt", "tensorrt-rtx"),
}
# Settings of torch and triton that change what they compile; where they keep it does not.
VARIABLES = ("TORCHINDUCTOR_", "AOT_INDUCTOR_", "ATEN_CPU_CAPABILITY", "TRITON_", "CXX", "CPATH")


def request(checkpoint: Path, options: Options, backend: str) -> Request:
    """Raises OSError or CheckpointError where a file can't be read."""
    return {
        "checkpoint": checkpoint_digests(checkpoint),
        "options": dict(_options(options, backend)),
        "versions": versions(backend, options.device, options.quant),
        "machine": machine(backend, options.device),
        "sources": source_digests(),
    }


def changes(old: Mapping[str, Mapping[str, str]], new: Request) -> list[str]:
    """What differs, such as "passes/swiglu.py changed" or "--max-len: None, now 64"."""
    found = []
    for group, values in new.items():
        before = old.get(group, {})
        for name in dict.fromkeys((*values, *before)):
            was, now = before.get(name), values.get(name)
            if was == now:
                continue
            if group in ("options", "versions"):
                found.append(f"{name}: {was}, now {now}")
            else:
                kind = "new" if was is None else "gone" if now is None else "changed"
                found.append(f"{name} {kind}")
    return found


def versions(backend: str, device: str, quant: str | None = None) -> dict[str, str]:
    """Python's, and of the packages that a build for `backend` goes through."""
    names = ["seekforge", "torch", "transformers", *PACKAGES[backend]]
    if quant == "awq-int4":
        names.append("tokenizers")
    if backend == "inductor" and device == "cuda":
        names.append("triton")
    return {"python": platform.python_version()} | {name: _version(name) for name in names}


def machine(backend: str, device: str) -> dict[str, str]:
    """What a backend compiles for, where that is the machine it runs on."""
    if backend == "inductor":
        place = gpu() if device == "cuda" else cpu()
        return {"processor": place, "compiler": compiler(), "environment": settings()}
    return {"GPU": gpu()} if backend == "tensorrt" else {}


def compiler() -> str:
    """The first line a C++ compiler says of itself: the one that Inductor would take."""
    command = shlex.split(os.environ.get("CXX", "g++"))
    try:
        said = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return said.stdout.partition("\n")[0]


def cpu() -> str:
    """The instruction set and its extensions: packages are compiled for this very processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor()]
    kind = next((line for line in lines if line.startswith(("flags", "Features"))), lines[0])
    return f"{platform.machine()} {_digest(kind.encode())}"


def gpu() -> str:
    """Name, compute capability and driver of the first GPU that torch sees."""
    import torch

    if not torch.cuda.is_available():
        return "none"
    try:
        driver = Path("/proc/driver/nvidia/version").read_text().partition("\n")[0]
    except OSError:
        driver = ""
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()}, {major}.{minor}, {driver}"


def settings() -> str:
    """The environment's variables that change what torch compiles."""
    found = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(VARIABLES) and not name.endswith(("_CACHE_DIR", "TRITON_INTERPRET"))
    ]
    return " ".join(found)


def checkpoint_digests(folder: Path) -> dict[str, str]:
    weights = indexed_files(folder)
    others = {file for pattern in CHECKPOINT for file in folder.glob(pattern) if file.is_file()}
    files = [*sorted(others), *weights]
    digests = content_digests(files)
    return {file.name: digest[:DIGITS] for file, digest in zip(files, digests, strict=True)}


def _options(options: Options, backend: str) -> Iterator[tuple[str, str]]:
    for field in dataclasses.fields(options):
        if field.name not in ASIDE and backend in ONLY.get(field.name, (backend,)):
            yield f"--{field.name.replace('_', '-')}", str(getattr(options, field.name))
    if options.quant is not None:
        for name, value in dataclasses.asdict(options.int4).items():
            yield f"INT4 {name}", str(value)
    if options.calib is not None:
        folder = options.calib
        texts = sorted(f for f in folder.iterdir() if f.suffix in TEXTS) if folder.is_dir() else []
        content = b"".join(
            file.name.encode() + file.read_bytes() for file in texts or [options.calib]
        )
        yield "--calib", _digest(content)


def _version(name: str) -> str:
    for other in (name, f"{name}-gpu"):
        try:
            return version(other)
        except PackageNotFoundError:
            continue
    return "none"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:DIGITS]
