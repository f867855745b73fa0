"""What each verb of `seekforge` does: arguments in, text or JSON on stdout, exit code out.

Libraries that take seconds to import are imported inside the verb that needs them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from seekforge.kernels.errors import InputError


def export(args: argparse.Namespace) -> int:
    from seekforge.compile.export_report import write_graphs
    from seekforge.models.default import resolve_checkpoint

    write_graphs(resolve_checkpoint(args.checkpoint), args.out, args.dtype, args.max_len)
    print(args.out)
    return 0


def _options(args: argparse.Namespace) -> Any:
    from seekforge.compile.options import Options

    given = [name for value in args.backend or [] for name in value.replace(" ", ",").split(",")]
    backends = tuple(name for name in dict.fromkeys(given) if name) or Options().backends
    same = (
        "dtype", "device", "max_batch", "max_len", "max_chunk", "block_size", "target", "strip",
        "weight_streaming", "quant",
    )  # fmt: skip
    return Options(
        backends=backends,
        verify="none" if args.no_verify else args.verify,
        calib=args.calib,
        cache=not args.no_cache,
        int4=_int4_options(args),
        **{name: getattr(args, name) for name in same},
    )


def build(args: argparse.Namespace) -> int:
    from seekforge.compile.build_cache_reuse import reusable
    from seekforge.models.default import resolve_checkpoint

    checkpoint, options = resolve_checkpoint(args.checkpoint), _options(args)
    engines = reusable(checkpoint, args.out, options)
    if engines is not None:
        print(f"unchanged: {', '.join(engine.name for engine in engines)}", file=sys.stderr)
    else:
        from seekforge.compile.build import build

        engines = build(checkpoint, args.out, options)
    if args.json:
        _print_json([str(engine) for engine in engines])
    else:
        print("\n".join(map(str, engines)))
    return 0


def check(args: argparse.Namespace) -> int:
    from seekforge.compile.check import check, resolve_subject
    from seekforge.compile.check_outcomes import format_outcomes, outcomes
    from seekforge.compile.check_text import format_check

    if args.outcomes:
        rows = outcomes(Path(args.checkpoint))
        return _show(args, rows, format_outcomes)
    gpu = None if args.gpu_memory is None else int(args.gpu_memory * 2**30)
    report = check(resolve_subject(args.checkpoint), _options(args), args.out, gpu)
    return _show(args, report, format_check, report["ok"])


def cache(args: argparse.Namespace) -> int:
    from seekforge.compile.build_cache import prune
    from seekforge.compile.build_cache_text import account, format_account

    if args.action == "list":
        return _show(args, account(), format_account)
    if not args.all and args.older_than is None and args.max_size is None:
        raise InputError("cache prune: say what goes: --older-than DAYS, --max-size GIB or --all")
    days, gib = args.older_than, args.max_size
    seconds = float("-inf") if args.all else None if days is None else days * 24 * 3600
    removed = prune(None if gib is None else int(gib * 2**30), seconds)
    return _show(args, account(removed), format_account)


def quantize(args: argparse.Namespace) -> int:
    from seekforge.compile.perplexity import read_text
    from seekforge.compile.quantise import format_report, quantise_checkpoint
    from seekforge.models.default import resolve_checkpoint

    text = read_text(args.text) if args.text else None
    report = quantise_checkpoint(
        resolve_checkpoint(args.checkpoint), args.out, args.quant, _int4_options(args), args.calib,
        text, args.text_tokens,
    )  # fmt: skip
    return _show(args, report, format_report)


def compare(args: argparse.Namespace) -> int:
    from seekforge.compile.compare import compare, eager_dtype
    from seekforge.compile.compare_receipt import write_receipts
    from seekforge.compile.compare_text import format_table
    from seekforge.compile.perplexity import read_text
    from seekforge.compile.prompts import PROMPTS, Prompt, read_prompts

    prompts: Sequence[Prompt] = read_prompts(args.prompts) if args.prompts else PROMPTS
    text = read_text(args.text) if args.text else None
    engines = _runnable([path for path in args.engines if eager_dtype(path) is None])
    eager = [path for path in args.engines if eager_dtype(path) is not None]
    result = compare(
        [*eager, *engines], _checkpoint(args), prompts, args.max_tokens, text, args.text_tokens,
        judge=args.judge, layers=args.layers,
    )  # fmt: skip
    for warning in write_receipts(result, engines):
        print(f"warning: {warning}", file=sys.stderr)
    return _show(args, result, format_table, result.passed)


def bisect(args: argparse.Namespace) -> int:
    from seekforge.compile.bisect import TOKENS, bisect
    from seekforge.compile.bisect_result import format_bisection
    from seekforge.compile.prompts import PROMPTS

    prompts: Sequence[str] = PROMPTS
    if args.prompt is not None:
        prompts = [sys.stdin.read() if args.prompt == "-" else args.prompt]
    found = bisect(args.engine, _checkpoint(args), prompts, args.tokens or TOKENS, args.out)
    return _show(args, found, format_bisection, found.culprit is None)


def inspect(args: argparse.Namespace) -> int:
    from seekforge.compile.inspect import describe, format_description
    from seekforge.compile.tensorrt_table import format_tables

    text = format_tables if args.layers else format_description
    return _show(args, describe(args.path, args.graph), text)


def report(args: argparse.Namespace) -> int:
    from seekforge.compile.report import rewrite_report
    from seekforge.runtime.manifest import BACKENDS, MANIFEST_NAME

    inside = [args.engine / name for name in BACKENDS]
    bundled = [engine for engine in inside if (engine / MANIFEST_NAME).is_file()]
    for engine in bundled or [args.engine]:
        print(rewrite_report(engine))
    return 0


def generate(args: argparse.Namespace) -> int:
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


def bench(args: argparse.Namespace) -> int:
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


def _runnable(paths: Sequence[Path]) -> list[Path]:
    """Engine directories; a bundle stands for all of its engines that can run here."""
    from seekforge.runtime.fit import resolve_engine as resolve
    from seekforge.runtime.fit import unfit_reason
    from seekforge.runtime.manifest import BACKENDS, MANIFEST_NAME, read_manifest

    found: list[Path] = []
    for path in paths:
        inside = [path / name for name in BACKENDS if (path / name / MANIFEST_NAME).is_file()]
        runnable = [e for e in inside if unfit_reason(read_manifest(e, check_files=False)) is None]
        found += runnable or [resolve(path)]
    return found


def _int4_options(args: argparse.Namespace) -> Any:
    from seekforge.passes.int4_options import Int4Options

    given = {
        "--group-size": args.group_size is not None, "--asymmetric": args.asymmetric,
        "--skip": bool(args.skip), "--calib": args.calib is not None,
    }  # fmt: skip
    if args.quant is None and any(given.values()):
        names = ", ".join(name for name, is_given in given.items() if is_given)
        raise InputError(f"{names} without --quant: say which, awq-int4 or rtn-int4")
    size = 128 if args.group_size is None else args.group_size
    return Int4Options(size, not args.asymmetric, ("lm_head", *args.skip))


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
