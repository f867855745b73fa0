"""TensorRT-RTX engines of latent attention and of mixtures of experts, both profiles, no GPU."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from seekforge.compile.tensorrt import TensorRTResult, build_tensorrt
from seekforge.kernels.gathered_mla_attention import gathered_mla_attention
from seekforge.kernels.moe_experts import moe_experts
from seekforge.kernels.moe_route import moe_route
from seekforge.runtime.manifest import read_manifest
from seekforge.runtime.profiles import Profile, ShapeRange

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")

Make = Callable[..., Path]
Dims = tuple[int | str, ...]
CHUNK, BATCH, BLOCK = 32, 4, 16
# Sizes of the dynamic dimensions in the context and the generation profile: min, typical, max.
CONTEXT = {"tokens": (1, CHUNK, CHUNK), "batch": (1, 1, 1), "seq": (1, CHUNK, CHUNK)}
GENERATION = {"tokens": (1, BATCH, BATCH), "batch": (1, BATCH, BATCH), "seq": (1, 1, 1)}
EITHER = {"blocks": (1, 64, 4096), "block_size": (BLOCK,) * 3, "max_blocks": (1, 4, 8)}


def profile(inputs: dict[str, tuple[torch.dtype, Dims]], sizes: dict[str, Any]) -> Profile:
    ranges = {
        name: [sizes[d] if isinstance(d, str) else (d, d, d) for d in dims]
        for name, (_, dims) in inputs.items()
    }
    return {name: ShapeRange(*zip(*dims, strict=True)) for name, dims in ranges.items()}


def build(path: Path, inputs: dict[str, tuple[torch.dtype, Dims]]) -> TensorRTResult:
    return build_tensorrt(
        path, path.with_name("model.engine"), product="tensorrt-rtx",
        profiles=[profile(inputs, EITHER | CONTEXT), profile(inputs, EITHER | GENERATION)],
    )  # fmt: skip


def weights_in(result: TensorRTResult) -> int:
    """Bytes of the engine's weights, as the builder counts them."""
    found = re.findall(r"Total Weights Memory: (\d+) bytes", result.log_path.read_text())
    return int(found[-1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_experts_and_routing_build_with_one_copy_of_the_weights(
    op_onnx: Make, dtype: torch.dtype
) -> None:
    E, H, I, K = 16, 256, 320, 3  # noqa: E741
    sizes = {"gate": (E, H), "gate_up": (E, 2 * I, H), "down": (E, H, I)}
    weights = {name: torch.randn(shape).to(dtype) / 16 for name, shape in sizes.items()}
    weights["bias"] = torch.randn(E)
    inputs = {"x": (dtype, ("tokens", H))}

    def block(graph: torch.fx.Graph, x: Any, gate: Any, gate_up: Any, down: Any, bias: Any) -> Any:
        logits = graph.call_function(torch.ops.aten.linear.default, (x, gate))
        route = (logits, bias, K, "sigmoid", 4, 2, "top2", True, 2.5)
        pair = graph.call_function(moe_route, route)
        w, indices = (graph.call_function(operator.getitem, (pair, i)) for i in range(2))
        return [graph.call_function(moe_experts, (x, w, indices, gate_up, down))]

    result = build(op_onnx(block, inputs, weights, ["logits"], "tensorrt-rtx"), inputs)
    assert result.warnings == ()
    size = sum(w.nbytes for w in weights.values())
    assert size <= weights_in(result) < 1.01 * size
    assert result.layers["network"]["conditional_output"] == 1
    for number in range(2):
        kinds = result.layers["profiles"][number]["compiled"]
        assert kinds["cjmp"] == 1 and kinds["gemm"] + kinds.get("runtime_fusion", 0) >= 3, kinds
        # The gather of the chosen experts' weights is part of the sum: no copy of them is made.
        sums = [
            layer.name for layer in result.compiled
            if layer.profile == number and re.search("Gath.*MulSum", layer.name)
        ]  # fmt: skip
        assert len(sums) == 2, sums


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("heads", "nope", "rope", "v", "rank"), [(4, 8, 8, 12, 16), (16, 128, 64, 128, 512)],
    ids=["tiny", "v2_lite"],
)  # fmt: skip
def test_latent_attention_builds(
    op_onnx: Make, dtype: torch.dtype, heads: int, nope: int, rope: int, v: int, rank: int
) -> None:
    inputs: dict[str, tuple[torch.dtype, Dims]] = {
        "q_nope": (dtype, ("batch", "seq", heads, nope)),
        "q_rope": (dtype, ("batch", "seq", heads, rope)),
        "latent": (dtype, ("batch", "seq", rank)),
        "k_rope": (dtype, ("batch", "seq", rope)),
        "pool": (dtype, ("blocks", "block_size", rank + rope)),
        "block_tables": (torch.int64, ("batch", "max_blocks")),
        "past_lens": (torch.int64, ("batch",)),
    }
    kv_b = torch.randn(heads * (nope + v), rank).to(dtype)
    path = op_onnx(
        lambda graph, *nodes: [graph.call_function(gathered_mla_attention, (*nodes, 0.1))],
        inputs, {"kv_b": kv_b}, ["new_y"], "tensorrt-rtx",
    )  # fmt: skip
    result = build(path, inputs)
    assert result.warnings == ()
    assert kv_b.nbytes <= weights_in(result) < kv_b.nbytes + 10_000
    assert result.layers["network"]["softmax"] == 1
    for number in range(2):
        assert result.layers["profiles"][number]["compiled"]["gemm"] >= 3


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v2"])
def test_whole_models_build(tiny_engine: Callable[..., Path], family: str) -> None:
    """Two layers, the second a mixture of experts; float16, both profiles."""
    manifest = read_manifest(tiny_engine(family, "tensorrt-rtx", dtype="float16"))
    assert manifest.layers is not None
    network = manifest.layers["network"]
    assert network["conditional_output"] == 1  # the experts
    assert "attention" not in network  # written out: nothing to be fused or not
    assert network["softmax"] == 2 + (family == "deepseek_v2")  # V2 routes with one
    assert network["topk"] == (3 if family == "deepseek_v3" else 1)
    for profile in manifest.layers["profiles"]:
        assert profile["compiled"]["cjmp"] == 1 and profile["compiled"]["gemm"] > 10
