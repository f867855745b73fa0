"""What a comparison found, and what passes: figures of engines and of eager against one judge.

fp32 eager is the judge. An engine in another dtype passes when its error against the judge is no
worse than 1.1 times that of eager in the same dtype; an fp32 engine when its largest logit differs
by no more than 2e-4 (on logits of ordinary size). Where it differs by more, fp64 settles it: large
weights make fp32 eager itself that uncertain, and an engine passes whose mean error against eager
in fp64 is at most 4 times fp32 eager's: orders of summation differ by up to that (ONNX Runtime's
products with INT4 weights round 3.2 times as much as torch's behind an attention sink:
test_onnx_int4.py), faults by orders of magnitude more.

With a mixture of experts, rounding sends a token now and then to another expert, in eager as in an
engine; so in lower dtypes the worst tenth of the positions is left out of what is judged there.
With a text, perplexities too: an fp32 engine's may differ from eager's by one part in 10,000.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FP32_LIMIT = 2e-4
DTYPE_FACTOR = 1.1
FP64_FACTOR = 4.0
ROUTED_SHARE = 0.9  # positions judged in models with experts, dtypes below float32
PERPLEXITY_LIMIT = 1e-4  # relative, fp32 engines


@dataclass(frozen=True, slots=True)
class EngineResult:
    """One engine, or eager in some dtype, against the judge, over all positions.

    quantization: the engine's method, None where its weights are the checkpoint's. mean_error,
    max_error: of the logits. kl: mean KL divergence in nats. top1: share of positions with the
    judge's argmax. tokens: share of greedily generated tokens equal to those of eager in the
    engine's dtype, up to the first that differs. limit: what `judged` must not exceed, None where
    there is none; judged: max_error for fp32 (or its mean error against fp64), else mean_error (of
    the better 9 tenths of the positions with experts).
    perplexity: of the text, where one was given. layers: the normalised error (kernels/tolerance)
    of the hidden state behind each layer, where asked for; layers_by: how those were got.
    """

    name: str
    dtype: str
    quantization: str | None
    max_error: float
    mean_error: float
    kl: float
    top1: float
    tokens: float
    judged: float
    limit: float | None
    perplexity: float | None = None
    layers: tuple[float, ...] | None = None
    layers_by: str | None = None

    @property
    def passed(self) -> bool:
        return self.limit is None or self.judged <= self.limit  # NaN fails

    def summary(self) -> str:
        kind = "max" if self.dtype == "float32" else "mean"
        limit = "no limit" if self.limit is None else f"limit {self.limit:.2e}"
        return (
            f"{kind} logit error {self.judged:.2e} ({limit}), "
            f"top-1 {self.top1:.1%}, greedy tokens equal {self.tokens:.1%}"
        )

    def to_dict(self) -> dict[str, Any]:
        return {k: _finite(v) for k, v in dataclasses.asdict(self).items()} | {
            "passed": self.passed
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """Engines, and eager itself in each of their lower dtypes and where it was asked for.

    checkpoint: its directory. judge: "reference", what the engines stand for: the checkpoint, or
    the weights that their INT4 decodes to; or "checkpoint", the unquantised one whatever they are.
    perplexity: of the judge on the text that was given; text_tokens: how many it predicts there.
    device: of eager, the judge among it: "cpu" or "cuda". cut_prompts: how many were too long for
    the engines and were cut.
    """

    engines: tuple[EngineResult, ...]
    eager: tuple[EngineResult, ...]
    checkpoint: str
    judge: str
    num_prompts: int
    num_positions: int
    perplexity: float | None = None
    text_tokens: int = 0
    device: str = "cpu"
    cut_prompts: int = 0

    @property
    def passed(self) -> bool:
        return all(engine.passed and self.perplexity_passed(engine) for engine in self.engines)

    def perplexity_passed(self, engine: EngineResult) -> bool:
        judged = engine.dtype == "float32" and engine.limit is not None
        if self.perplexity is None or engine.perplexity is None or not judged:
            return True
        return abs(engine.perplexity / self.perplexity - 1) <= PERPLEXITY_LIMIT

    def to_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "checkpoint": self.checkpoint,
            "judge": self.judge,
            "device": self.device,
            "prompts": self.num_prompts,
            "cut_prompts": self.cut_prompts,
            "positions": self.num_positions,
            "perplexity": _finite(self.perplexity),
            "text_tokens": self.text_tokens,
            "engines": [engine.to_dict() for engine in self.engines],
            "eager": [eager.to_dict() for eager in self.eager],
        }


def _finite(value: Any) -> Any:
    """JSON has neither NaN nor infinity: None stands for them."""
    if isinstance(value, (tuple, list)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def fp32_limit(reference: Sequence[Tensor]) -> float:
    """Of the largest logit error; larger where the judge's own logits are."""
    largest = max(float(logits.abs().max()) for logits in reference)
    return FP32_LIMIT * max(1.0, largest / 32)


def result_of(
    name: str, dtype: str, quantization: str | None, reference: Sequence[Tensor],
    found: Sequence[Tensor], tokens: float, limit: float | None, share: float,
) -> EngineResult:  # fmt: skip
    """reference, found: logits [positions, vocab] of each text. share: of the positions that are
    judged in dtypes below float32, the best ones."""
    judge, logits = torch.cat(list(reference)), torch.cat(list(found))
    error = (judge - logits).abs()
    kl = sum(map(_divergence, reference, found)) / len(judge)
    largest, mean = float(error.max()), float(error.mean())
    each = error.mean(-1).sort().values
    typical = float(each[: max(1, int(share * len(each)))].mean())
    if mean != mean:  # NaN anywhere fails
        typical = mean
    return EngineResult(
        name=name,
        dtype=dtype,
        quantization=quantization,
        max_error=largest,
        mean_error=mean,
        kl=kl,
        top1=float((judge.argmax(-1) == logits.argmax(-1)).float().mean()),
        tokens=tokens,
        judged=largest if dtype == "float32" else typical,
        limit=limit,
    )


def _divergence(judge: Tensor, logits: Tensor) -> float:
    """KL of all positions, in fp64: fp32's rounding alone is 1e-8."""
    log_p, log_q = judge.double().log_softmax(-1), logits.double().log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum())


def equal_share(expected: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> float:
    """Share of the expected tokens generated before the first difference of their prompt."""
    equal = 0
    for want, got in zip(expected, found, strict=True):
        differs = [i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b]
        equal += differs[0] if differs else min(len(want), len(got))
    return equal / max(1, sum(map(len, expected)))
