"""The program `seekforge`: one verb for each stage, in pipeline order.

export -> check -> build, quantize -> compare -> bisect -> inspect, report -> generate -> bench.
Each verb that writes prints the path it wrote; long steps show progress on stderr; --json prints
one JSON document on stdout. Exit code 2: the input can't be served as given; 1: a step failed or a
comparison did not pass.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from seekforge.compile import verbs
from seekforge.compile.options import LEVELS
from seekforge.kernels.errors import SeekforgeError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(arguments)
    _quiet_libraries()
    try:
        code: int = args.run(args)
        return code
    except SeekforgeError as error:
        from seekforge.compile.failures import explained

        Console(stderr=True).print(
            f"seekforge: {explained(error)}", style="red", markup=False, highlight=False
        )
        return error.exit_code
    except KeyboardInterrupt:
        Console(stderr=True).print("seekforge: interrupted; nothing half-built is left")
        return 130
    except BrokenPipeError:  # `seekforge inspect … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="seekforge",
        description="Compiles Hugging Face checkpoints into engines; proves they equal eager.",
    )
    commands = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    export = commands.add_parser("export", help="show the graph before and after the passes")
    export.add_argument("checkpoint", help="checkpoint directory, .gguf file, or 'default'")
    export.add_argument("-o", "--out", type=Path, required=True, help="folder for the graphs")
    export.add_argument("--dtype", default="float32")
    export.add_argument("--max-len", type=int)
    export.set_defaults(run=verbs.export)

    build = commands.add_parser("build", help="compile a checkpoint into engine directories")
    build.add_argument("checkpoint", help="checkpoint directory, .gguf file, or 'default'")
    build.add_argument("-o", "--out", type=Path, required=True, help="folder for the engines")
    _build_flags(build)
    build.set_defaults(run=verbs.build)

    check = commands.add_parser(
        "check", help="say beforehand whether a build will succeed, and how"
    )
    check.add_argument("checkpoint", help="what `build` takes, or a config.json alone")
    check.add_argument("-o", "--out", type=Path, help="where the engines would be written")
    check.add_argument("--gpu-memory", type=_size, metavar="GIB", help="default: this GPU's")
    check.add_argument(
        "--outcomes", action="store_true",
        help="CHECKPOINT is a folder of engines: what was predicted, and what then happened",
    )  # fmt: skip
    _build_flags(check)
    check.set_defaults(run=verbs.check)

    cache = commands.add_parser("cache", help="show or remove what builds have kept for later")
    actions = cache.add_subparsers(dest="action", required=True, metavar="list|prune")
    _json_flag(actions.add_parser("list", help="what is kept, the one used last at the end"))
    prune = actions.add_parser("prune", help="remove what was not used for long, or is too much")
    prune.add_argument("--older-than", type=_size, metavar="DAYS", help="not used for so long")
    prune.add_argument(
        "--max-size", type=_size, metavar="GIB",
        help="until the cache takes no more than this, the one used longest ago first",
    )  # fmt: skip
    prune.add_argument("--all", action="store_true", help="everything")
    _json_flag(prune)
    cache.set_defaults(run=verbs.cache)

    quantize = commands.add_parser(
        "quantize", help="write an INT4 checkpoint in the AutoAWQ layout, and what it lost"
    )
    quantize.add_argument("checkpoint", help="checkpoint directory, .gguf file, or 'default'")
    quantize.add_argument("-o", "--out", type=Path, required=True, help="folder for the checkpoint")
    quantize.add_argument("--quant", default="awq-int4", help="awq-int4 or rtn-int4")
    _int4_flags(quantize)
    quantize.add_argument("--text", type=Path, help="held-out text: perplexities fp32, RTN, AWQ")
    quantize.add_argument(
        "--text-tokens", type=_count, help="use its first N tokens (default: all)"
    )
    _json_flag(quantize)
    quantize.set_defaults(run=verbs.quantize)

    compare = commands.add_parser("compare", help="compare engines with transformers' eager model")
    compare.add_argument(
        "engines", nargs="+", type=Path,
        help="engine directories or bundles; eager or eager:bfloat16 is transformers' own model",
    )  # fmt: skip
    compare.add_argument("--checkpoint", help="default: the one the first engine was built from")
    compare.add_argument(
        "--prompts", type=Path,
        help="text file, one prompt a line; .jsonl: {\"prompt\": …} or {\"messages\": …} a line",
    )  # fmt: skip
    compare.add_argument("--max-tokens", type=_count, default=64)
    compare.add_argument("--text", type=Path, help="text file: perplexities on it are compared too")
    compare.add_argument("--text-tokens", type=_count, help="its first N tokens (default: all)")
    compare.add_argument(
        "--judge", default="reference",
        help="reference: what each engine stands for, INT4 decoded (default); checkpoint: the "
        "unquantised weights, with no limit for quantised engines",
    )  # fmt: skip
    compare.add_argument(
        "--layers", action="store_true", help="also the hidden state behind each layer"
    )
    _json_flag(compare)
    compare.set_defaults(run=verbs.compare)

    bisect = commands.add_parser(
        "bisect", help="find the step of an engine's making, and the node, that is wrong"
    )
    bisect.add_argument("engine", type=Path, help="engine directory or bundle")
    bisect.add_argument("--checkpoint", help="default: the one the engine was built from")
    bisect.add_argument("--prompt", help="text; '-' reads it from standard input")
    bisect.add_argument("--tokens", type=_count, help="of each of two sequences (default: 16)")
    bisect.add_argument("-o", "--out", type=Path, help="folder for the culprit's tensors")
    _json_flag(bisect)
    bisect.set_defaults(run=verbs.bisect)

    inspect = commands.add_parser(
        "inspect", help="show what an engine, a checkpoint or a configuration is"
    )
    inspect.add_argument(
        "path", type=Path, help="engine directory, bundle, checkpoint directory, or config.json"
    )
    inspect.add_argument(
        "--graph", action="store_true",
        help="of a checkpoint: export, run the passes, count what is left (always without weights)",
    )  # fmt: skip
    inspect.add_argument(
        "--layers", action="store_true",
        help="of a TensorRT engine: each kernel with the operators and source lines it came from",
    )  # fmt: skip
    _json_flag(inspect)
    inspect.set_defaults(run=verbs.inspect)

    report = commands.add_parser("report", help="write report.html of an engine again")
    report.add_argument("engine", type=Path, help="engine directory")
    report.set_defaults(run=verbs.report)

    generate = commands.add_parser("generate", help="continue a prompt with an engine")
    generate.add_argument("engine", type=Path, help="engine directory or bundle")
    generate.add_argument("prompt", help="text; '-' reads it from standard input")
    generate.add_argument("--chat", action="store_true", help="put it through the chat template")
    generate.add_argument("--max-tokens", type=_count, default=128)
    generate.add_argument("--temperature", type=float, default=0.0)
    generate.add_argument("--top-k", type=int, default=0)
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--seed", type=int)
    generate.add_argument("--stop", action="append", default=[], metavar="TEXT")
    _json_flag(generate)
    generate.set_defaults(run=verbs.generate)

    bench = commands.add_parser("bench", help="decode speed of engines beside eager, or of kernels")
    bench.add_argument(
        "engines", nargs="+", type=Path,
        help="engine directories or bundles; or the word 'kernels': the GPU's, beside their peers",
    )  # fmt: skip
    bench.add_argument("--peers", type=Path, help="kernels: folder with adapters to peers")
    bench.add_argument("--rows", default="", help="kernels: only rows whose name contains this")
    bench.add_argument(
        "--tune", action="store_true", help="kernels: find the configurations of kernels/h200.json"
    )
    bench.add_argument("--checkpoint", help="default: the one the first engine was built from")
    bench.add_argument("--batch", default="1,8", help="batch sizes, comma-separated")
    bench.add_argument("--tokens", type=_count, default=64, help="new tokens of each sequence")
    bench.add_argument("--rounds", type=_count, default=3)
    _json_flag(bench)
    bench.set_defaults(run=verbs.bench)
    return parser


def _build_flags(build: argparse.ArgumentParser) -> None:
    build.add_argument(
        "--backend", action="append", metavar="NAME[,NAME…]",
        help="inductor, onnxruntime, tensorrt-rtx, tensorrt; default: the first three",
    )  # fmt: skip
    build.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16")
    build.add_argument("--device", default="cpu", help="cpu or cuda (inductor, onnxruntime)")
    build.add_argument("--max-batch", type=int, default=8, help="sequences in one step")
    build.add_argument(
        "--max-len", type=int, help="tokens of a sequence (default: min(model, 2048))"
    )
    build.add_argument("--max-chunk", type=int, default=512, help="prefill tokens of one step")
    build.add_argument("--block-size", type=int, default=16, help="tokens of a KV block")
    build.add_argument(
        "--target", default="8.9", metavar="SM[,SM…]",
        help="compute capabilities a tensorrt-rtx engine is for: sm_86,sm_89 (default: 8.9)",
    )  # fmt: skip
    build.add_argument(
        "--strip", action="store_true",
        help="TensorRT: keep the weights beside the engine; new weights then need no new engine",
    )  # fmt: skip
    build.add_argument(
        "--weight-streaming", type=float, metavar="GIB",
        help="TensorRT: weights that stay on the GPU; the others are fetched in every step",
    )  # fmt: skip
    build.add_argument("--quant", metavar="METHOD", help="rtn-int4 or awq-int4; default: none")
    _int4_flags(build)
    build.add_argument(
        "--verify", nargs="?", const="cheap", default="cheap", choices=LEVELS,
        help="cheap: every pass on one layer of each kind, the engine against eager (default); "
        "full: every pass on the whole model; none",
    )  # fmt: skip
    build.add_argument("--no-verify", action="store_true", help="the same as --verify none")
    build.add_argument(
        "--no-cache", action="store_true",
        help="make everything anew: no engine, weights or package of an earlier build is taken",
    )  # fmt: skip
    _json_flag(build)


def _int4_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--calib", type=Path, help="text file or folder for awq-int4")
    parser.add_argument("--group-size", type=int, help="weights that share a scale (default: 128)")
    parser.add_argument("--asymmetric", action="store_true", help="INT4 with zero points")
    parser.add_argument(
        "--skip", action="append", default=[], metavar="MODULE",
        help="leave modules of this dotted name unquantised; lm_head always is",
    )  # fmt: skip


def _json_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")


def _count(text: str) -> int:
    """1 or more, for argparse."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a number from 1 on was expected")
    return int(text)


def _size(text: str) -> float:
    """0 or more and finite, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: a number from 0 on was expected")
    return value


def _quiet_libraries() -> None:
    """The libraries' own chatter (progress bars, deprecations) is not about the user's input. They
    read these variables when they are imported, which not every verb needs."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


if __name__ == "__main__":
    sys.exit(main())
