"""DeepSeek engines against transformers' eager model: what their configurations change.

Tiny models with weights of std 0.5 in ONNX Runtime engines, which build in a second; the trained
checkpoint where it is present. Ordinary cases of these families are in test_engines.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seekforge.compile.build import Options, build
from seekforge.compile.compare import compare
from seekforge.compile.perplexity import read_text
from seekforge.models.config import parse_config
from seekforge.models.spec import ModelSpec
from seekforge.runtime.llm import LLM
from seekforge.runtime.manifest import KVLayout
from seekforge.runtime.padded import make_pools
from seekforge.runtime.sampling import SamplingParams
from seekforge.runtime.session import open_session

Engine = Callable[..., Path]
Model = Callable[..., nn.Module]
TRAINED = Path(__file__).parents[2] / "shared" / "checkpoints" / "tiny-deepseek-v3"
IDS = [*range(30, 70), *range(200, 230)]


def yarn(**more: Any) -> dict[str, Any]:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "beta_fast": 32, "beta_slow": 1}
    return {"rope_parameters": {**rope, "original_max_position_embeddings": 32, **more}}


def eager_logits(model: nn.Module, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([ids])).logits[0]
    return logits


V3 = {
    "half": {"rope_interleave": False},  # B01
    "no-q-lora": {"q_lora_rank": None},
    "bias": {"attention_bias": True},
    "narrow-v": {"v_head_dim": 6},  # B20; 12 of 16 is the fixture's own
    "wide-v": {"v_head_dim": 20},
    "one-group": {"n_group": 1, "topk_group": 1},
    "not-normalised": {"norm_topk_prob": False, "routed_scaling_factor": 1.0},  # B16
    "all-moe": {"first_k_dense_replace": 0},  # B21
    "all-dense": {"first_k_dense_replace": 2},
    "yarn": yarn(),
    "yarn-mscale": yarn(mscale=1.0, mscale_all_dim=1.0),
    "yarn-one-factor": yarn(mscale=0.707, mscale_all_dim=0.5),
}
V2 = {
    "q-lora": {"q_lora_rank": 24},
    "groups": {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},  # B15
    "group-of-one": {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3},
    "scaled": {"routed_scaling_factor": 16.0},
    "all-dense": {"first_k_dense_replace": 2},
    "wide-v": {"v_head_dim": 20},
    "yarn": yarn(mscale=0.707, mscale_all_dim=0.707),
}
CASES = [
    *[pytest.param("deepseek_v3", config, id=f"v3-{name}") for name, config in V3.items()],
    *[pytest.param("deepseek_v2", config, id=f"v2-{name}") for name, config in V2.items()],
    pytest.param("qwen3_moe", {"norm_topk_prob": False}, id="qwen3_moe-not-normalised"),
    pytest.param("qwen3_moe", {"decoder_sparse_step": 2}, id="qwen3_moe-every-second"),
]


@pytest.mark.parametrize(("family", "config"), CASES)
def test_configurations(
    family: str, config: dict[str, Any], tiny_engine: Engine, tiny_model: Model
) -> None:
    """At every position, in chunks: decode (absorbed) equals prefill equals eager."""
    expected = eager_logits(tiny_model(family, **config), IDS)
    llm = LLM(tiny_engine(family, "onnxruntime", **config))
    for chunk in (1, 9, 64):
        error = (llm.score(IDS, chunk) - expected).abs()
        assert error.max() <= 2e-4, f"{chunk=} {error.max(-1).values}"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_cache_holds_the_latent_alone(dtype: str, tiny_engine: Engine) -> None:
    """kv_lora_rank + qk_rope_head_dim values a token and layer, read off the allocated pools."""
    session: Any = open_session(tiny_engine("deepseek_v3", "onnxruntime", dtype=dtype))
    session.allocate(11, 8)
    stored = sum(pool.nbytes for pool in session.pools.values())
    element = 4 if dtype == "float32" else 2
    layers = session.manifest.kv.num_layers
    assert stored / (11 * 8 * layers) == (16 + 8) * element
    assert session.manifest.kv.token_bytes == layers * (16 + 8) * element


def test_a_token_of_v3_takes_1152_bytes_a_layer() -> None:
    config = parse_config(Path(__file__).parent / "configs" / "deepseek-v3.json")
    spec = ModelSpec.from_config(config)
    kv = KVLayout(2, 16, spec.kv_pools, "bfloat16", dynamic_block_size=True)
    pools = make_pools(kv, 3, 16, torch.device("cpu"))
    assert list(pools) == ["latent_pool_0", "latent_pool_1"]
    assert sum(pool.nbytes for pool in pools.values()) / (3 * 16 * 2) == 2 * (512 + 64) == 1152


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "qwen3_moe"])
def test_half_precision_is_as_good_as_eager(
    family: str, tiny_engine: Engine, tiny_model: Model
) -> None:
    judge = eager_logits(tiny_model(family), IDS)
    eager = eager_logits(tiny_model(family).to(torch.float16), IDS).float()
    found = LLM(tiny_engine(family, "onnxruntime", dtype="float16")).score(IDS)
    # The median, not the mean: a token whose rounded scores choose another expert says nothing
    # about either side's arithmetic.
    ratio = (found - judge).abs().median() / (eager - judge).abs().median()
    assert ratio <= 1.1, f"{ratio=}"


def test_sums_beyond_float16(tiny_checkpoint: Engine, tiny_model: Model, tmp_path: Path) -> None:
    """B35: a residual stream that passes 65504 is exact in float32; in float16 the request ends
    with an error, not with token 0."""
    model = tiny_model("deepseek_v2")
    with torch.no_grad():
        for layer in model.model.layers[1:]:  # type: ignore[union-attr, index]
            layer.mlp.experts.down_proj *= 3e4  # type: ignore[union-attr, operator]
            layer.mlp.shared_experts.down_proj.weight *= 3e4  # type: ignore[union-attr, operator]
    model.save_pretrained(tmp_path / "large")
    for file in tiny_checkpoint("deepseek_v2").glob("token*.json"):
        (tmp_path / "large" / file.name).write_bytes(file.read_bytes())
    engines = {}
    for dtype in ("float32", "float16"):
        options = Options(backends=("onnxruntime",), dtype=dtype, max_len=128, verify="none")
        (engines[dtype],) = build(tmp_path / "large", tmp_path / dtype, options)
    expected = eager_logits(model, IDS)
    assert (LLM(engines["float32"]).score(IDS) - expected).abs().max() <= 2e-4
    found = LLM(engines["float16"])
    assert not found.score(IDS).isfinite().all()
    (output,) = found.generate([IDS], SamplingParams(max_tokens=32, ignore_eos=True))
    assert output.choices[0].finish_reason == "error" and 0 not in output.choices[0].token_ids
    session: Any = found.session
    assert all(pool.isfinite().all() for pool in session.pools.values())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (TRAINED / "config.json").is_file():
        pytest.skip(f"the trained checkpoint is not at {TRAINED}")
    out = tmp_path_factory.mktemp("trained")
    options = Options(backends=("onnxruntime",), max_len=640, verify="none")
    (engine,) = build(TRAINED, out, options)
    return engine


def test_trained_checkpoint(trained: Path) -> None:
    """Real weights: the same tokens as eager, the same perplexity on held-out text."""
    text = read_text(TRAINED / "eval.txt")
    result = compare([trained], TRAINED, max_tokens=16, text=text, text_tokens=1024)
    (engine,) = result.engines
    assert engine.tokens == 1.0 and result.passed, engine
    assert result.perplexity is not None and 10 < result.perplexity < 25
