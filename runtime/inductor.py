"""Session of an AOTInductor engine: the ragged form, prefill chunks and decodes in one call.

In: an engine directory with model.pt2 (code), decode.pt2 (code for one token, on the CPU) and
weights.safetensors. The weights are mapped once and shared by both packages. The pools are mutated
in place by the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

# The packages call these operators.
import seekforge.kernels.int4_linear
import seekforge.kernels.int4_moe_experts
import seekforge.kernels.moe_experts
import seekforge.kernels.moe_route
import seekforge.kernels.paged_attention
import seekforge.kernels.paged_mla_attention  # noqa: F401
from seekforge.kernels.errors import EngineError
from seekforge.runtime.manifest import Manifest
from seekforge.runtime.padded import clear_blocks, make_pools
from seekforge.runtime.session import Chunk, ragged_inputs

MODEL_NAME = "model.pt2"
DECODE_NAME = "decode.pt2"
WEIGHTS_NAME = "weights.safetensors"


class InductorSession:
    """Runs the engine on the device it was compiled for."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self.device = torch.device(manifest.device)
        self.weights = _map_weights(directory / WEIGHTS_NAME, self.device)
        self.model = self._load(directory / MODEL_NAME)
        decode = directory / DECODE_NAME
        self.decode = self._load(decode) if decode.exists() else self.model
        self.pools: list[Tensor] = []

    def _load(self, path: Path) -> Any:
        try:
            package = torch._inductor.aoti_load_package(str(path), run_single_threaded=True)
            names = package.get_constant_fqns()
            package.load_constants(
                {name: self.weights[name] for name in names},
                check_full_update=True,
                user_managed=True,
            )
        except Exception as error:
            raise EngineError(
                f"{path}: torch {torch.__version__} cannot load it: {error}. It was built with "
                f"torch {self.manifest.backend_version}; build it again on this machine"
            ) from error
        return package.loader

    def allocate(self, num_blocks: int, block_size: int) -> None:
        self.pools = []  # the old ones go before the new ones are made
        pools = make_pools(self.manifest.kv, num_blocks, block_size, self.device)
        self.pools = list(pools.values())

    def clear(self, blocks: Sequence[int]) -> None:
        clear_blocks(self.pools, blocks)

    def step(self, chunks: Sequence[Chunk]) -> Tensor:
        assert self.pools, "allocate() comes before step()"
        ragged = ragged_inputs(chunks, self.pools[0].shape[1])
        index = (
            ragged.token_ids,
            ragged.positions,
            ragged.slot_mapping,
            ragged.block_tables,
            ragged.context_lens,
            ragged.query_start,
            ragged.logits_rows,
        )
        one = len(ragged.token_ids) == 1 and len(ragged.logits_rows) == 1
        loader = self.decode if one else self.model
        (logits,) = loader.run([*(tensor.to(self.device) for tensor in index), *self.pools])
        rows: Tensor = logits[: ragged.num_rows].float().cpu()
        return rows


def _map_weights(path: Path, device: torch.device) -> dict[str, Tensor]:
    """All weights by name; on the CPU the file's own pages, read when first touched."""
    with safe_open(path, framework="pt", device=str(device)) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
