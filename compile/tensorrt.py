"""Lowers a padded ONNX graph to an engine of TensorRT or TensorRT-RTX.

In: `model.onnx` with its weights beside it, and the profiles. Out: `model.engine`, written
atomically, and what is known of it. Nothing may be lost on the way: a refused node, an input that
TensorRT ignores, and an attention that did not fuse each end the build. The network is strongly
typed: precision is what the graph says. No GPU is needed to build for RTX GPUs; `tensorrt` builds
for the GPU of the machine it runs on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seekforge.compile.failures import worded
from seekforge.compile.onnx_nodes import OnnxNodes
from seekforge.compile.tensorrt_config import (
    Progress,
    configure,
    load_timing,
    progress_monitor,
    save_timing,
)
from seekforge.compile.tensorrt_layers import (
    CompiledLayer,
    activation_bytes,
    compiled_layers,
    layer_counts,
    unfused_attention,
)
from seekforge.compile.tensorrt_messages import builder_failure
from seekforge.compile.tensorrt_network import ParsedNetwork
from seekforge.compile.tensorrt_options import TensorRTOptions
from seekforge.kernels.errors import BuildError, EngineError
from seekforge.runtime.manifest import TensorSpec
from seekforge.runtime.profiles import Profile
from seekforge.runtime.tensorrt import DTYPES
from seekforge.runtime.tensorrt_api import Log, capture, import_tensorrt, process_logger

# B49: the session binds int64 as int64. UINT8 data: zero points, 0..15, folded at build time.
HARMLESS = ("Int64 binding", "UINT8 data")
DEFAULT = TensorRTOptions()


@dataclass(frozen=True, slots=True)
class TensorRTResult:
    """A built engine. `layers` goes into the manifest, `compiled` is the whole list behind it."""

    engine: Path
    size: int  # bytes
    backend_version: str
    compute_capabilities: tuple[str, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    profiles: tuple[Profile, ...]
    layers: dict[str, Any]
    compiled: tuple[CompiledLayer, ...]
    warnings: tuple[str, ...]
    seconds: float
    log_path: Path


def build_tensorrt(
    onnx_path: Path,
    out: Path,
    *,
    product: str,
    profiles: Sequence[Profile],
    options: TensorRTOptions = DEFAULT,
    log_path: Path | None = None,
    timing_path: Path | None = None,
    workspace_bytes: int | None = None,
    allow_unfused_attention: bool = False,
    progress: Progress | None = None,
) -> TensorRTResult:
    """Builds `onnx_path` into the file `out`; the backend's whole log goes to `log_path`.

    `options`: targets are those of tensorrt-rtx, at least one; `tensorrt` takes none.
    `timing_path`: measurements of kernels that earlier builds made and this one adds to.
    `allow_unfused_attention`: needed for float32, which has no fused kernel for many queries.
    Raises `BuildError` naming the ONNX node and its source line; `out` is then left untouched.
    """
    start = time.monotonic()
    log_path = log_path or out.with_suffix(".log")
    nodes = OnnxNodes(onnx_path)
    nodes.check_external_data()
    nodes.check_domains()
    try:
        trt = import_tensorrt(product)
    except EngineError as error:
        raise BuildError(str(error)) from None
    logger = process_logger(product)
    with capture(product, log_path) as log:
        try:
            builder = trt.Builder(logger)
        except TypeError:  # the binding's word for a null pointer
            raise builder_failure(product, nodes, log.errors, log_path) from None
        # Strongly typed: layers run in the dtype of their tensors; nothing is demoted to be faster.
        flag = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        network = ParsedNetwork(product, builder.create_network(flag), logger, nodes, log_path)
        config = builder.create_builder_config()
        configure(trt, config, product, options, workspace_bytes)
        timings = load_timing(config, timing_path)
        _add_profiles(product, builder, config, profiles, network, nodes, log, log_path)
        config.progress_monitor = monitor = progress_monitor(trt, progress)
        plan = builder.build_serialized_network(network.network, config)
        if monitor.stopped is not None:
            raise monitor.stopped
        if plan is None:
            raise builder_failure(product, nodes, log.errors, log_path)
        save_timing(timings, timing_path)
    compiled = compiled_layers((text for _, text in log.messages), len(profiles))
    attention = network.attention
    warnings = [text for text in log.warnings if not any(kind in text for kind in HARMLESS)]
    if not compiled:
        warnings.append("the log lists no compiled layers: whether attention fused is unknown")
    elif not allow_unfused_attention:
        _check_fused(nodes, compiled, attention, len(profiles), log_path)
    _write(out, plan)
    return TensorRTResult(
        engine=out,
        size=out.stat().st_size,
        backend_version=trt.__version__,
        compute_capabilities=options.targets,
        inputs=_specs(network.inputs, nodes),
        outputs=_specs(network.outputs, nodes),
        profiles=tuple(profiles),
        layers={
            **layer_counts(network.layer_types, compiled, attention, len(profiles)),
            "activation_bytes": activation_bytes(text for _, text in log.messages),
        },
        compiled=tuple(compiled),
        warnings=tuple(warnings),
        seconds=time.monotonic() - start,
        log_path=log_path,
    )


def _add_profiles(
    product: str,
    builder: Any,
    config: Any,
    profiles: Sequence[Profile],
    network: ParsedNetwork,
    nodes: OnnxNodes,
    log: Log,
    log_path: Path,
) -> None:
    names = {tensor.name for tensor in network.inputs}
    for profile in profiles:
        if profile.keys() != names:
            odd = ", ".join(sorted(profile.keys() ^ names))
            raise BuildError(f"{nodes.path}: its inputs and the profiles differ in {odd}")
        made = builder.create_optimization_profile()
        for name, sizes in profile.items():
            made.set_shape(name, sizes.min, sizes.opt, sizes.max)
        if config.add_optimization_profile(made) < 0:
            raise builder_failure(product, nodes, log.errors, log_path)


def _check_fused(
    nodes: OnnxNodes,
    compiled: Sequence[CompiledLayer],
    attention: Sequence[str],
    num_profiles: int,
    log_path: Path,
) -> None:
    for profile in range(num_profiles):
        unfused = unfused_attention(compiled, attention, profile)
        if unfused:
            raise worded(
                f"{nodes.path}: {len(unfused)} of {len(attention)} attention layers have no fused "
                f"TensorRT kernel in profile {profile}, first {nodes.describe(unfused[0])}",
                "fused kernels exist for float16 and bfloat16 with head sizes that are multiples "
                "of 16 up to 256",
                "choose --dtype float16 or bfloat16, or --dtype float32 to allow unfused attention",
                nodes.chain(unfused[0]),
                log=log_path,
            )


def _specs(tensors: Sequence[Any], nodes: OnnxNodes) -> tuple[TensorSpec, ...]:
    """dtypes and static sizes as TensorRT has them, names of dynamic dimensions from ONNX."""
    return tuple(
        TensorSpec(
            tensor.name,
            DTYPES.get(tensor.dtype.name, tensor.dtype.name.lower()),
            tuple(
                size if size >= 0 else name
                for size, name in zip(tensor.shape, nodes.dim_names(tensor.name), strict=True)
            ),
        )
        for tensor in tensors
    )


def _write(out: Path, plan: Any) -> None:
    part = out.with_name(out.name + ".part")
    try:
        part.write_bytes(memoryview(plan))
        part.replace(out)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise BuildError(f"{out}: cannot be written ({error.strerror})") from None
