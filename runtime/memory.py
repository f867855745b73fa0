"""Where a GPU's memory goes when an engine runs on it, and what is left for the KV cache.

    KV cache = total - taken - workspace - graphs - slack
    taken      by the driver, the libraries, the weights and other programs: what is not free once
               the weights are there and the two largest steps have run
    workspace  what the larger of these takes while it runs: a prefill of max_chunk tokens, or
               max_batch decodes
    graphs     of each captured size GRAPH_BYTES, and twice what the largest decode step takes:
               sizes captured one after the other need not fit into each other's memory
    slack      SLACK of the total: fragments, kernels that are loaded later

Bytes throughout. `seekforge inspect` makes the same sum ahead of time (compile/liveness.py): there
`taken` is CONTEXT and the weights, and the steps' workspace is found in the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from seekforge.runtime.graphs import ladder

GRAPH_BYTES = 8 << 20
SLACK = 0.02
CONTEXT = 900 << 20  # driver, cuBLAS and its workspaces, kernels' code; 850 to 1,060 on an H200


@dataclass(frozen=True, slots=True)
class Budget:
    """chunk, decode: bytes that the two largest steps take; sizes: how many are captured."""

    total: int
    taken: int
    chunk: int
    decode: int
    sizes: int

    @property
    def workspace(self) -> int:
        return max(self.chunk, self.decode)

    @property
    def graphs(self) -> int:
        return self.sizes * GRAPH_BYTES + 2 * self.decode

    @property
    def slack(self) -> int:
        return int(SLACK * self.total)

    @property
    def kv(self) -> int:
        """Bytes for the pools; not positive where the rest is too large already."""
        return self.total - self.taken - self.workspace - self.graphs - self.slack

    @classmethod
    def expected(
        cls, total: int, weights: int, memory: Mapping[str, int], max_batch: int
    ) -> Budget:
        """Ahead of time. weights: bytes of the file; memory: the manifest's."""
        sizes = len(ladder(max_batch))
        return cls(total, CONTEXT + weights, memory["chunk"], memory["decode"], sizes)

    def __str__(self) -> str:
        names = ("total", "taken", "workspace", "graphs", "slack")
        return ", ".join(f"{name} {getattr(self, name) / 2**30:.2f} GiB" for name in names)
