"""Comparison of engines with transformers' eager model: the proof that compiled equals eager.

fp32 eager is the judge. An engine in another dtype passes when its error against the judge is no
worse than 1.1 times that of eager in the same dtype; an fp32 engine when its largest logit differs
by no more than 2e-4 (on logits of ordinary size). Where it differs by more, fp64 settles it: large
weights make fp32 eager itself that uncertain, and an engine passes whose mean error against eager
in fp64 is at most 4 times fp32 eager's: orders of summation differ by up to that (ONNX Runtime's
products with INT4 weights round 3.2 times as much as torch's behind an attention sink:
test_onnx_int4.py), faults by orders of magnitude more.

With a mixture of experts, rounding sends a token now and then to another expert, in eager as in an
engine; so in lower dtypes the worst tenth of the positions is left out of what is judged there.
Logits come from teacher forcing through the paged cache, tokens from greedy generation. With a
text, perplexities too: an fp32 engine's may differ from eager's by one part in 10,000.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from seekforge.compile.calibration_file import CALIBRATION_NAME, load_calibration
from seekforge.compile.perplexity import WINDOW, perplexity, windows
from seekforge.compile.perplexity import text_tokens as perplexity_tokens
from seekforge.compile.prompts import PROMPTS
from seekforge.compile.reference import load_dequantised
from seekforge.compile.weights import Source
from seekforge.kernels.errors import InputError
from seekforge.models.checkpoint import open_checkpoint
from seekforge.models.module import load_eager
from seekforge.runtime.llm import LLM
from seekforge.runtime.manifest import resolve_engine
from seekforge.runtime.sampling import SamplingParams

FP32_LIMIT = 2e-4
DTYPE_FACTOR = 1.1
FP64_FACTOR = 4.0
ROUTED_SHARE = 0.9  # positions judged in models with experts, dtypes below float32
PERPLEXITY_LIMIT = 1e-4  # relative, fp32 engines


@dataclass(frozen=True, slots=True)
class EngineResult:
    """One engine (or eager in a lower dtype) against the fp32 judge, over all positions.

    mean_error, max_error: of the logits. kl: mean KL divergence in nats. top1: share of positions
    with the judge's argmax. tokens: share of greedily generated tokens equal to those of eager in
    the engine's dtype, up to the first that differs. limit: what `judged` must not exceed; judged:
    max_error for fp32 (or its mean error against fp64), else mean_error (of the better 9 tenths of
    the positions with experts).
    perplexity: of the text, where one was given.
    """

    name: str
    dtype: str
    max_error: float
    mean_error: float
    kl: float
    top1: float
    tokens: float
    judged: float
    limit: float
    perplexity: float | None = None

    @property
    def passed(self) -> bool:
        return self.judged <= self.limit  # NaN fails

    def summary(self) -> str:
        kind = "max" if self.dtype == "float32" else "mean"
        return (
            f"{kind} logit error {self.judged:.2e} (limit {self.limit:.2e}), "
            f"top-1 {self.top1:.1%}, greedy tokens equal {self.tokens:.1%}"
        )

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"passed": self.passed}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Engines, and eager itself in each of their lower dtypes. perplexity: of fp32 eager on the
    text that was given; text_tokens: how many it predicts there."""

    engines: tuple[EngineResult, ...]
    eager: tuple[EngineResult, ...]
    num_prompts: int
    num_positions: int
    perplexity: float | None = None
    text_tokens: int = 0

    @property
    def passed(self) -> bool:
        return all(engine.passed and self.perplexity_passed(engine) for engine in self.engines)

    def perplexity_passed(self, engine: EngineResult) -> bool:
        if self.perplexity is None or engine.perplexity is None or engine.dtype != "float32":
            return True
        return abs(engine.perplexity / self.perplexity - 1) <= PERPLEXITY_LIMIT

    def to_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "prompts": self.num_prompts,
            "positions": self.num_positions,
            "perplexity": self.perplexity,
            "text_tokens": self.text_tokens,
            "engines": [engine.to_dict() for engine in self.engines],
            "eager": [dataclasses.asdict(eager) for eager in self.eager],
        }


def compare(
    engines: Sequence[Path],
    checkpoint: Path | None = None,
    prompts: Sequence[str] = PROMPTS,
    max_tokens: int = 64,
    text: str | None = None,
    text_tokens: int | None = None,
) -> Comparison:
    """Compares engine directories (or bundles) of one checkpoint with its eager model.

    checkpoint: None for the one named in the first engine's manifest. text: for perplexities, its
    first `text_tokens` tokens (None: all).
    Raises InputError if that is gone, or an engine is of another model.
    """
    llms = [LLM(resolve_engine(engine)) for engine in engines]
    source = checkpoint or Path(llms[0].manifest.model.get("checkpoint", ""))
    if not (source / "config.json").is_file():
        raise InputError(
            f"{source}: the engine's checkpoint is not there; give it with --checkpoint"
        )
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    ids = [_fit(tokenizer(prompt).input_ids, llms, max_tokens) for prompt in prompts]
    load = partial(_load_judge, source, llms, [resolve_engine(engine) for engine in engines])
    judge = load()
    eos = list(llms[0].manifest.generation.eos_token_ids)
    known = set(tokenizer.get_vocab().values())
    unknown = [i for i in range(llms[0].manifest.vocab_size) if i not in known]
    greedy = partial(_greedy, count=max_tokens, eos=eos, unknown=unknown)
    texts = {"float32": greedy(judge, ids)}
    # Positions are scored on prompt + the judge's own continuation: real text, and long enough.
    full = [prompt + more for prompt, more in zip(ids, texts["float32"], strict=True)]
    reference = [_eager_logits(judge, tokens) for tokens in full]
    largest = max(float(logits.abs().max()) for logits in reference)
    if text is None and text_tokens is not None:
        raise InputError("--text-tokens without --text: give the text")
    cut = _text_windows(tokenizer, text, text_tokens, llms, eos) if text is not None else []
    judged, count = perplexity(partial(_eager_logits, judge), cut) if cut else (None, 0)
    share = ROUTED_SHARE if llms[0].manifest.model.get("num_experts") else 1.0
    results, eager = [], {}
    for dtype in dict.fromkeys(llm.manifest.dtype for llm in llms):
        if dtype != "float32":
            model = judge.to(getattr(torch, dtype))
            texts[dtype] = greedy(model, ids)
            logits = [_eager_logits(model, tokens) for tokens in full]
            eager[dtype] = _result("eager", dtype, reference, logits, 1.0, float("inf"), share)
            if cut:
                found, _ = perplexity(partial(_eager_logits, model), cut)
                eager[dtype] = dataclasses.replace(eager[dtype], perplexity=found)
            judge = load()
    del judge
    gc.collect()
    for llm, path in zip(llms, engines, strict=True):
        dtype = llm.manifest.dtype
        outputs = llm.generate(ids, SamplingParams(max_tokens=max_tokens))
        tokens = [list(output.choices[0].token_ids) for output in outputs]
        logits = [llm.score(tokens) for tokens in full]
        limit = (
            FP32_LIMIT * max(1.0, largest / 32)
            if dtype == "float32"
            else DTYPE_FACTOR * eager[dtype].judged
        )
        equal = _equal_share(texts[dtype], tokens)
        name = f"{path.name.lstrip('.').split('.')[0]}" if path.name else llm.manifest.backend
        result = _result(name, dtype, reference, logits, equal, limit, share)
        if cut:
            result = dataclasses.replace(result, perplexity=perplexity(llm.score, cut)[0])
        if dtype == "float32" and not result.passed and result.judged == result.judged:
            result = _settled(result, load, full, reference, logits)
        results.append(result)
    positions = sum(len(tokens) for tokens in full)
    return Comparison(tuple(results), tuple(eager.values()), len(ids), positions, judged, count)


def _settled(
    result: EngineResult,
    load: Callable[[], nn.Module],
    full: list[list[int]],
    reference: list[Tensor],
    found: list[Tensor],
) -> EngineResult:
    """Judges an fp32 engine beside fp32 eager, both against eager in fp64."""
    model: Any = load().double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped products have no fp64
    exact = [_eager_logits(model, tokens) for tokens in full]
    ours, eagers = (
        float((torch.cat(exact) - torch.cat(side)).abs().mean()) for side in (found, reference)
    )
    return dataclasses.replace(result, judged=ours, limit=FP64_FACTOR * eagers)


def _load_judge(source: Path, llms: Sequence[LLM], directories: Sequence[Path]) -> nn.Module:
    """fp32 eager; for INT4 engines with the weights that theirs decode to."""
    recipes = [(llm.manifest.quantization, llm.manifest.dtype) for llm in llms]
    if all(quantization is None for quantization, _ in recipes):
        return load_eager(source, torch.float32)
    quantization, dtype = recipes[0]
    if quantization is None or any(recipe != recipes[0] for recipe in recipes):
        raise InputError(
            "engines of different quantisation or dtype have different references: "
            f"{[(q and q['method'], dtype) for q, dtype in recipes]}; compare them one by one"
        )
    checkpoint = open_checkpoint(source)
    weights: Source = checkpoint
    if quantization["method"] == "awq-int4":
        # Temporary directories of a build lie in the bundle too.
        folder = directories[0].resolve().parent / CALIBRATION_NAME
        found = load_calibration(checkpoint, folder, quantization["calibration"]["key"])
        if found is None:
            raise InputError(
                f"{folder} has no calibration of this engine, or {source} is another checkpoint: "
                f"{source}: build the engine again, or give its checkpoint with --checkpoint"
            )
        weights = found
    return load_dequantised(checkpoint, weights, quantization, getattr(torch, dtype))


def _text_windows(
    tokenizer: Any, text: str, limit: int | None, llms: Sequence[LLM], eos: list[int]
) -> list[list[int]]:
    stream = perplexity_tokens(tokenizer, text, eos[0] if eos else None)
    return list(windows(stream, min(WINDOW, *(llm.max_len for llm in llms)), limit))


def _fit(ids: list[int], llms: Sequence[LLM], max_tokens: int) -> list[int]:
    """A prompt cut so that it and max_tokens more fit every engine."""
    room = min(llm.max_len for llm in llms) - max_tokens
    if room < 1:
        raise InputError(f"max_tokens {max_tokens} leaves no room for a prompt; lower it")
    return list(ids)[:room]


@torch.inference_mode()
def _greedy(
    model: nn.Module, prompts: list[list[int]], count: int, eos: list[int], unknown: list[int]
) -> list[list[int]]:
    """transformers' own generate, one prompt at a time; like engines never an unknown id."""
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False,
            eos_token_id=eos or None, pad_token_id=eos[0] if eos else None,
            suppress_tokens=unknown or None,
        )  # fmt: skip
        texts.append(out[0, len(prompt) :].tolist())
    return texts


@torch.inference_mode()
def _eager_logits(model: nn.Module, tokens: list[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0].float()
    return logits


def _result(
    name: str, dtype: str, reference: list[Tensor], found: list[Tensor], tokens: float,
    limit: float, share: float,
) -> EngineResult:  # fmt: skip
    judge, logits = torch.cat(reference), torch.cat(found)
    error = (judge - logits).abs()
    log_p, log_q = judge.log_softmax(-1), logits.log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    largest, mean = float(error.max()), float(error.mean())
    each = error.mean(-1).sort().values
    typical = float(each[: max(1, int(share * len(each)))].mean())
    if mean != mean:  # NaN anywhere fails
        typical = mean
    return EngineResult(
        name=name,
        dtype=dtype,
        max_error=largest,
        mean_error=mean,
        kl=float(kl),
        top1=float((judge.argmax(-1) == logits.argmax(-1)).float().mean()),
        tokens=tokens,
        judged=largest if dtype == "float32" else typical,
        limit=limit,
    )


def _equal_share(expected: list[list[int]], found: list[list[int]]) -> float:
    """Share of the expected tokens generated before the first difference of their prompt."""
    equal = 0
    for want, got in zip(expected, found, strict=True):
        differs = [i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b]
        equal += differs[0] if differs else min(len(want), len(got))
    return equal / max(1, sum(map(len, expected)))


def format_table(comparison: Comparison) -> str:
    """The comparison as text, one line for each engine and for eager in a lower dtype."""
    head = f"{'':<16}{'dtype':<10}{'max err':>10}{'mean err':>10}{'KL':>10}"
    head += f"{'top-1':>8}{'tokens':>8}{'perplexity':>12}  verdict"
    lines = [
        f"{comparison.num_prompts} prompts, {comparison.num_positions} positions, against "
        "transformers eager in float32",
        head,
    ]
    if comparison.perplexity is not None:
        lines.insert(
            1, f"perplexity of float32 eager {comparison.perplexity:.4f} "
            f"({comparison.text_tokens:,} tokens predicted)",
        )  # fmt: skip
    for row in (*comparison.eager, *comparison.engines):
        passed = row.passed and comparison.perplexity_passed(row)
        verdict = "" if row.name == "eager" else ("pass" if passed else "FAIL")
        ppl = "" if row.perplexity is None else f"{row.perplexity:.4f}"
        lines.append(
            f"{row.name:<16}{row.dtype:<10}{row.max_error:>10.2e}{row.mean_error:>10.2e}"
            f"{row.kl:>10.2e}{row.top1:>8.1%}{row.tokens:>8.1%}{ppl:>12}  {verdict}"
        )
    return "\n".join(lines)
