"""What sessions of the padded form share: pools, a step as padded batches, shapes of the outputs.

The graph is pure: it reads the pools and returns the new keys and values, which are scattered here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from seekforge.runtime.manifest import KVLayout, Manifest
from seekforge.runtime.session import Chunk, padded_batches, scatter_kv

# Of the pools: an upper bound on the CPU, a share of the free memory on a GPU.
CPU_POOL_BYTES = 4 << 30
GPU_POOL_SHARE = 0.9

Run = Callable[[dict[str, Tensor]], dict[str, Tensor]]  # inputs by name -> outputs by name


def make_pools(
    kv: KVLayout, num_blocks: int, block_size: int, device: torch.device
) -> dict[str, Tensor]:
    """Zeroed pools by name, in the order of the graph's inputs, [blocks, block_size, ...]."""
    dtype = getattr(torch, kv.dtype)
    return {
        name: torch.zeros((num_blocks, block_size, *kv.shape(name)), dtype=dtype, device=device)
        for name in kv.names
    }


def free_bytes(device: torch.device) -> int:
    """Bytes for pools where nothing is known of a step's own needs."""
    if device.type == "cpu":
        return CPU_POOL_BYTES
    return int(torch.cuda.mem_get_info(device)[0] * GPU_POOL_SHARE)


def clear_blocks(pools: Iterable[Tensor], blocks: Sequence[int]) -> None:
    """Zeroes the given blocks of all pools."""
    for pool in pools:
        pool[torch.tensor(list(blocks), dtype=torch.long, device=pool.device)] = 0


def run_padded(
    manifest: Manifest, pools: dict[str, Tensor], chunks: Sequence[Chunk], run: Run
) -> Tensor:
    """One step: `run` for each padded batch, then its new K and V into the pools -> logits."""
    assert pools, "allocate() comes before step()"
    rows = sum(len(chunk.rows) for chunk in chunks)
    logits = torch.empty(rows, manifest.vocab_size)
    first = next(iter(pools.values()))
    for batch in padded_batches(chunks, first.shape[1]):
        outputs = run(
            {
                "token_ids": batch.token_ids,
                "positions": batch.positions,
                "block_tables": batch.block_tables,
                "past_lens": batch.past_lens,
                "logits_rows": batch.logits_rows,
                **pools,
            }
        )
        slots = batch.slots
        if not bool((slots < 0).any()):
            slots = slots.to(first.device)  # one transfer for all layers
        for name, pool in pools.items():  # k_pool_3 <- new_k_3
            scatter_kv(pool, outputs["new_" + name.replace("pool_", "")], slots)
        if len(batch.output_rows):
            logits[batch.output_rows] = outputs["logits"].float().cpu()
    return logits


def output_shapes(manifest: Manifest, inputs: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """The shape of every output of one run, from the sizes of its inputs."""
    batch, seq = inputs["token_ids"].shape
    sizes = {"rows": len(inputs["logits_rows"]), "batch": batch, "seq": seq}
    return {
        spec.name: tuple(sizes[d] if isinstance(d, str) else d for d in spec.shape)
        for spec in manifest.outputs
    }
