"""What this machine lacks for a build: packages and their versions, a compiler that works, a GPU,
memory, disk. Looks and asks; builds nothing but an empty library with the C++ compiler.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement

from seekforge.compile.options import PACKAGES
from seekforge.compile.tensorrt_options import parse_targets, unknown_targets
from seekforge.runtime.manifest import BACKENDS


@dataclass(frozen=True, slots=True)
class Problem:
    """what: is missing or does not fit; do: what to do about it, where `what` does not say it."""

    what: str
    do: str

    def __str__(self) -> str:
        return f"{self.what}; {self.do}" if self.do else self.what


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes. gpu: name of the first GPU, None where torch sees none; gpu_bytes: its memory.
    driver: the CUDA version of the installed driver, None without one."""

    memory: int
    gpu: str | None
    gpu_bytes: int
    capability: str | None
    driver: str | None
    versions: dict[str, str]


def this_machine() -> Machine:
    gpu = torch.cuda.is_available()
    return Machine(
        memory=available_memory(),
        gpu=torch.cuda.get_device_name() if gpu else None,
        gpu_bytes=torch.cuda.get_device_properties(0).total_memory if gpu else 0,
        capability=".".join(map(str, torch.cuda.get_device_capability())) if gpu else None,
        driver=driver_version(),
        versions={"python": platform.python_version(), "torch": torch.__version__}
        | {
            name: version
            for name in ("transformers", "triton", *(n for ns in PACKAGES.values() for n in ns))
            if (version := installed(name)) is not None
        },
    )


def requirements(
    backend: str, device: str, dtype: str, target: str, strip: bool = False
) -> list[Problem]:
    """What keeps `backend` from building here at all, each with its remedy."""
    module, extra = BACKENDS[backend]
    if importlib.util.find_spec(module) is None:
        package = f"seekforge[{extra}]" if extra else module.replace("_", "-")
        return [Problem(f"--backend {backend} needs {module}", f"pip install '{package}'")]
    found = outdated(("torch", "transformers", *PACKAGES[backend]))
    if backend == "inductor":
        if device == "cuda" and not torch.cuda.is_available():
            found.append(
                Problem("--device cuda: torch sees no GPU on this machine", "use --device cpu")
            )
        if device == "cuda" and importlib.util.find_spec("triton") is None:
            found.append(Problem("--device cuda needs triton", "pip install 'seekforge[gpu]'"))
        found += compiler_problems()
    if backend == "onnxruntime" and device == "cpu" and dtype == "bfloat16":
        found.append(
            Problem(
                "--dtype bfloat16: ONNX Runtime has no bfloat16 kernels for the CPU",
                "use float32 or float16",
            )
        )
    if backend == "tensorrt" and not torch.cuda.is_available():
        found.append(
            Problem(
                "--backend tensorrt builds for the GPU it runs on, and torch sees none",
                "build there, or for RTX GPUs with --backend tensorrt-rtx",
            )
        )
    if backend == "tensorrt-rtx":
        found += target_problems(target)
        if strip and not torch.cuda.is_available():
            found.append(
                Problem(
                    "--strip: TensorRT-RTX lays the weights of such an engine out on a GPU while "
                    "it builds, and torch sees none",
                    "build on a machine with an NVIDIA GPU, or leave --strip out",
                )
            )
    return found


def outdated(packages: tuple[str, ...]) -> list[Problem]:
    """Packages older than pyproject.toml asks for. What it says is read where it is installed."""
    try:
        lines = importlib.metadata.requires("seekforge") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = []
    for requirement in map(Requirement, lines):
        version = installed(requirement.name)
        if requirement.name in packages and version is not None:
            if requirement.specifier.contains(version, prereleases=True):
                continue
            found.append(
                Problem(
                    f"{requirement.name} {version} is installed; {requirement.specifier} is needed",
                    f"pip install '{requirement.name}{requirement.specifier}'",
                )
            )
    return found


def installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def compiler_problems() -> list[Problem]:
    """AOTInductor's packages are shared libraries: with a C++ library linked into them (as some
    compiler wrappers do) they crash when they are loaded, whatever is in them."""
    compiler = os.environ.get("CXX") or "g++"
    path = shutil.which(compiler)
    if path is None:
        return [
            Problem(
                f"no C++ compiler: {compiler} is not there",
                "install g++, or set CXX to a compiler: CXX=/usr/bin/g++",
            )
        ]
    with tempfile.TemporaryDirectory(prefix="seekforge-") as folder:
        library, code = Path(folder) / "probe.so", Path(folder) / "probe.cpp"
        code.write_text(
            "#include <stdexcept>\n#include <string>\n"
            'void f(std::string s) { throw std::runtime_error(s + "!"); }\n'
        )
        command = [path, "-shared", "-fPIC", "-o", str(library), str(code)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not library.is_file():
            said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            return [
                Problem(
                    f"the C++ compiler {path} cannot make a shared library: {said}",
                    "set CXX to one that can: CXX=/usr/bin/g++",
                )
            ]
        if re.search(rb"lib(std)?c\+\+\.so", library.read_bytes()):
            return []
    return [
        Problem(
            f"the C++ compiler {path} (CXX) links the C++ library into what it makes, and "
            "AOTInductor packages built so crash when they are loaded",
            "set CXX to the system's own: CXX=/usr/bin/g++",
        )
    ]


def target_problems(target: str) -> list[Problem]:
    """Whether tensorrt-rtx knows all of the compute capabilities, as `--target` lists them."""
    import tensorrt_rtx

    refused = unknown_targets(tensorrt_rtx, parse_targets(target))
    if refused is None:
        return []
    return [
        Problem(
            f"--target {target}: {refused}",
            "give some of these, or build for this GPU with --backend inductor or tensorrt",
        )
    ]


def driver_version() -> str | None:
    """The newest CUDA that the installed driver serves, such as "13.0"."""
    try:
        library: Any = ctypes.CDLL("libcuda.so.1")
        version = ctypes.c_int()
        if library.cuDriverGetVersion(ctypes.byref(version)):
            return None
    except (OSError, AttributeError):
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def available_memory() -> int:
    """Bytes a process may still take: of the machine, and of its control group."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        text = Path("/proc/meminfo").read_text()
        free = int(re.search(r"MemAvailable:\s+(\d+)", text)[1]) * 1024  # type: ignore[index]
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            free = min(free, int(limit) - int((group / "memory.current").read_text()))
    except (OSError, ValueError, TypeError):
        pass
    return free


def free_disk(folder: Path) -> int:
    """Bytes free where `folder` is or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def resident_bytes() -> int:
    """Memory of this process now."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
