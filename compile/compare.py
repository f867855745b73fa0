"""Comparison of engines with transformers' eager model: the proof that compiled equals eager.

In: engine directories and, by name, eager in some dtype; prompts, and a text if wanted. Out: a
`Comparison` (compare_result.py says what passes). Logits come from teacher forcing through the
paged cache, tokens from greedy generation. Beside the engines one model of the checkpoint's size is
in memory at a time; it runs on the GPU where an engine does.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from seekforge.compile.build_cache_request import checkpoint_digests
from seekforge.compile.compare_judge import (
    JUDGES,
    eager_layers,
    eager_logits,
    judge_device,
    load_judge,
)
from seekforge.compile.compare_result import ROUTED_SHARE, Comparison, EngineResult
from seekforge.compile.compare_rows import Evidence, eager_row, engine_row, with_layers
from seekforge.compile.compare_speaker import Speaker
from seekforge.compile.perplexity import perplexity
from seekforge.compile.prompts import PROMPTS, Prompt
from seekforge.kernels.errors import InputError
from seekforge.models.checkpoint import open_checkpoint
from seekforge.runtime.fit import resolve_engine
from seekforge.runtime.llm import LLM
from seekforge.runtime.manifest import DTYPE_BYTES, Manifest

EAGER = "eager"


def eager_dtype(name: Path | str) -> str | None:
    """The dtype of "eager" or "eager:bfloat16" among the engines, None for a path. Raises
    InputError for a dtype that is unknown."""
    word, _, dtype = str(name).partition(":")
    if word != EAGER or (not dtype and Path(word).exists()):
        return None
    if (dtype or "float32") not in DTYPE_BYTES:
        raise InputError(f"{name}: unknown dtype; one of {', '.join(DTYPE_BYTES)}")
    return dtype or "float32"


def compare(
    engines: Sequence[Path | str],
    checkpoint: Path | None = None,
    prompts: Sequence[Prompt] = PROMPTS,
    max_tokens: int = 64,
    text: str | None = None,
    text_tokens: int | None = None,
    *,
    judge: str = "reference",
    layers: bool = False,
) -> Comparison:
    """Compares engine directories (or bundles) of one checkpoint, and eager by name, with its eager
    model.

    checkpoint: None for the one named in the first engine's manifest. prompts: texts, or messages
    for the chat template. text: for perplexities, its first `text_tokens` tokens (None: all).
    judge: see `Comparison`. layers: the hidden states behind each layer are compared too.
    Raises InputError if the checkpoint is gone, or an engine is of another model.
    """
    if judge not in JUDGES:
        raise InputError(f"--judge {judge}: unknown; one of {', '.join(JUDGES)}")
    if text is None and text_tokens is not None:
        raise InputError("--text-tokens without --text: give the text")
    paths = [Path(engine) for engine in engines if eager_dtype(engine) is None]
    llms = [LLM(resolve_engine(path)) for path in paths]
    source = _source(checkpoint, llms)
    opened = open_checkpoint(source)
    for path, llm in zip(paths, llms, strict=True):
        if checkpoint is None:
            _check_checkpoint(source, path, llm.manifest)
        if llm.manifest.vocab_size != opened.spec.vocab_size:
            raise InputError(
                f"{path}: its vocabulary has {llm.manifest.vocab_size} tokens, that of {source} "
                f"{opened.spec.vocab_size}: they are not of one model"
            )
    manifests = [llm.manifest for llm in llms]
    device = judge_device(manifests, opened.spec.parameters)
    load = partial(load_judge, source, manifests, list(map(resolve_engine, paths)), judge, device)
    model = load()
    speaker = Speaker(opened, llms, max_tokens)
    windows = [] if text is None else speaker.windows(text, text_tokens)
    evidence = _evidence(model, speaker, [speaker.tokens(p) for p in prompts], windows, layers)
    judged, count = (None, 0)
    if windows:
        judged, count = perplexity(partial(eager_logits, model), windows)
    dtypes = [eager_dtype(engine) for engine in engines]
    dtypes += [llm.manifest.dtype for llm in llms if llm.manifest.dtype != "float32"]
    eager: dict[str, EngineResult] = {}
    for dtype in dict.fromkeys(filter(None, dtypes)):
        if next(model.parameters()).dtype != torch.float32:
            del model
            model = load()
        model = model.to(getattr(torch, dtype))
        if dtype not in evidence.texts:
            evidence.texts[dtype] = speaker.continuations(model, evidence.prompts)
        eager[dtype] = eager_row(model, dtype, evidence)
    del model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    rows = []
    for llm, path, name in zip(llms, paths, _names(paths), strict=True):
        limited = judge == "reference" or llm.manifest.quantization is None
        row = engine_row(llm, name, max_tokens, evidence, eager, load, limited)
        rows.append(with_layers(row, resolve_engine(path), source, evidence) if layers else row)
    return Comparison(
        tuple(rows), tuple(eager.values()), str(source.resolve()), judge, len(evidence.prompts),
        sum(map(len, evidence.full)), judged, count, device.type,
        speaker.cut,
    )  # fmt: skip


def _evidence(
    model: nn.Module, speaker: Speaker, prompts: list[list[int]], windows: list[list[int]],
    layers: bool,
) -> Evidence:  # fmt: skip
    """What the fp32 judge says, before it gives way to the next model."""
    texts = {"float32": speaker.continuations(model, prompts)}
    full = [prompt + more for prompt, more in zip(prompts, texts["float32"], strict=True)]
    return Evidence(
        prompts=prompts,
        full=full,
        texts=texts,
        windows=windows,
        logits=[eager_logits(model, tokens) for tokens in full],
        states=[eager_layers(model, tokens) for tokens in full] if layers else None,
        share=ROUTED_SHARE if speaker.experts else 1.0,
    )


def _source(checkpoint: Path | None, llms: Sequence[LLM]) -> Path:
    if checkpoint is None and not llms:
        raise InputError("eager alone: say of which checkpoint with --checkpoint")
    source = checkpoint or Path(llms[0].manifest.model.get("checkpoint", ""))
    if not (source / "config.json").is_file():
        raise InputError(
            f"{source}: the engine's checkpoint is not there; give it with --checkpoint"
        )
    return source


def _check_checkpoint(source: Path, path: Path, manifest: Manifest) -> None:
    """Raises InputError for an engine that was built from other weights than those of `source`."""
    if manifest.built_from is None:
        return
    wanted = _decisive(checkpoint_digests(source))
    found = _decisive(manifest.built_from["checkpoint"])
    differ = sorted(n for n in wanted | found if wanted.get(n) != found.get(n))
    if differ:
        raise InputError(
            f"{path}: built from {manifest.model.get('checkpoint')}, and not from what {source} "
            f"holds now: {', '.join(differ[:3])} differ; compare engines of one checkpoint, build "
            "this one again, or name the judge with --checkpoint"
        )


def _decisive(digests: Mapping[str, str]) -> dict[str, str]:
    """Of those files that decide what the model computes."""
    return {
        name: digest
        for name, digest in digests.items()
        if name == "config.json" or name.endswith(".safetensors")
    }


def _names(paths: Sequence[Path]) -> list[str]:
    """inductor for out/inductor (and for a build's temporary out/.inductor.x1y2), with the bundle's
    name where there are several."""
    ends = [path.resolve().name.lstrip(".").split(".")[0] for path in paths]
    return [
        end if ends.count(end) == 1 else f"{path.resolve().parent.name}/{end}"
        for path, end in zip(paths, ends, strict=True)
    ]
