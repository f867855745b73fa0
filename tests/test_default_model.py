"""The default model, real weights: engines generate exactly what transformers' generate does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from seekforge.compile.build import Options, build
from seekforge.compile.prompts import PROMPTS
from seekforge.kernels.errors import CheckpointError
from seekforge.models.default import resolve_checkpoint
from seekforge.models.module import load_eager
from seekforge.runtime.llm import LLM
from seekforge.runtime.sampling import SamplingParams

pytestmark = pytest.mark.slow
NEW_TOKENS = 64


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    try:
        return resolve_checkpoint("default")
    except CheckpointError as error:
        pytest.skip(f"the default checkpoint can't be had here: {error}")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[tuple[list[int], list[int]]]:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = load_eager(checkpoint, torch.float32)
    pairs = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
        )
        pairs.append((ids[0].tolist(), out[0, ids.shape[1] :].tolist()))
    return pairs


@pytest.mark.parametrize("backend", ["onnxruntime", "inductor"])
def test_tokens_equal_generate(
    backend: str,
    checkpoint: Path,
    expected: list[tuple[list[int], list[int]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    out = tmp_path_factory.mktemp("engines")
    (engine,) = build(checkpoint, out, Options(backends=(backend,), max_len=256))
    check_tokens(engine, expected)


def check_tokens(engine: Path, expected: list[tuple[list[int], list[int]]]) -> None:
    params = SamplingParams(max_tokens=NEW_TOKENS)
    prompts = [prompt for prompt, _ in expected]
    for block_size, chunk in ((4, 5), (16, 16), (16, None)):
        llm = LLM(engine, block_size=block_size, max_chunk=chunk)
        batched = llm.generate(prompts, params)
        single = [llm.generate([prompt], params)[0] for prompt in prompts]
        for outputs in (batched, single):
            found = [list(output.choices[0].token_ids) for output in outputs]
            assert found == [tokens for _, tokens in expected], f"{block_size=} {chunk=}"
