"""A builder's configuration: verbosity, targets, flags, workspace, timing cache, progress.

In: `TensorRTOptions` and a builder's config. Out: the config filled. The timing cache is the file
`timing.cache` of the bundle, for `tensorrt` alone: TensorRT-RTX 1.7 takes one and ignores it, with
a warning that it does (what it compiles late is kept by runtime/tensorrt_cache.py instead).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from seekforge.compile.tensorrt_options import TensorRTOptions, known_targets, unknown_targets
from seekforge.kernels.errors import BuildError

TIMING_CACHE = "timing.cache"
Progress = Callable[[str, float], None]  # phase as the backend names it, its fraction done


def configure(
    trt: Any, config: Any, product: str, options: TensorRTOptions, workspace_bytes: int | None
) -> None:
    """Raises BuildError for targets that the product does not build for."""
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # logs the compiled layers
    if workspace_bytes is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace_bytes)
    if options.strip:
        config.set_flag(trt.BuilderFlag.STRIP_PLAN)
        # Not REFIT_IDENTICAL, which STRIP_PLAN alone would mean: its plans fit one set of weights.
        config.set_flag(trt.BuilderFlag.REFIT)
    if options.streaming_bytes is not None:
        config.set_flag(trt.BuilderFlag.WEIGHT_STREAMING)
    _set_targets(trt, config, product, options)


def _set_targets(trt: Any, config: Any, product: str, options: TensorRTOptions) -> None:
    targets = options.targets
    if product == "tensorrt":
        if targets:
            raise BuildError(
                f"tensorrt builds for the GPU it runs on; compute capability {', '.join(targets)} "
                "cannot be chosen (--backend tensorrt-rtx can)"
            )
        return
    if (refused := unknown_targets(trt, targets)) is not None:
        raise BuildError(
            f"{refused}; give one of them with --target, or build for another GPU with --backend "
            "inductor or tensorrt"
        )
    known = known_targets(trt)
    config.num_compute_capabilities = len(targets)
    for index, target in enumerate(targets):
        config.set_compute_capability(known[target], index)


def load_timing(config: Any, path: Path | None) -> Any:
    """Gives the config the timing cache of `path`, an empty one where there is none yet or another
    version or GPU wrote it. Returns it, or None without a path."""
    if path is None:
        return None
    cache = config.create_timing_cache(path.read_bytes() if path.is_file() else b"")
    if cache is None or not config.set_timing_cache(cache, False):
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, False)
    return cache


def save_timing(cache: Any, path: Path | None) -> None:
    """Writes what the build has measured beside what was known."""
    if cache is None or path is None:
        return
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(memoryview(cache.serialize()))
    part.replace(path)


def progress_monitor(trt: Any, progress: Progress | None) -> Any:
    """A progress monitor. An exception in `progress` (Ctrl-C too) cancels the build and is kept in
    `stopped`, because TensorRT swallows what its callbacks raise."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}
            self.stopped: BaseException | None = None

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            self.steps[name] = max(1, steps)

        def phase_finish(self, name: str) -> None:
            self.steps.pop(name, None)

        def step_complete(self, name: str, step: int) -> bool:
            try:
                if progress is not None:
                    progress(name, min(1.0, (step + 1) / self.steps.get(name, 1)))
            except BaseException as error:
                self.stopped = error
            return self.stopped is None

    return Monitor()
