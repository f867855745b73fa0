"""Decode steps captured as CUDA graphs, one for each of a ladder of batch sizes.

In: a function that runs a decode step of `size` rows on buffers that never move. Out: its logits,
by replaying what that function launched: the host pays for one call instead of some hundred
launches. All graphs share one pool of memory, since only one runs at a time; so a replay's logits
hold until the next one. A size that can't be captured is run plainly from then on, which is said
once. It knows nothing of engines, weights or sequences.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from seekforge.runtime.session import Track

# Memory that must stay free behind a capture: the driver keeps some for each graph's kernels.
MARGIN = 256 << 20


def ladder(most: int) -> tuple[int, ...]:
    """Batch sizes to capture: fine where a padded row is a large share of a step, up to `most`."""
    sizes = {1, 2, 4, *range(8, 65, 8), *range(80, most + 1, 16), most}
    return tuple(sorted(size for size in sizes if size <= most))


@dataclass(frozen=True, slots=True)
class Captured:
    """replay: runs the step again on the same buffers; output: what it writes."""

    replay: Callable[[], None]
    output: Tensor


class Capture(Protocol):
    """How a step becomes replayable; the only part that needs a GPU."""

    def __call__(self, step: Callable[[], Tensor]) -> Captured: ...


class CudaCapture:
    """Captures into one memory pool, on one stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]

    def __call__(self, step: Callable[[], Tensor]) -> Captured:
        need = self._warm_up(step)
        free = torch.cuda.mem_get_info(self._device)[0]
        if need + MARGIN > free:
            raise MemoryError(
                f"its step takes {need / 2**20:.0f} MiB, and {free / 2**20:.0f} MiB are free"
            )
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            output = step()
        return Captured(graph.replay, output)

    def _warm_up(self, step: Callable[[], Tensor]) -> int:
        """Runs the step as it will be captured, so that kernels are compiled and loaded and the
        libraries have their workspaces. Returns the bytes it takes."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                step()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before


class Graphs:
    """Steps of the sizes of a ladder, captured when first asked for, or ahead by `capture_all`."""

    def __init__(
        self, step: Callable[[int], Tensor], capture: Capture, sizes: tuple[int, ...]
    ) -> None:
        self.sizes = sizes
        self._step = step
        self._capture = capture
        self._captured: dict[int, Captured | None] = {}  # None: it can't be
        self._warned = False

    def size_for(self, rows: int) -> int | None:
        """The smallest size with room for so many rows, or None."""
        at = bisect_left(self.sizes, rows)
        return self.sizes[at] if at < len(self.sizes) else None

    def run(self, size: int) -> Tensor:
        """The step of `size` rows -> its logits, which hold until the next run."""
        if size not in self._captured:
            self._captured[size] = self._try(size)
        captured = self._captured[size]
        if captured is None:
            return self._step(size)
        captured.replay()
        return captured.output

    def capture_all(self, track: Track = iter) -> None:
        """Captures all sizes, the largest first: the smaller ones then fit in its memory."""
        for size in track(sorted(self.sizes, reverse=True)):
            if size not in self._captured:
                self._captured[size] = self._try(size)

    def _try(self, size: int) -> Captured | None:
        try:
            return self._capture(lambda: self._step(size))
        except Exception as error:
            if not self._warned:
                warnings.warn(
                    f"the decode step of {size} sequences could not be captured as a CUDA graph: "
                    f"{str(error).splitlines()[0]}; such steps run without one, which is slower",
                    stacklevel=3,
                )
            self._warned = True
            return None
