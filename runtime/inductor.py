"""Session of an AOTInductor engine: the ragged form, prefill chunks and decodes in one call.

In: an engine directory with model.pt2 (code), decode.pt2 (code for one token, on the CPU) and
weights.safetensors. The weights are loaded once and shared by both packages. The pools are mutated
in place by the graph. On a GPU, steps in which each sequence has one new token replay captured
graphs (graphs.py), on inputs that never move (decode_inputs.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor.cpu_vec_isa import valid_vec_isa_list

# The packages call these operators.
import seekforge.kernels.add_rms_norm
import seekforge.kernels.int4_linear
import seekforge.kernels.int4_moe_experts
import seekforge.kernels.linear
import seekforge.kernels.moe_experts
import seekforge.kernels.moe_route
import seekforge.kernels.paged_attention
import seekforge.kernels.paged_mla_attention
import seekforge.kernels.rms_norm
import seekforge.kernels.rope_paged_attention
import seekforge.kernels.rope_paged_mla_attention
import seekforge.kernels.shared_experts
import seekforge.kernels.swiglu  # noqa: F401
from seekforge.kernels.errors import EngineError
from seekforge.runtime.decode_inputs import DecodeInputs, is_decode, on_device, place_tokens
from seekforge.runtime.graphs import Capture, CudaCapture, Graphs, ladder
from seekforge.runtime.kernel_cache import install_kernels
from seekforge.runtime.manifest import Manifest
from seekforge.runtime.memory import Budget
from seekforge.runtime.padded import clear_blocks, free_bytes, make_pools
from seekforge.runtime.session import Chunk, Track, ragged_inputs
from seekforge.runtime.weights import load_weights

MODEL_NAME = "model.pt2"
DECODE_NAME = "decode.pt2"
WEIGHTS_NAME = "weights.safetensors"


class InductorSession:
    """Runs the engine on the device it was compiled for.

    capture: how decode steps are captured; None: as CUDA graphs on a GPU, not at all on the CPU.
    weights: instead of those of the file.
    """

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        *,
        capture: Capture | None = None,
        weights: dict[str, Tensor] | None = None,
    ) -> None:
        self.manifest = manifest
        install_kernels(directory)
        self.device = self.logits_device = torch.device(manifest.device)
        if weights is None:
            weights = load_weights(directory / WEIGHTS_NAME, self.device)
        self.weights = weights
        self.model = self._load(directory / MODEL_NAME)
        decode = directory / DECODE_NAME
        self.decode = self._load(decode) if decode.exists() else self.model
        cuda = self.device.type == "cuda"
        self.capture = capture or (CudaCapture(self.device) if cuda else None)
        self.pools: list[Tensor] = []
        self.inputs: DecodeInputs | None = None
        self.graphs: Graphs | None = None

    def _load(self, path: Path) -> Any:
        try:
            # Loading tells which vector instructions this processor has, to compare: a compiler
            # run and a process for each of a dozen kinds, which takes up to a minute.
            with torch._inductor.config.patch("cpp.vec_isa_ok", True):
                package = torch._inductor.aoti_load_package(str(path), run_single_threaded=True)
            valid_vec_isa_list.cache_clear()  # untested now; a compiler run would believe it
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

    def pool_bytes(self, max_batch: int, max_chunk: int, block_size: int) -> int:
        """On a GPU by memory.py, after a dry run. Raises EngineError where nothing is left."""
        if self.device.type == "cpu":
            return free_bytes(self.device)
        budget = self.dry_run(max_batch, max_chunk, block_size)
        if budget.kv < block_size * self.manifest.kv.token_bytes:
            raise EngineError(
                f"no GPU memory is left for the KV cache ({budget}): free some, or give a smaller "
                f"max_batch than {max_batch} or max_chunk than {max_chunk}"
            )
        return budget.kv

    def dry_run(self, max_batch: int, max_chunk: int, block_size: int) -> Budget:
        """Runs the two largest steps on pools just large enough, which are then gone."""
        self.allocate(-(-max_chunk // block_size), block_size)
        graphs, self.graphs = self.graphs, None
        assert graphs is not None
        table = range(-(-max_chunk // block_size))
        rows = range(min(max_batch, max_chunk))
        chunk = self._peak([Chunk([0] * max_chunk, 0, table, rows)])
        decode = self._peak([Chunk([0], 0, [0], [0])] * max_batch)
        self.pools, self.inputs = [], None
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return Budget(total, total - free, chunk, decode, len(graphs.sizes))

    def _peak(self, chunks: Sequence[Chunk]) -> int:
        """Bytes that a step takes beside what was there before."""
        self.step(chunks)  # what is allocated once, such as cuBLAS's workspace, is no part of it
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.step(chunks)
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before

    def allocate(self, num_blocks: int, block_size: int) -> None:
        # The old ones go before the new ones are made; graphs hold their addresses.
        self.graphs = self.inputs = None
        self.pools = []
        # One block more, which no sequence owns: rows of a batch without a sequence look at it.
        spare = 0 if self.capture is None else 1
        pools = make_pools(self.manifest.kv, num_blocks + spare, block_size, self.device)
        self.pools = list(pools.values())
        if self.capture is not None:
            limits = self.manifest.limits
            width = -(-limits.max_len // block_size)
            rows = limits.max_batch
            self.inputs = DecodeInputs(rows, width, block_size, num_blocks, self.device)
            self.graphs = Graphs(self._decode, self.capture, ladder(limits.max_batch))

    def capture_all(self, track: Track = iter) -> None:
        """Captures the decode steps of all batch sizes now, not when they first come up."""
        if self.graphs is not None:
            assert self.inputs is not None
            self.inputs.write([], self.graphs.sizes[-1])  # what the capture runs touches no block
            self.graphs.capture_all(track)

    def clear(self, blocks: Sequence[int]) -> None:
        clear_blocks(self.pools, blocks)

    def step(self, chunks: Sequence[Chunk], last: Tensor | None = None) -> Tensor:
        assert self.pools, "allocate() comes before step()"
        if self.graphs is not None and is_decode(chunks):
            size = self.graphs.size_for(len(chunks))
            if size is not None:
                assert self.inputs is not None
                self.inputs.write(chunks, size, last)
                return self.graphs.run(size)[: len(chunks)]
        ragged = ragged_inputs(chunks, self.pools[0].shape[1])
        index = [
            on_device(tensor, self.device)
            for tensor in (
                ragged.token_ids,
                ragged.positions,
                ragged.slot_mapping,
                ragged.block_tables,
                ragged.context_lens,
                ragged.query_start,
                ragged.logits_rows,
            )
        ]
        place_tokens(index[0], ragged.query_start.tolist()[:-1], chunks, last)
        one = len(ragged.token_ids) == 1 and len(ragged.logits_rows) == 1
        loader = self.decode if one else self.model
        (logits,) = loader.run([*index, *self.pools])
        rows: Tensor = logits[: ragged.num_rows]
        return rows

    def _decode(self, size: int) -> Tensor:
        assert self.inputs is not None
        logits: Tensor
        (logits,) = self.model.run([*self.inputs.tensors(size), *self.pools])
        return logits
