"""Built engines against transformers' own generate and logits: the whole pipeline on tiny models.

ONNX Runtime engines build in a second and carry most cases; AOTInductor takes a C++ compiler half a
minute for each model, so one model is in the fast set and the others are slow.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

from seekforge.kernels.errors import EngineError, InputError
from seekforge.runtime.llm import LLM
from seekforge.runtime.manifest import read_manifest
from seekforge.runtime.sampling import SamplingParams
from seekforge.runtime.session import Chunk, open_session

Engine = Callable[..., Path]
Model = Callable[..., nn.Module]

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3")
BACKENDS = [
    *[("onnxruntime", family) for family in FAMILIES],
    ("inductor", "llama"),
    *[pytest.param("inductor", family, marks=pytest.mark.slow) for family in FAMILIES[1:]],
]
PROMPTS = [[0, 5, 9], list(range(20, 51)), [7], [3, 4, 3, 4, 3], list(range(100, 117))]
NEW_TOKENS = 12
PARAMS = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)


def expected_tokens(model: nn.Module) -> list[list[int]]:
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=2,
            suppress_tokens=list(range(280, 293)),  # ids without a token are never sampled (B19)
        )
        texts.append(out[0, len(prompt) :].tolist())
    return texts


def eager_logits(model: nn.Module, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([ids])).logits[0]
    return logits


def without_eos(model: nn.Module) -> nn.Module:
    """`min_new_tokens` would mask the eos logit; engines with ignore_eos may sample it."""
    model.generation_config.eos_token_id = None  # type: ignore[union-attr]
    return model


@pytest.mark.parametrize(("backend", "family"), BACKENDS)
def test_tokens_equal_generate(
    backend: str, family: str, tiny_engine: Engine, tiny_model: Model
) -> None:
    expected = expected_tokens(without_eos(tiny_model(family)))
    engine = tiny_engine(family, backend)
    for block_size, chunk in ((4, 5), (16, 16), (16, 64)):
        llm = LLM(engine, block_size=block_size, max_chunk=chunk)
        batched = llm.generate(PROMPTS, PARAMS)
        assert [list(o.choices[0].token_ids) for o in batched] == expected, (
            f"{block_size=} {chunk=}"
        )
        single = [llm.generate([prompt], PARAMS)[0] for prompt in PROMPTS]
        assert [list(o.choices[0].token_ids) for o in single] == expected, f"{block_size=} {chunk=}"
        assert llm.blocks.num_used == 0


@pytest.mark.parametrize(("backend", "family"), BACKENDS)
def test_logits_equal_eager_at_every_position(
    backend: str, family: str, tiny_engine: Engine, tiny_model: Model
) -> None:
    ids = torch.randint(3, 290, (77,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = eager_logits(tiny_model(family), ids)
    llm = LLM(tiny_engine(family, backend))
    for chunk in (1, 5, 16, 64):
        error = (llm.score(ids, chunk) - expected).abs().max()
        assert error <= 2e-4, f"{chunk=} {error=}"


@pytest.mark.parametrize("overrides", [
    {"attention_bias": True},
    {"tie_word_embeddings": True},
    {"num_key_value_heads": 4},
    {"mlp_bias": True},
    {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0,
                         "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 128}},
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    pytest.param({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                                      "original_max_position_embeddings": 64}},
                 marks=pytest.mark.slow),
], ids=["bias", "tied", "mha", "mlp_bias", "llama3", "linear", "yarn"])  # fmt: skip
def test_llama_variants(overrides: dict[str, Any], tiny_engine: Engine, tiny_model: Model) -> None:
    """B03, B04, B10, B22: rope scaling, biases and tied embeddings reach the engine."""
    ids = list(range(30, 110))
    engine = tiny_engine("llama", "onnxruntime", **overrides)
    error = (LLM(engine).score(ids) - eager_logits(tiny_model("llama", **overrides), ids)).abs()
    assert error.max() <= 2e-4
    if overrides.get("tie_word_embeddings"):
        model = onnx.load(engine / "model.onnx", load_external_data=False)
        tables = [t.name for t in model.graph.initializer if list(t.dims) == [293, 32]]
        assert len(tables) == 1, tables


@pytest.mark.parametrize(
    "backend", ["onnxruntime", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_half_precision_is_as_good_as_eager(
    backend: str, tiny_engine: Engine, tiny_model: Model
) -> None:
    ids = list(range(3, 83))
    judge = eager_logits(tiny_model("qwen2"), ids)
    dtypes = ("float16",) if backend == "onnxruntime" else ("bfloat16", "float16")
    for dtype in dtypes:
        eager = eager_logits(tiny_model("qwen2").to(getattr(torch, dtype)), ids).float()
        found = LLM(tiny_engine("qwen2", backend, dtype=dtype)).score(ids)
        ratio = (found - judge).abs().mean() / (eager - judge).abs().mean()
        assert ratio <= 1.1, f"{dtype=} {ratio=}"


def test_positions_beyond_4096(tiny_engine: Engine, tiny_model: Model) -> None:
    """B07: the cos/sin table has a row for every position that is admitted, and no more are."""
    overrides = {"max_position_embeddings": 5000, "num_hidden_layers": 1}
    ids = torch.randint(3, 290, (4106,), generator=torch.Generator().manual_seed(2)).tolist()
    engine = tiny_engine("llama", "onnxruntime", max_len=4108, max_chunk=512, **overrides)
    llm = LLM(engine)
    expected = eager_logits(tiny_model("llama", **overrides), ids)
    found = llm.score(ids)
    for position in (4094, 4095, 4096, 4097, 4105):
        assert (found[position] - expected[position]).abs().max() <= 2e-4, position
    (output,) = llm.generate([ids[:4106]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert output.choices[0].finish_reason == "length"
    with pytest.raises(InputError, match="4108"):
        llm.generate([ids[:4106]], SamplingParams(max_tokens=3))


@pytest.mark.parametrize("backend", ["onnxruntime", "inductor"])
def test_mixed_steps(backend: str, tiny_engine: Engine, tiny_model: Model) -> None:
    """B54: decodes and a chunk with a past in one step, scattered blocks."""
    model = tiny_model("llama")
    session = open_session(tiny_engine("llama", backend))
    session.allocate(12, 4)
    a, b = list(range(40, 49)), list(range(70, 84))
    tables = [[3, 9, 1], [0, 7, 2, 11]]
    session.step([Chunk(a[:8], 0, tables[0], []), Chunk(b[:5], 0, tables[1], [])])
    steps = session.step([Chunk(a[8:], 8, tables[0], [0]), Chunk(b[5:8], 5, tables[1], [0, 2])])
    assert (steps[0] - eager_logits(model, a)[8]).abs().max() <= 2e-4
    assert (steps[1:] - eager_logits(model, b)[[5, 7]]).abs().max() <= 2e-4
    rest = session.step([Chunk(b[8:], 8, tables[1], range(6))])
    assert (rest - eager_logits(model, b)[8:]).abs().max() <= 2e-4


def test_engines_move(tiny_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B48: the data is found beside the model, from any directory, wherever the folder goes."""
    engine = tiny_engine("llama", "onnxruntime")
    moved = tmp_path / "ein Ordner mit ď 世"
    shutil.copytree(engine, moved)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    expected = LLM(engine).score(PROMPTS[1])
    assert torch.equal(LLM(Path("..") / moved.name).score(PROMPTS[1]), expected)
    model = onnx.load(moved / "model.onnx", load_external_data=False)
    places = {
        e.value for t in model.graph.initializer for e in t.external_data if e.key == "location"
    }
    assert places == {"weights.safetensors"}
    (moved / "weights.safetensors").unlink()
    with pytest.raises(EngineError, match=r"weights\.safetensors.*missing"):
        LLM(moved)


def test_engines_of_a_bundle_share_their_weights(tiny_engine: Engine) -> None:
    one, other = (
        tiny_engine("llama", b) / "weights.safetensors" for b in ("onnxruntime", "inductor")
    )
    assert one.samefile(other)


def test_inductor_packages_hold_no_weights(tiny_engine: Engine) -> None:
    engine = tiny_engine("llama", "inductor")
    manifest = read_manifest(engine)
    assert {"model.pt2", "decode.pt2", "weights.safetensors"} <= {f.path for f in manifest.files}
    assert not list(engine.glob("*.job")) and not list(engine.glob("*.log"))


def test_flipped_byte_is_refused(tiny_engine: Engine, tmp_path: Path) -> None:
    broken = tmp_path / "engine"
    shutil.copytree(tiny_engine("llama", "onnxruntime"), broken)
    data = bytearray((broken / "weights.safetensors").read_bytes())
    data[-5] ^= 1
    (broken / "weights.safetensors").write_bytes(data)
    with pytest.raises(EngineError, match=r"weights\.safetensors.*sha256"):
        LLM(broken)
