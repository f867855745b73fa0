"""Runs every kind of step of a new CUDA engine once and keeps the kernels that were used.

A kernel is compiled for each configuration, and for integers that are 1, multiples of 16 or
neither; launchers choose configurations by the number of rows. So the steps are: decodes of all
captured batch sizes, with each kind of sampling; prefills of many lengths, alone, behind a long
context and beside decodes; decodes of many contexts beside prefills.
Triton compiles one kernel after the other, so the steps are shared out to several processes,
`python -m seekforge.compile.kernel_cache ENGINE INDEX COUNT TARGET`: each kernel that is used there
is looked up in Triton's cache, which says which they are. Those that are in the user's cache
already are not compiled again. Weights are random, and tensors of one shape share their memory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from seekforge.compile.bundle import tokenizer_missing
from seekforge.kernels.errors import BuildError
from seekforge.runtime.device_sampling import DeviceSampler
from seekforge.runtime.graphs import ladder
from seekforge.runtime.inductor import WEIGHTS_NAME, InductorSession
from seekforge.runtime.kernel_cache import FOLDER, GROUP, relocate
from seekforge.runtime.manifest import Limits, Manifest, read_manifest
from seekforge.runtime.prompt import load_tokenizer
from seekforge.runtime.sampling import SamplingParams, make_key
from seekforge.runtime.session import Chunk
from seekforge.runtime.weights import DTYPES, read_header

KEPT = (".cubin", ".json", ".so")
PROCESSES = 6  # more of them compile the same kernels first
Item = TypeVar("Item")


def ship_kernels(engine: Path) -> None:
    """Fills `engine`/kernels; the manifest is there already. Raises BuildError."""
    count = max(1, min(PROCESSES, len(os.sched_getaffinity(0)) // 2))
    try:
        run_steps(engine, count)
    except BuildError:
        if count == 1:
            raise
        run_steps(engine, 1)  # a GPU may be too small for several processes, or for one at a time


def run_steps(engine: Path, count: int) -> None:
    """Shares the steps out to `count` processes and collects the kernels that these used."""
    command = [sys.executable, "-m", "seekforge.compile.kernel_cache", str(engine)]
    running = []
    with tempfile.TemporaryDirectory(prefix="seekforge-") as temporary:
        try:
            for index in range(count):
                part, log = Path(temporary) / str(index), Path(temporary) / f"{index}.log"
                with log.open("w") as said:
                    process = subprocess.Popen(
                        [*command, str(index), str(count), str(part)], stdout=said, stderr=said
                    )
                running.append((process, part, log))
            for process, _, log in running:
                if code := process.wait():
                    lines = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                    raise BuildError(
                        f"{engine}: the new engine's steps could not be run (exit code {code}):\n"
                        f"{lines}"
                    )
            for _, part, _ in running:  # now: one that started late would load half of them
                shutil.copytree(part, engine / FOLDER, dirs_exist_ok=True)
        finally:
            for process, _, _ in running:
                process.kill()
                process.wait()


def stand_ins(path: Path, device: torch.device) -> dict[str, Tensor]:
    """Tensors like those of a weights file, without reading it: one for each shape and dtype."""
    made: dict[tuple[Any, ...], Tensor] = {}
    named = {}
    for name, entry in read_header(path)[0].items():
        kind = (entry["dtype"], *entry["shape"])
        if kind not in made:
            dtype = DTYPES[entry["dtype"]]
            made[kind] = torch.zeros(entry["shape"], dtype=dtype, device=device)
            if dtype.is_floating_point:
                made[kind].normal_(std=0.02)
        named[name] = made[kind]
    return named


def share(items: list[Item], index: int, count: int) -> list[Item]:
    """One of `count` runs of neighbours, which have most kernels in common."""
    return items[len(items) * index // count : len(items) * (index + 1) // count]


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
    target.mkdir(parents=True, exist_ok=True)
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


def steps(limits: Limits, block_size: int, blocks: int) -> Iterator[list[Chunk]]:
    """The steps that are no decodes: of every length a prompt alone, beside a decode, and as the
    end of the longest context; of contexts of every size a decode beside a short prompt. In how
    many parts a context is split follows from the width of the block tables, which repeat the
    pool's `blocks`: what these hold does not matter."""

    def chunk(length: int, context: int) -> Chunk:
        table = [i % blocks for i in range(-(-context // block_size))]
        return Chunk([0] * length, context - length, table, [length - 1])

    for length in lengths(min(limits.max_chunk, limits.max_len)):
        yield [chunk(length, length)]
        yield [chunk(length, limits.max_len)]
        if limits.max_batch > 1:
            yield [chunk(1, 1), chunk(length, length)]
    for context in lengths(limits.max_len):
        if limits.max_batch > 1:
            yield [chunk(1, context), chunk(2, 2)]


@dataclass(eq=False)
class Row:
    """What a sampler sees of a sequence."""

    params: SamplingParams
    token_ids: list[int] = field(default_factory=lambda: [0])
    num_prompt: int = 1
    num_output: int = 0
    key: int = make_key(0, 0)
    generator: torch.Generator = field(default_factory=torch.Generator)


def sample(manifest: Manifest, known: Iterable[int]) -> None:
    """Draws from logits of all captured batch sizes, by every kind of parameters."""
    device, most = torch.device(manifest.device), manifest.limits.max_batch
    sampler = DeviceSampler(manifest.vocab_size, known, most, device)
    dtype = getattr(torch, manifest.dtype)
    for size in ladder(most):
        logits = torch.randn(size, manifest.vocab_size, dtype=dtype, device=device)
        for params in (
            SamplingParams(),
            SamplingParams(temperature=1.0, top_p=0.9),
            SamplingParams(temperature=1.0, top_k=20, repetition_penalty=1.1),
        ):
            sampler.draw(logits, [Row(params) for _ in range(size)])


def main(engine: Path, index: int, count: int, part: Path) -> None:
    """The first of several processes samples, which needs no engine; the others share the steps."""
    used = record_used()
    manifest = read_manifest(engine, check_files=False)
    if index == 0:
        known = range(manifest.vocab_size)
        if tokenizer_missing(engine) is None:
            known = load_tokenizer(engine).get_vocab().values()
        sample(manifest, known)
    if index > 0 or count == 1:
        weights = stand_ins(engine / WEIGHTS_NAME, torch.device(manifest.device))
        session = InductorSession(engine, manifest, weights=weights)
        limits, block_size = manifest.limits, manifest.kv.block_size
        blocks = 1 + -(-limits.max_chunk // block_size)
        session.allocate(blocks, block_size)
        # Decodes and short prefills, which have many kernels in common, come first.
        runs: list[Callable[[], Any]] = [session.capture_all]
        runs += [partial(session.step, chunks) for chunks in steps(limits, block_size, blocks)]
        for run in share(runs, max(0, index - 1), max(1, count - 1)):
            run()
    torch.cuda.synchronize()
    collect(used, part)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
