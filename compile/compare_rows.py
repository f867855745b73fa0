"""One row of a comparison: an engine, or eager in some dtype, held against what the judge said.

In: the evidence, and a model or an engine. Out: an `EngineResult`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from seekforge.compile.compare_judge import eager_layers, eager_logits, in_fp64
from seekforge.compile.compare_layers import HOW, layer_states
from seekforge.compile.compare_result import (
    DTYPE_FACTOR,
    FP64_FACTOR,
    EngineResult,
    equal_share,
    fp32_limit,
    result_of,
)
from seekforge.compile.perplexity import perplexity
from seekforge.kernels.tolerance import normalised_error
from seekforge.runtime.llm import LLM
from seekforge.runtime.manifest import read_manifest
from seekforge.runtime.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Evidence:
    """What all rows are compared on, and what the judge said.

    full: each prompt with the judge's own continuation: real text, and long enough. texts: greedy
    continuations by eager's dtype. windows: of the text for perplexities. logits [tokens, vocab]
    and states (behind each layer, None where not asked for): of each of `full`. share: of the
    positions that are judged in dtypes below float32.
    """

    prompts: list[list[int]]
    full: list[list[int]]
    texts: dict[str, list[list[int]]]
    windows: list[list[int]]
    logits: list[Tensor]
    states: list[list[Tensor]] | None
    share: float


def eager_row(model: nn.Module, dtype: str, evidence: Evidence) -> EngineResult:
    """Eager in `dtype`, whose continuations are in the evidence already: no limit."""
    score = partial(eager_logits, model)
    logits = [score(tokens) for tokens in evidence.full]
    equal = equal_share(evidence.texts["float32"], evidence.texts[dtype])
    row = result_of("eager", dtype, None, evidence.logits, logits, equal, None, evidence.share)
    if evidence.windows:
        row = replace(row, perplexity=perplexity(score, evidence.windows)[0])
    if evidence.states is not None:
        errors = layer_errors(partial(eager_layers, model), evidence.full, evidence.states)
        row = replace(row, layers=errors)
    return row


def engine_row(
    llm: LLM,
    name: str,
    max_tokens: int,
    evidence: Evidence,
    eager: dict[str, EngineResult],
    exact: Callable[[], nn.Module],
    limited: bool,
) -> EngineResult:
    """eager: rows by dtype. exact: loads the judge anew, for fp64. limited: whether the engine must
    be as near to the judge as its dtype allows."""
    dtype = llm.manifest.dtype
    method = (llm.manifest.quantization or {}).get("method")
    limit = None
    if limited:
        single = dtype == "float32"
        limit = fp32_limit(evidence.logits) if single else DTYPE_FACTOR * eager[dtype].judged
    outputs = llm.generate(evidence.prompts, SamplingParams(max_tokens=max_tokens))
    tokens = [list(output.choices[0].token_ids) for output in outputs]
    equal = equal_share(evidence.texts[dtype], tokens)
    logits = [llm.score(tokens) for tokens in evidence.full]
    row = result_of(name, dtype, method, evidence.logits, logits, equal, limit, evidence.share)
    if evidence.windows:
        row = replace(row, perplexity=perplexity(llm.score, evidence.windows)[0])
    if dtype == "float32" and not row.passed and row.judged == row.judged:
        row = _settled(row, exact, evidence, logits)
    return row


def _settled(
    row: EngineResult, load: Callable[[], nn.Module], evidence: Evidence, found: list[Tensor]
) -> EngineResult:
    """Judges an fp32 engine beside fp32 eager, both against eager in fp64."""
    model = in_fp64(load())
    exact = torch.cat([eager_logits(model, tokens) for tokens in evidence.full])
    ours, eagers = (
        float((exact - torch.cat(side)).abs().mean()) for side in (found, evidence.logits)
    )
    return replace(row, judged=ours, limit=FP64_FACTOR * eagers)


def with_layers(
    row: EngineResult, directory: Path, checkpoint: Path, evidence: Evidence
) -> EngineResult:
    """The row with the errors of the hidden states behind each layer of the engine."""
    assert evidence.states is not None
    with layer_states(directory, checkpoint) as states:
        errors = layer_errors(states, evidence.full, evidence.states)
    return replace(row, layers=errors, layers_by=HOW[read_manifest(directory).backend])


def layer_errors(
    states: Callable[[Sequence[int]], list[Tensor]],
    texts: Sequence[Sequence[int]],
    judge: Sequence[list[Tensor]],
) -> tuple[float, ...]:
    """Of each layer the normalised error over all texts."""
    found = [states(tokens) for tokens in texts]
    return tuple(
        normalised_error(torch.cat(right), torch.cat(ours))
        for right, ours in zip(zip(*judge, strict=True), zip(*found, strict=True), strict=True)
    )
