"""The two optimisation profiles of a padded graph: context and generation. Pure.

In: the engine's limits and the KV layout. Out: input name -> shape range, in the graph's order.
"""

from __future__ import annotations

import math

from seekforge.kernels.errors import BuildError
from seekforge.runtime.manifest import KVLayout, Limits
from seekforge.runtime.profiles import Profile, ShapeRange

Sizes = tuple[int, int, int]  # min, opt, max
INDEX_MAX = 2**31 - 1


def make_profiles(limits: Limits, kv: KVLayout) -> list[Profile]:
    """`[context, generation]`, from general to special (see `select_profile`).

    context: one sequence, 1..max_chunk tokens, logits of any of them. generation: one token of
    1..max_batch sequences. Both: 1..ceil(max_len / block_size) blocks a row, and as many blocks in
    the pools as a 32-bit index reaches. A limit of 1 gives a static dimension.
    """
    widest = max(math.prod(shape) for shape in kv.pools.values())
    tokens = kv.block_size * widest  # elements of a block
    chunk = min(limits.max_chunk, limits.max_len)
    row = -(-limits.max_len // kv.block_size)
    typical, reachable = limits.max_batch * row, INDEX_MAX // tokens
    if typical > reachable:
        raise BuildError(
            f"max_batch {limits.max_batch} x max_len {limits.max_len} needs {typical} blocks of "
            f"{kv.block_size} tokens; a pool with {tokens} elements a block may have {reachable}: "
            "lower --max-batch or --max-len"
        )
    blocks, row_blocks = (1, typical, reachable), _up_to(row, opt=row // 2)
    one, batch = (1, 1, 1), _up_to(limits.max_batch)
    context = _profile(kv, one, _up_to(chunk), row_blocks, _up_to(chunk, opt=1), blocks)
    generation = _profile(kv, batch, one, row_blocks, batch, blocks)
    return [context, generation]


def _up_to(largest: int, opt: int | None = None) -> Sizes:
    return 1, max(1, largest if opt is None else min(opt, largest)), largest


def _profile(
    kv: KVLayout, batch: Sizes, seq: Sizes, row_blocks: Sizes, rows: Sizes, blocks: Sizes
) -> Profile:
    inputs: dict[str, tuple[Sizes, ...]] = {
        "token_ids": (batch, seq),
        "positions": (batch, seq),
        "block_tables": (batch, row_blocks),
        "past_lens": (batch,),
        "logits_rows": (rows,),
    }
    for name in kv.names:
        inputs[name] = (blocks, *((size,) * 3 for size in (kv.block_size, *kv.shape(name))))
    return {name: ShapeRange(*zip(*dims, strict=True)) for name, dims in inputs.items()}
