"""Plans without weights: which engine of an earlier build serves this one too.

A stripped plan depends on the graph, the profiles, the library's version and the options, and not
on the weights, which lie beside it. So where only those changed, the old plan is taken and nothing
is built: the engine is refitted when it is loaded. In: the ONNX file and what the plan would be
built with. Out: a digest, and the facts of the earlier engine that has it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from seekforge.compile.bundle import link_or_copy
from seekforge.compile.tensorrt_options import TensorRTOptions
from seekforge.kernels.errors import EngineError
from seekforge.runtime.manifest import MANIFEST_NAME, hash_files, read_manifest
from seekforge.runtime.profiles import Profile, profile_to_json
from seekforge.runtime.tensorrt_api import import_tensorrt
from seekforge.runtime.tensorrt_cache import CACHE_NAME

KEPT = ("backend_version", "compute_capability", "layers", "profiles", "inputs", "outputs")


def plan_digest(
    model: Path, product: str, profiles: Sequence[Profile], options: TensorRTOptions
) -> str:
    """sha256 of all that a stripped plan is built from. The ONNX file has the graph and the
    constants within it; of the weights beside it only names, shapes and places, not the values."""
    version = import_tensorrt(product).__version__
    # RTX engines are for the GPUs of the options, others for the one that is here.
    gpu = torch.cuda.get_device_name() if product == "tensorrt" else None
    asked = dataclasses.asdict(options)
    # The size of the budget is the runtime's; the plan only knows that there is one.
    asked["streaming_bytes"] = options.streaming_bytes is not None
    shapes = [profile_to_json(profile) for profile in profiles]
    digest = hashlib.sha256(model.read_bytes())
    digest.update(json.dumps([product, version, gpu, shapes, asked], sort_keys=True).encode())
    return digest.hexdigest()


def keep_plan(earlier: Path, digest: str, plan: Path) -> dict[str, Any] | None:
    """Puts the plan of the engine directory `earlier` at `plan` if it has this digest and is whole,
    with its runtime cache; returns its fields of the manifest, or None where a new one must be
    built."""
    if not (earlier / MANIFEST_NAME).is_file():
        return None
    try:
        manifest = read_manifest(earlier, check_files=False)
    except EngineError:  # damaged, or of another format: built again
        return None
    known = manifest.tensorrt or {}
    stored = next((entry for entry in manifest.files if entry.path == plan.name), None)
    old = earlier / plan.name
    if not known.get("stripped") or known["plan"] != digest or stored is None or not old.is_file():
        return None
    if hash_files([old]) != [stored.sha256]:
        return None
    link_or_copy(old, plan)
    if (earlier / CACHE_NAME).is_file():  # the kernels are the plan's
        shutil.copyfile(earlier / CACHE_NAME, plan.with_name(CACHE_NAME))
    return {name: getattr(manifest, name) for name in KEPT}
