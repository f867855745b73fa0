"""Decode speed of engines beside transformers' eager `generate`, in one process, on the CPU.

Engines for a GPU are timed by bench_engines.py.

All take turns within each round. A figure is batch x tokens / seconds for the tokens after the
first, so that the prompt's prefill does not count: the median time of a long generation less that
of one token. The machine's read bandwidth is measured too: decoding one sequence reads every weight
once a token, so bandwidth / weight bytes is the limit at batch 1.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from seekforge.compile.bench_engines import Shape, bench_engines, format_row
from seekforge.kernels.errors import InputError
from seekforge.models.checkpoint import open_checkpoint
from seekforge.models.module import load_eager
from seekforge.runtime.fit import resolve_engine
from seekforge.runtime.llm import LLM
from seekforge.runtime.manifest import DTYPE_BYTES, read_manifest
from seekforge.runtime.sampling import SamplingParams

PROMPT_TOKENS = 16


def bench_decode(
    engines: Sequence[Path],
    checkpoint: Path | None = None,
    batches: Sequence[int] = (1, 8),
    new_tokens: int = 64,
    rounds: int = 3,
) -> list[dict[str, Any]]:
    """One dict a row: row, engine, batch, value (tokens/s), unit, ratio (to eager), roof, better.

    Eager runs in the dtype of each engine, with scaled-dot-product attention, as transformers does
    by default. Raises InputError where the checkpoint is gone.
    """
    found = [resolve_engine(path) for path in engines]
    if {read_manifest(path, check_files=False).device for path in found} == {"cuda"}:
        return bench_engines(found, checkpoint, Shape(batches, prefill=0, rounds=rounds))
    llms = {str(path): LLM(path) for path in found}
    first = next(iter(llms.values())).manifest
    source = checkpoint or Path(first.model.get("checkpoint", ""))
    if not (source / "config.json").is_file():
        raise InputError(
            f"{source}: the engine's checkpoint is not there; give it with --checkpoint"
        )
    opened = open_checkpoint(source)
    parameters = opened.spec.parameters
    bandwidth = read_bandwidth()
    rows = []
    for dtype in dict.fromkeys(llm.manifest.dtype for llm in llms.values()):
        eager = load_eager(source, getattr(torch, dtype), "sdpa")
        roof = bandwidth / (parameters * DTYPE_BYTES[dtype])
        for batch in batches:
            runs: dict[str, Callable[[int], None]] = {"eager": partial(_eager, eager, batch)}
            for name, llm in llms.items():
                if llm.manifest.dtype == dtype and batch <= llm.manifest.limits.max_batch:
                    runs[name] = partial(_engine, llm, batch)
            seconds = _alternate(runs, new_tokens, rounds)
            for name, taken in seconds.items():
                rows.append(
                    {
                        "row": f"decode {dtype} batch {batch}",
                        "engine": Path(name).name if name != "eager" else "eager",
                        "batch": batch,
                        "value": round(batch * new_tokens / taken, 2),
                        "unit": "tokens/s",
                        "ratio": round(seconds["eager"] / taken, 2),
                        "roof": round(batch * roof, 1),
                        "better": "higher",
                    }
                )
        del eager
    return rows


def read_bandwidth() -> float:
    """Bytes/s at which this machine's CPU reads 400 MB with all threads; the best of twenty."""
    parts = [torch.ones(25_000_000) for _ in range(4)]
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for part in parts:
            part.sum()
        best = min(best, time.perf_counter() - start)
    return sum(part.nbytes for part in parts) / best


def format_rows(rows: Sequence[dict[str, Any]]) -> str:
    if any("peers" in row for row in rows):
        return "\n".join(format_row(row) for row in rows)
    lines = [f"{'':<30}{'engine':<16}{'tokens/s':>10}{'x eager':>9}{'limit':>9}"]
    lines += [
        f"{r['row']:<30}{r['engine']:<16}{r['value']:>10.1f}{r['ratio']:>9.2f}{r['roof']:>9.1f}"
        for r in rows
    ]
    lines.append("limit: read bandwidth / weight bytes, times the batch")
    return "\n".join(lines)


def _alternate(
    runs: dict[str, Callable[[int], None]], new_tokens: int, rounds: int
) -> dict[str, float]:
    """Median seconds that each run takes for new_tokens tokens after the first.

    Every round runs all of them; the first round warms up and is not counted.
    """
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run(1)
            middle = time.perf_counter()
            run(1 + new_tokens)
            end = time.perf_counter()
            if index:
                taken[name].append((end - middle) - (middle - start))
    return {name: statistics.median(values) for name, values in taken.items()}


def _prompt(row: int) -> list[int]:
    return [10 + row + i for i in range(PROMPT_TOKENS)]


def _engine(llm: LLM, batch: int, new_tokens: int) -> None:
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    outputs = llm.generate([_prompt(row) for row in range(batch)], params)
    assert all(len(output.choices[0].token_ids) == new_tokens for output in outputs)


@torch.inference_mode()
def _eager(model: nn.Module, batch: int, new_tokens: int) -> None:
    ids = torch.tensor([_prompt(row) for row in range(batch)])
    out = model.generate(  # type: ignore[operator]
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens,
        min_new_tokens=new_tokens, do_sample=False, pad_token_id=0,
    )  # fmt: skip
    assert out.shape[1] == PROMPT_TOKENS + new_tokens
