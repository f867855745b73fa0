"""Times engines on this GPU beside transformers eager and torch.compile.

    python bench/decode.py ENGINE... [--checkpoint DIR] [--batch 1,32] [--context 2048]
        [--prefill 4096] [--no-peers] [--peers-at 1] [--rounds 3] [--json FILE]
    python bench/decode.py --like qwen2-7b --work DIR [...]

Engines of one checkpoint, the unquantised first. With --like, a checkpoint of a published model's
shapes is written into DIR (bench/random_checkpoint.py), and its bf16 and INT4 engines are built
there, side by side; what is there already is used.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from random_checkpoint import SHAPES, write

from seekforge.compile.bench_engines import Shape, bench_engines, format_row
from seekforge.kernels.errors import SeekforgeError

KINDS = {"bf16": (), "int4": ("--quant", "rtn-int4")}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engines", nargs="*", type=Path, help="engine directories or bundles")
    parser.add_argument("--like", choices=SHAPES, help="engines of random weights, built here")
    parser.add_argument("--layers", type=int, help="of such a model; default: as published")
    parser.add_argument("--work", type=Path, default=Path("decode"), help="folder for them")
    parser.add_argument("--kinds", default="bf16,int4", help="which of them")
    parser.add_argument("--checkpoint", type=Path, help="default: the one in the first manifest")
    parser.add_argument("--batch", default="1,32", help="batch sizes, comma-separated")
    parser.add_argument("--context", type=int, default=2048, help="cached tokens of a sequence")
    parser.add_argument("--prefill", type=int, default=4096, help="tokens; 0: no such row")
    parser.add_argument("--no-peers", action="store_true", help="engines only")
    parser.add_argument("--peers-at", help="their batch sizes, comma-separated; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    batches = tuple(int(batch) for batch in args.batch.split(","))
    peers_at = args.peers_at and tuple(int(batch) for batch in args.peers_at.split(","))
    shape = Shape(batches, args.context, args.prefill, not args.no_peers, args.rounds, peers_at)
    engines = args.engines
    if args.like:
        kinds = args.kinds.split(",")
        engines = random_engines(args.work, args.like, args.layers, kinds, shape)
        if not engines:
            return 1
    if not engines:
        parser.error("no engine given; name some, or a model with --like")
    try:
        rows = bench_engines(
            engines, args.checkpoint, shape, lambda row: print(format_row(row), flush=True)
        )
    except SeekforgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


def random_engines(
    work: Path, like: str, layers: int | None, kinds: list[str], shape: Shape
) -> list[Path]:
    """The engines of a model with random weights that could be built; failures are printed."""
    checkpoint, start = work / like, time.perf_counter()
    if not (checkpoint / "config.json").is_file():
        write(checkpoint, like, layers, None)
        print(f"{checkpoint}: written in {time.perf_counter() - start:.0f} s", flush=True)
    longest = max(shape.context + 512, shape.prefill)
    command = [
        sys.executable, "-m", "seekforge.compile.cli", "build", str(checkpoint), "--backend",
        "inductor", "--device", "cuda", "--dtype", "bfloat16", "--no-verify", "--max-batch",
        str(max(shape.batches)), "--max-len", str(longest), "--max-chunk", str(longest),
    ]  # fmt: skip
    running = {}
    for kind in kinds:
        out = work / f"{like}-{kind}"
        log = (work / f"{like}-{kind}.log").open("w+")
        more = [*KINDS[kind], "--out", str(out)]
        running[out] = subprocess.Popen([*command, *more], stdout=log, stderr=log), log
    engines = []
    for out, (process, log) in running.items():
        code = process.wait()
        log.seek(0)
        text = log.read()
        log.close()
        print(f"{out}: exit code {code} after {time.perf_counter() - start:.0f} s", flush=True)
        print("\n".join(text.splitlines()[-25:]), flush=True)
        if code == 0:
            engines.append(out)
    return engines


if __name__ == "__main__":
    sys.exit(main())
