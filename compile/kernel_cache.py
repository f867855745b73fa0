"""Runs every kind of step of a new CUDA engine once and keeps the kernels that were used.

A kernel is compiled for each configuration, and for integers that are 1, multiples of 16 or
neither; launchers choose configurations by the number of rows. So the steps are: decodes of all
captured batch sizes, with each kind of sampling; prefills of many lengths; prefills beside decodes.
It is a process of its own, `python -m seekforge.compile.kernel_cache ENGINE`: each kernel that is
used there is looked up in Triton's cache, which says which they are. Those that are in the user's
cache already are not compiled again.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from seekforge.kernels.errors import BuildError
from seekforge.runtime.device_sampling import DeviceSampler
from seekforge.runtime.graphs import ladder
from seekforge.runtime.inductor import InductorSession
from seekforge.runtime.kernel_cache import FOLDER, GROUP, relocate
from seekforge.runtime.manifest import Limits, read_manifest
from seekforge.runtime.sampling import SamplingParams, make_key
from seekforge.runtime.session import Chunk

KEPT = (".cubin", ".json", ".so")


def ship_kernels(engine: Path) -> None:
    """Fills `engine`/kernels; the manifest is there already. Raises BuildError."""
    command = [sys.executable, "-m", "seekforge.compile.kernel_cache", str(engine)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = "\n".join(done.stderr.splitlines()[-15:])
        raise BuildError(f"{engine}: the new engine's steps could not be run:\n{lines}")


def record_used() -> set[Path]:
    """The folders of Triton's cache that are asked for from now on in this process."""
    from triton import knobs
    from triton.runtime.cache import FileCacheManager

    used: set[Path] = set()

    class Recorder(FileCacheManager):  # type: ignore[misc]
        def __init__(self, key: str, *args: Any, **kwargs: Any) -> None:
            super().__init__(key, *args, **kwargs)
            used.add(Path(self.cache_dir))

    knobs.cache.manager_class = Recorder
    return used


def collect(folders: Iterable[Path], target: Path) -> None:
    """Copies from folders of Triton's cache what a kernel needs to be loaded, paths made
    relative."""
    for folder in folders:
        for path in folder.iterdir():
            if path.suffix not in KEPT:
                continue
            (target / folder.name).mkdir(parents=True, exist_ok=True)
            if path.name.startswith(GROUP):
                content = relocate(path.read_bytes(), Path(), KEPT)
                (target / folder.name / path.name).write_bytes(content)
            else:
                shutil.copyfile(path, target / folder.name / path.name)


def lengths(most: int) -> Iterator[int]:
    """Numbers of new tokens, up to `most`: around every power of two."""
    sizes = {most, most - 1}
    for power in range(1, most.bit_length()):
        sizes |= {1 << power, (1 << power) + 1, 3 << power >> 1}
    yield from sorted(size for size in sizes if 2 <= size <= most)


def steps(limits: Limits, block_size: int) -> Iterator[list[Chunk]]:
    """The steps that are no decodes: a prefill alone, and one with a decode beside it."""
    for length in lengths(min(limits.max_chunk, limits.max_len)):
        table = range(1, 1 + -(-length // block_size))
        prefill = Chunk([0] * length, 0, table, [length - 1])
        yield [prefill]
        if limits.max_batch > 1:
            yield [Chunk([0], 0, [0], [0]), prefill]


@dataclass(eq=False)
class Row:
    """What a sampler sees of a sequence."""

    params: SamplingParams
    token_ids: list[int] = field(default_factory=lambda: [0])
    num_prompt: int = 1
    num_output: int = 0
    key: int = make_key(0, 0)
    generator: torch.Generator = field(default_factory=torch.Generator)


def warm_up(session: InductorSession) -> None:
    """Runs all kinds of steps, and samples from their logits."""
    manifest = session.manifest
    limits, block_size = manifest.limits, manifest.kv.block_size
    session.allocate(1 + -(-limits.max_chunk // block_size), block_size)
    session.capture_all()
    sampler = DeviceSampler(manifest.vocab_size, [0], limits.max_batch, session.device)
    unbanned = range(manifest.vocab_size)
    plain = DeviceSampler(manifest.vocab_size, unbanned, limits.max_batch, session.device)
    for size in ladder(limits.max_batch):
        logits = session.step([Chunk([0], 0, [0], [0])] * size)
        for params in (
            SamplingParams(),
            SamplingParams(temperature=1.0, top_p=0.9),
            SamplingParams(temperature=1.0, top_k=20, repetition_penalty=1.1),
        ):
            for each in (sampler, plain):
                each.draw(logits, [Row(params) for _ in range(size)])
    for chunks in steps(limits, block_size):
        session.step(chunks)
    torch.cuda.synchronize()


def main(engine: Path) -> None:
    used = record_used()
    warm_up(InductorSession(engine, read_manifest(engine, check_files=False)))
    collect(used, engine / FOLDER)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
