"""B06: max_position_embeddings is the longest context, whatever factor a RoPE scaling has, and a
request may use all of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from seekforge.kernels.errors import InputError
from seekforge.runtime.llm import LLM
from seekforge.runtime.sampling import SamplingParams

YARN = {"type": "yarn", "factor": 4.0}
LLAMA3 = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("scaling", "limit"),
    [
        (YARN | {"original_max_position_embeddings": 64}, 256),
        (YARN, 64),  # Qwen2.5's spelling, without the original length: not extended
        (LLAMA3 | {"original_max_position_embeddings": 64}, 256),
    ],
    ids=["yarn", "yarn without original", "llama3"],
)
def test_a_request_may_end_at_the_limit(
    tiny_engine: Callable[..., Path],
    tiny_model: Callable[..., nn.Module],
    scaling: dict[str, Any],
    limit: int,
) -> None:
    overrides = {
        "num_hidden_layers": 1,
        "max_position_embeddings": limit,
        "rope_scaling": scaling,
    }
    with pytest.raises(InputError, match=rf"{limit + 1} .*1\.\.{limit}"):
        tiny_engine("llama", "onnxruntime", max_len=limit + 1, **overrides)
    llm = LLM(tiny_engine("llama", "onnxruntime", max_len=limit, **overrides))
    ids = torch.randint(3, 290, (limit,), generator=torch.Generator().manual_seed(0))
    expected = tiny_model("llama", **overrides)(ids[None]).logits[0]
    error = (llm.score(ids.tolist()) - expected).abs().amax(1)
    assert error.max() <= 2e-4, f"{error.argmax()=} {error.max()=}"
    prompt = ids[: limit - 3].tolist()
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(output.choices[0].token_ids) == 3
    with pytest.raises(InputError, match=str(limit)):
        llm.generate([prompt], SamplingParams(max_tokens=4, ignore_eos=True))
