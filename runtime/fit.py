"""Whether an engine can run on this machine, and which of a bundle's engines is meant by a path.

In: manifests, paths of engine directories and bundles. Out: reasons for users, engine directories.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from seekforge.kernels.errors import EngineError
from seekforge.runtime.manifest import BACKENDS, MANIFEST_NAME, Manifest, read_manifest

CUDA_PROVIDER = "CUDAExecutionProvider"  # ONNX Runtime's name for it


def unfit_reason(manifest: Manifest) -> str | None:
    """Why this machine cannot run the engine (package missing, no GPU, another GPU), or None."""
    module, extra = BACKENDS[manifest.backend]
    if importlib.util.find_spec(module) is None:
        package = f"seekforge[{extra}]" if extra else module.replace("_", "-")
        return f"package {module!r} is not installed; pip install '{package}'"
    if manifest.device == "cpu":
        return None
    import torch

    if not torch.cuda.is_available():
        return "it was built for an NVIDIA GPU and torch sees none on this machine"
    major, minor = torch.cuda.get_device_capability()
    built_for = manifest.compute_capabilities
    if built_for and f"{major}.{minor}" not in built_for:
        return (
            f"it was built for compute capability {', '.join(built_for)} and this GPU has "
            f"{major}.{minor}"
        )
    if manifest.backend == "onnxruntime":
        import onnxruntime

        if CUDA_PROVIDER not in onnxruntime.get_available_providers():
            return (
                f"the onnxruntime {onnxruntime.__version__} installed here has no {CUDA_PROVIDER}; "
                "pip uninstall onnxruntime, then pip install onnxruntime-gpu"
            )
    return None


def resolve_engine(path: Path) -> Path:
    """The engine directory meant by `path`: itself, or the bundle's first engine that can run here.

    Raises `EngineError` where `path` is neither, or no engine of the bundle can run here.
    """
    if (path / MANIFEST_NAME).is_file():
        return path
    if not path.is_dir():
        raise EngineError(f"{path}: no such engine directory; seekforge build CHECKPOINT -o {path}")
    refused = []
    for backend in BACKENDS:
        engine = path / backend
        if not (engine / MANIFEST_NAME).is_file():
            continue
        reason = unfit_reason(read_manifest(engine, check_files=False))
        if reason is None:
            return engine
        refused.append(f"{backend}: {reason}")
    if refused:
        raise EngineError(
            f"{path}: no engine of this bundle can run here ({'; '.join(refused)}); "
            f"build one that can: seekforge build CHECKPOINT -o {path} --backend inductor"
        )
    raise EngineError(
        f"{path} is no engine: no {MANIFEST_NAME} in it or in {', '.join(BACKENDS)} below it; "
        f"seekforge build CHECKPOINT -o {path}"
    )
