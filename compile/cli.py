"""The program `seekforge`: one verb for each stage, in pipeline order.

export -> check -> build, quantize -> compare -> inspect -> generate -> bench. Each verb that writes
prints the path it wrote; long steps show progress on stderr; --json prints one JSON document on
stdout. Exit code 2: the input can't be served as given; 1: a step failed or a comparison did not
pass.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from seekforge.kernels.errors import InputError, SeekforgeError


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
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    export = verbs.add_parser("export", help="show the graph before and after the passes")
    export.add_argument("checkpoint", help="checkpoint directory, .gguf file, or 'default'")
    export.add_argument("-o", "--out", type=Path, required=True, help="folder for the graphs")
    export.add_argument("--dtype", default="float32")
    export.add_argument("--max-len", type=int)
    export.set_defaults(run=_export)

    build = verbs.add_parser("build", help="compile a checkpoint into engine directories")
    build.add_argument("checkpoint", help="checkpoint directory, .gguf file, or 'default'")
    build.add_argument("-o", "--out", type=Path, required=True, help="folder for the engines")
    _build_flags(build)
    build.set_defaults(run=_build)

    check = verbs.add_parser("check", help="say beforehand whether a build will succeed, and how")
    check.add_argument("checkpoint", help="what `build` takes, or a config.json alone")
    check.add_argument("-o", "--out", type=Path, help="where the engines would be written")
    check.add_argument("--gpu-memory", type=float, metavar="GIB", help="default: this GPU's")
    check.add_argument(
        "--outcomes", action="store_true",
        help="CHECKPOINT is a folder of engines: what was predicted, and what then happened",
    )  # fmt: skip
    _build_flags(check)
    check.set_defaults(run=_check)

    quantize = verbs.add_parser(
        "quantize", help="write an INT4 checkpoint in the AutoAWQ layout, and what it lost"
    )
    quantize.add_argument("checkpoint", help="checkpoint directory, .gguf file, or 'default'")
    quantize.add_argument("-o", "--out", type=Path, required=True, help="folder for the checkpoint")
    quantize.add_argument("--quant", default="awq-int4", help="awq-int4 or rtn-int4")
    _int4_flags(quantize)
    quantize.add_argument("--text", type=Path, help="held-out text: perplexities fp32, RTN, AWQ")
    quantize.add_argument("--text-tokens", type=int, help="use its first N tokens (default: all)")
    _json_flag(quantize)
    quantize.set_defaults(run=_quantize)

    compare = verbs.add_parser("compare", help="compare engines with transformers' eager model")
    compare.add_argument("engines", nargs="+", type=Path, help="engine directories or bundles")
    compare.add_argument("--checkpoint", help="default: the one the first engine was built from")
    compare.add_argument("--prompts", type=Path, help="text file, one prompt a line")
    compare.add_argument("--max-tokens", type=int, default=64)
    compare.add_argument("--text", type=Path, help="text file: perplexities on it are compared too")
    compare.add_argument("--text-tokens", type=int, help="use its first N tokens (default: all)")
    _json_flag(compare)
    compare.set_defaults(run=_compare)

    inspect = verbs.add_parser(
        "inspect", help="show what an engine, a checkpoint or a configuration is"
    )
    inspect.add_argument(
        "path", type=Path, help="engine directory, bundle, checkpoint directory, or config.json"
    )
    inspect.add_argument(
        "--graph", action="store_true",
        help="of a checkpoint: export, run the passes, count what is left (always without weights)",
    )  # fmt: skip
    _json_flag(inspect)
    inspect.set_defaults(run=_inspect)

    generate = verbs.add_parser("generate", help="continue a prompt with an engine")
    generate.add_argument("engine", type=Path, help="engine directory or bundle")
    generate.add_argument("prompt", help="text; '-' reads it from standard input")
    generate.add_argument("--chat", action="store_true", help="put it through the chat template")
    generate.add_argument("--max-tokens", type=int, default=128)
    generate.add_argument("--temperature", type=float, default=0.0)
    generate.add_argument("--top-k", type=int, default=0)
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--seed", type=int)
    generate.add_argument("--stop", action="append", default=[], metavar="TEXT")
    _json_flag(generate)
    generate.set_defaults(run=_generate)

    bench = verbs.add_parser("bench", help="decode speed of engines beside eager, or of kernels")
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
    bench.add_argument("--tokens", type=int, default=64, help="new tokens of each sequence")
    bench.add_argument("--rounds", type=int, default=3)
    _json_flag(bench)
    bench.set_defaults(run=_bench)
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
    build.add_argument("--target", default="8.9", help="compute capability for tensorrt-rtx")
    build.add_argument("--quant", metavar="METHOD", help="rtn-int4 or awq-int4; default: none")
    _int4_flags(build)
    build.add_argument("--no-verify", action="store_true", help="skip the comparison with eager")
    _json_flag(build)


def _int4_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--calib", type=Path, help="text file or folder for awq-int4")
    parser.add_argument("--group-size", type=int, help="weights that share a scale (default: 128)")
    parser.add_argument("--asymmetric", action="store_true", help="INT4 with zero points")
    parser.add_argument(
        "--skip", action="append", default=[], metavar="MODULE",
        help="leave modules of this dotted name unquantised; lm_head always is",
    )  # fmt: skip


def _int4_options(args: argparse.Namespace) -> Any:
    from seekforge.passes.int4 import Int4Options

    given = {
        "--group-size": args.group_size is not None, "--asymmetric": args.asymmetric,
        "--skip": bool(args.skip), "--calib": args.calib is not None,
    }  # fmt: skip
    if args.quant is None and any(given.values()):
        names = ", ".join(name for name, is_given in given.items() if is_given)
        raise InputError(f"{names} without --quant: say which, awq-int4 or rtn-int4")
    size = 128 if args.group_size is None else args.group_size
    return Int4Options(size, not args.asymmetric, ("lm_head", *args.skip))


def _json_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")


def _quiet_libraries() -> None:
    """The libraries' own chatter (progress bars, deprecations) is not about the user's input."""
    import transformers

    warnings.filterwarnings("ignore", category=FutureWarning)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False))


def _show(
    args: argparse.Namespace, data: Any, text: Callable[[Any], str], passed: bool = True
) -> int:
    """Prints `data` as JSON or as text; returns the exit code."""
    if args.json:
        _print_json(data.to_dict() if hasattr(data, "to_dict") else data)
    else:
        print(text(data))
    return 0 if passed else 1


def _export(args: argparse.Namespace) -> int:
    from seekforge.compile.export_report import write_graphs
    from seekforge.models.default import resolve_checkpoint

    write_graphs(resolve_checkpoint(args.checkpoint), args.out, args.dtype, args.max_len)
    print(args.out)
    return 0


def _options(args: argparse.Namespace) -> Any:
    from seekforge.compile.options import Options

    given = [name for value in args.backend or [] for name in value.replace(" ", ",").split(",")]
    backends = tuple(name for name in dict.fromkeys(given) if name) or Options().backends
    same = ("dtype", "device", "max_batch", "max_len", "max_chunk", "block_size", "target", "quant")
    return Options(
        backends=backends,
        verify=not args.no_verify,
        calib=args.calib,
        int4=_int4_options(args),
        **{name: getattr(args, name) for name in same},
    )


def _build(args: argparse.Namespace) -> int:
    from seekforge.compile.build import build
    from seekforge.models.default import resolve_checkpoint

    engines = build(resolve_checkpoint(args.checkpoint), args.out, _options(args))
    if args.json:
        _print_json([str(engine) for engine in engines])
    else:
        print("\n".join(map(str, engines)))
    return 0


def _check(args: argparse.Namespace) -> int:
    from seekforge.compile.check import check, resolve_subject
    from seekforge.compile.check_outcomes import format_outcomes, outcomes
    from seekforge.compile.check_text import format_check

    if args.outcomes:
        rows = outcomes(Path(args.checkpoint))
        return _show(args, rows, format_outcomes)
    gpu = None if args.gpu_memory is None else int(args.gpu_memory * 2**30)
    report = check(resolve_subject(args.checkpoint), _options(args), args.out, gpu)
    return _show(args, report, format_check, report["ok"])


def _quantize(args: argparse.Namespace) -> int:
    from seekforge.compile.perplexity import read_text
    from seekforge.compile.quantise import format_report, quantise_checkpoint
    from seekforge.models.default import resolve_checkpoint

    text = read_text(args.text) if args.text else None
    report = quantise_checkpoint(
        resolve_checkpoint(args.checkpoint), args.out, args.quant, _int4_options(args), args.calib,
        text, args.text_tokens,
    )  # fmt: skip
    return _show(args, report, format_report)


def _compare(args: argparse.Namespace) -> int:
    from seekforge.compile.compare import compare, format_table
    from seekforge.compile.perplexity import read_text
    from seekforge.compile.prompts import PROMPTS

    prompts: Sequence[str] = PROMPTS
    if args.prompts:
        prompts = _read_prompts(args.prompts)
    text = read_text(args.text) if args.text else None
    result = compare(
        _runnable(args.engines), _checkpoint(args), prompts, args.max_tokens, text, args.text_tokens
    )
    return _show(args, result, format_table, result.passed)


def _inspect(args: argparse.Namespace) -> int:
    from seekforge.compile.inspect import describe, format_description

    return _show(args, describe(args.path, args.graph), format_description)


def _generate(args: argparse.Namespace) -> int:
    from seekforge.runtime.llm import LLM
    from seekforge.runtime.sampling import SamplingParams

    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        stop=tuple(args.stop),
    )
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    llm = LLM(args.engine)
    prompt: Any = llm.chat_prompt([{"role": "user", "content": text}]) if args.chat else text
    if args.json:
        (output,) = llm.generate([prompt], params)
        (choice,) = output.choices
        _print_json(
            {
                "prompt_token_ids": list(output.prompt_token_ids),
                "text": choice.text,
                "token_ids": list(choice.token_ids),
                "finish_reason": choice.finish_reason,
            }
        )
        return 0
    for delta in llm.stream(prompt, params):
        print(delta.text, end="", flush=True)
    print()
    return 0


def _bench(args: argparse.Namespace) -> int:
    from seekforge.compile.bench import bench_decode, format_rows

    if args.engines == [Path("kernels")]:
        from seekforge.compile.bench_floors import table
        from seekforge.compile.bench_kernels import bench_kernels

        if args.tune:
            from seekforge.compile.bench_tune import tune_kernels

            tuned = tune_kernels(args.rows)
            if args.json:
                _print_json(tuned)
            return 0
        results = bench_kernels(args.peers, args.rows)
        if args.json:
            _print_json(results)
        else:
            print(table(results))
        return 0
    try:
        batches = [int(value) for value in args.batch.split(",")]
    except ValueError:
        raise InputError(f"--batch {args.batch}: expected numbers such as 1,8") from None
    rows = bench_decode(
        _runnable(args.engines), _checkpoint(args), batches, args.tokens, args.rounds
    )
    if args.json:
        _print_json(rows)
    else:
        print(format_rows(rows))
    return 0


def _checkpoint(args: argparse.Namespace) -> Path | None:
    from seekforge.models.default import resolve_checkpoint

    return resolve_checkpoint(args.checkpoint) if args.checkpoint else None


def _read_prompts(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--prompts {path}: cannot be read as text ({error})") from None
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise InputError(f"--prompts {path}: no prompt in it; one a line was expected")
    return prompts


def _runnable(paths: Sequence[Path]) -> list[Path]:
    """Engine directories; a bundle stands for all of its engines that can run here."""
    from seekforge.runtime.manifest import BACKENDS, MANIFEST_NAME, read_manifest, unfit_reason
    from seekforge.runtime.manifest import resolve_engine as resolve

    found: list[Path] = []
    for path in paths:
        inside = [path / name for name in BACKENDS if (path / name / MANIFEST_NAME).is_file()]
        runnable = [e for e in inside if unfit_reason(read_manifest(e, check_files=False)) is None]
        found += runnable or [resolve(path)]
    return found


if __name__ == "__main__":
    sys.exit(main())
