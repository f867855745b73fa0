"""Times engines on this GPU beside transformers eager and torch.compile.

    python bench/decode.py ENGINE... [--checkpoint DIR] [--batch 1,32] [--context 2048]
        [--prefill 4096] [--no-peers] [--rounds 3] [--json FILE]

Engines of one checkpoint, the unquantised first; bench/random_checkpoint.py writes checkpoints of
published shapes.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from seekforge.compile.bench_engines import Shape, bench_engines, format_row
from seekforge.kernels.errors import SeekforgeError


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engines", nargs="+", type=Path, help="engine directories or bundles")
    parser.add_argument("--checkpoint", type=Path, help="default: the one in the first manifest")
    parser.add_argument("--batch", default="1,32", help="batch sizes, comma-separated")
    parser.add_argument("--context", type=int, default=2048, help="cached tokens of a sequence")
    parser.add_argument("--prefill", type=int, default=4096, help="tokens; 0: no such row")
    parser.add_argument("--no-peers", action="store_true", help="engines only")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    batches = tuple(int(batch) for batch in args.batch.split(","))
    shape = Shape(batches, args.context, args.prefill, not args.no_peers, args.rounds)
    try:
        rows = bench_engines(
            args.engines, args.checkpoint, shape, lambda row: print(format_row(row), flush=True)
        )
    except SeekforgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
