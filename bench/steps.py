"""Where the time and the memory of a CUDA engine's steps go, without anything around them.

    python bench/steps.py ENGINE... [--batch 1,8,32] [--context 2048] [--prefill 4096]

For each engine: seconds to open it; the memory plan beside what a dry run takes; what each captured
graph takes; decode steps as graph replays and as plain steps (ms, tokens/s, GB/s, % of the copy
bandwidth measured here, their difference); a prefill; the kernels of a replay and of the prefill by
time. Sampling and scheduling are not in these times: bench/decode.py has them, and peers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from seekforge.compile.bench_engines import timed
from seekforge.compile.bench_kernels import measure_ceilings
from seekforge.compile.bench_limits import decode_bytes
from seekforge.runtime.fit import resolve_engine
from seekforge.runtime.inductor import WEIGHTS_NAME
from seekforge.runtime.memory import Budget
from seekforge.runtime.session import Chunk, open_session

BLOCK, KERNELS, MIB, GIB = 16, 20, 1 << 20, 1 << 30


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engines", nargs="+", type=Path)
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--prefill", type=int, default=4096)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: no CUDA GPU here", file=sys.stderr)
        return 2
    copy = measure_ceilings().copy
    print(f"{torch.cuda.get_device_name()}: copy {copy / 1e12:.2f} TB/s")
    for path in args.engines:
        engine = Engine(path)
        engine.memory(args.prefill)
        most = engine.limits.max_batch
        batches = [min(int(word), most) for word in args.batch.split(",")]
        engine.captures(max(batches), args.context)
        for batch in batches:
            engine.decode(batch, args.context, copy)
        engine.prefill(args.prefill)
        for batch in (batches[0], batches[-1]):
            engine.kernels(f"decode B={batch}", partial(engine.replay, batch), 3)
        engine.kernels("prefill", partial(engine.prefill_step, args.prefill), 1)
    return 0


class Engine:
    """One engine under measurement."""

    def __init__(self, path: Path) -> None:
        directory = resolve_engine(path)
        start = time.perf_counter()
        self.session: Any = open_session(directory)
        torch.cuda.synchronize()
        print(f"\n{path}: opened in {time.perf_counter() - start:.2f} s")
        self.manifest = self.session.manifest
        self.limits = self.manifest.limits
        self.weights = directory / WEIGHTS_NAME

    def memory(self, prefill: int) -> None:
        chunk = min(prefill, self.limits.max_chunk)
        found = self.session.dry_run(self.limits.max_batch, chunk, BLOCK)
        size = self.weights.stat().st_size
        plan = Budget.expected(found.total, size, self.manifest.memory, self.limits.max_batch)
        for name, budget in (("planned", plan), ("found", found)):
            print(
                f"  memory {name}: {budget}; beside the weights {(budget.taken - size) / MIB:.0f} "
                f"MiB, chunk {budget.chunk / 1e6:.1f} MB, decode {budget.decode / 1e6:.2f} MB, "
                f"KV {budget.kv / GIB:.2f} GiB"
            )

    def captures(self, batch: int, context: int) -> None:
        """Pools for so many sequences, random numbers in them."""
        self.session.allocate(batch * -(-(context + 1) // BLOCK) + 512, BLOCK)
        free, start = torch.cuda.mem_get_info()[0], time.perf_counter()
        taken = []

        def track(sizes: Iterable[int]) -> Iterator[int]:
            for size in sizes:
                before = torch.cuda.mem_get_info()[0]
                yield size
                torch.cuda.synchronize()
                taken.append(f"{size}: {(before - torch.cuda.mem_get_info()[0]) / MIB:.0f}")

        self.session.capture_all(track)
        seconds, all_taken = time.perf_counter() - start, free - torch.cuda.mem_get_info()[0]
        print(f"  graphs: {seconds:.2f} s, {all_taken / MIB:.0f} MiB ({', '.join(taken)})")
        for pool in self.session.pools:
            pool[:-1].normal_()

    def decode(self, batch: int, context: int, copy: float) -> None:
        chunks = self.chunks(batch, context)
        captured = self.session.step(chunks).clone()
        graphs, self.session.graphs = self.session.graphs, None
        plain = self.session.step(chunks).clone()
        slow = timed(lambda: self.session.step(chunks), 5)
        self.session.graphs = graphs
        fast = timed(lambda: self.replay(batch), 40)
        nbytes = decode_bytes(self.manifest, self.weights, batch, context)
        error = float((captured.float() - plain.float()).norm() / plain.float().norm())
        print(
            f"  decode B={batch} S={context}: {1e3 * fast:.3f} ms, {batch / fast:.0f} tokens/s, "
            f"{nbytes / fast / 1e9:.0f} GB/s, {100 * nbytes / fast / copy:.1f} % of the limit; "
            f"plain {1e3 * slow:.2f} ms, difference {error:.1e}"
        )

    def prefill(self, tokens: int) -> None:
        seconds = timed(lambda: self.prefill_step(tokens), 3)
        print(f"  prefill {tokens}: {1e3 * seconds:.1f} ms")

    def prefill_step(self, tokens: int) -> None:
        tokens = min(tokens, self.limits.max_chunk)
        table = range(-(-tokens // BLOCK))
        self.session.step([Chunk([7 + i % 200 for i in range(tokens)], 0, table, [tokens - 1])])

    def replay(self, batch: int) -> None:
        self.session.graphs.run(self.session.graphs.size_for(batch))

    def chunks(self, batch: int, context: int) -> list[Chunk]:
        width = -(-(context + 1) // BLOCK)
        tables = [list(range(i * width, (i + 1) * width)) for i in range(batch)]
        return [Chunk([11 + i], context, table, [0]) for i, table in enumerate(tables)]

    def kernels(self, what: str, run: Callable[[], None], times: int) -> None:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(times):
                run()
            torch.cuda.synchronize()
        total: dict[str, list[float]] = {}
        for event in profiler.events() or ():
            if event.device_time > 0 and "Command" not in event.name:
                row = total.setdefault(event.name[:80], [0.0, 0.0])
                row[0] += event.device_time / times
                row[1] += 1 / times
        print(f"  kernels of a {what}, us; one that waits for the launch before counts its wait")
        for name, (us, count) in sorted(total.items(), key=lambda x: -x[1][0])[:KERNELS]:
            print(f"    {us:9.1f} {count:6.1f} x {us / count:8.2f}  {name}")


if __name__ == "__main__":
    sys.exit(main())
