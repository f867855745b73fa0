"""TensorRT-RTX engines of INT4 weights: both profiles, no GPU; the weights stay INT4."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from seekforge.compile.tensorrt import TensorRTResult, build_tensorrt
from seekforge.compile.weights import SIGNED
from seekforge.kernels.int4 import quantise
from seekforge.kernels.int4_linear import int4_linear
from seekforge.kernels.int4_moe_experts import int4_moe_experts
from seekforge.runtime.profiles import ShapeRange

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")

Make = Callable[..., Path]
TOKENS = (64, 4)  # of the context and the generation profile


def build(
    path: Path, inputs: dict[str, tuple[torch.dtype, tuple[int | str, ...]]]
) -> TensorRTResult:
    def profile(tokens: int) -> dict[str, ShapeRange]:
        widths = {name: int(dims[1]) for name, (_, dims) in inputs.items()}
        return {n: ShapeRange((1, w), (tokens, w), (tokens, w)) for n, w in widths.items()}

    return build_tensorrt(
        path, path.with_name("model.engine"), product="tensorrt-rtx",
        profiles=[profile(tokens) for tokens in TOKENS],
    )  # fmt: skip


def weights_in(result: TensorRTResult) -> int:
    """Bytes of the engine's weights, as the builder counts them."""
    found = re.findall(r"Total Weights Memory: (\d+) bytes", result.log_path.read_text())
    return int(found[-1])


def parameters(
    prefix: str, shape: tuple[int, ...], size: int, symmetric: bool, dtype: torch.dtype
) -> dict[str, Tensor]:
    weight = quantise(torch.randn(shape) / shape[-1] ** 0.5 + 0.01, size, symmetric, dtype=dtype)
    parts = {"qweight": weight.qweight ^ SIGNED, "scales": weight.scales, "zeros": weight.zeros}
    return {f"{prefix}{name}": part for name, part in parts.items() if part is not None}


def kernels(result: TensorRTResult, profile: int, pattern: str) -> list[str]:
    named = (layer.name for layer in result.compiled if layer.profile == profile)
    return [name for name in named if re.search(pattern, name)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize(("k", "size"), [(1024, 128), (576, 64), (144, 36)])
def test_a_linear_layer_multiplies_int4_weights(
    op_onnx: Make, k: int, size: int, symmetric: bool, dtype: torch.dtype
) -> None:
    weights = parameters("", (768, k), size, symmetric, dtype)
    inputs = {"x": (dtype, ("tokens", k))}

    def function(graph: torch.fx.Graph, x: Any, *parts: Any) -> list[Any]:
        parts = (*parts, None)[:3]
        return [graph.call_function(int4_linear, (x, *parts, None, size))]

    result = build(op_onnx(function, inputs, weights, ["logits"], "tensorrt-rtx"), inputs)
    assert result.warnings == ()
    # Zero points become a term in the dtype of the scales.
    size = weights["qweight"].nbytes + weights["scales"].nbytes * (1 if symmetric else 2)
    assert size <= weights_in(result) < 1.01 * size + 5000
    assert result.layers["network"]["dequantize"] == 1
    for profile in (0, 1):
        # One kernel reads INT4, decodes and multiplies: no decoded weight is written.
        assert len(kernels(result, profile, "ReplCastMul.*Fc")) == 1, result.compiled


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_experts_keep_one_copy_of_int4_weights(
    op_onnx: Make, dtype: torch.dtype, symmetric: bool
) -> None:
    E, H, I, K = 16, 256, 320, 3  # noqa: E741
    stacks = {"gate_up_": ((E, 2 * I, H), 64), "down_": ((E, H, I), 32)}
    weights: dict[str, Tensor] = {}
    for name, (shape, size) in stacks.items():
        weights |= parameters(name, shape, size, symmetric, dtype)
    inputs: dict[str, tuple[torch.dtype, tuple[int | str, ...]]] = {
        "x": (dtype, ("tokens", H)), "w": (torch.float32, ("tokens", K)),
        "indices": (torch.int64, ("tokens", K)),
    }  # fmt: skip

    def function(graph: torch.fx.Graph, x: Any, w: Any, indices: Any, *parts: Any) -> list[Any]:
        if symmetric:
            parts = (*parts[:2], None, *parts[2:], None)
        return [graph.call_function(int4_moe_experts, (x, w, indices, *parts, 64))]

    result = build(op_onnx(function, inputs, weights, ["logits"], "tensorrt-rtx"), inputs)
    assert result.warnings == ()
    size = sum(weights[n].nbytes for n in weights if "zeros" not in n)
    if not symmetric:
        size += sum(weights[n].nbytes for n in weights if "scales" in n)
    assert size <= weights_in(result) < 1.02 * size
    # Few tokens: the chosen experts' INT4 is read by the kernels that multiply and sum.
    for profile in (0, 1):
        assert len(kernels(result, profile, "ReplCastMul.*Gath.*MulSum")) == 2
    # Four tokens choose 12 of 16 experts at most: no other form is left in the generation engine.
    assert not kernels(result, 1, "Fc|gemm|MatMul")
    assert len(kernels(result, 0, "ReplCastMul.*Fc")) == 1  # all gates and ups
