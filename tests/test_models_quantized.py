"""Ready-made INT4 layouts, packed here by loops that follow each format's definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import AwqConfig

from seekforge.kernels.errors import CheckpointError
from seekforge.kernels.int4 import Int4, dequantise, quantise, unpack
from seekforge.kernels.int4_linear import int4_linear
from seekforge.models.quantized import (
    AWQ_ORDER,
    IN_ORDER,
    pack_words,
    read_int4,
    to_awq,
    unpack_words,
)
from seekforge.models.quantized_config import (
    QuantConfig,
    awq_config,
    matches,
    read_quant_config,
)

N, K, G = 16, 64, 32


def draw(symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [N, K], scales [N, K / G], zeros like scales, and the weight they stand for."""
    random = torch.Generator().manual_seed(2)
    q = torch.randint(0, 16, (N, K), generator=random, dtype=torch.uint8)
    scales = (0.1 + torch.rand(N, K // G, generator=random)).half()
    zeros = torch.randint(1, 16, scales.shape, generator=random, dtype=torch.uint8)
    if symmetric:
        zeros.fill_(8)
    weight = (q.float() - zeros.float().repeat_interleave(G, 1)) * scales.float().repeat_interleave(
        G, 1
    )
    return q, scales, zeros, weight


def words(q: Tensor, order: tuple[int, ...]) -> Tensor:
    """[rows, n] -> int32 [rows, n / 8], in Python's integers."""
    packed = []
    for row in q.tolist():
        packed.append([])
        for start in range(0, len(row), 8):
            word = sum(row[start + column] << (4 * i) for i, column in enumerate(order))
            packed[-1].append(word - (1 << 32) if word >= 1 << 31 else word)
    return torch.tensor(packed, dtype=torch.int32)


def awq_parts(q: Tensor, scales: Tensor, zeros: Tensor) -> dict[str, Tensor]:
    return {
        "qweight": words(q.T, AWQ_ORDER),
        "qzeros": words(zeros.T, AWQ_ORDER),
        "scales": scales.T.contiguous(),
    }


def gptq_parts(q: Tensor, scales: Tensor, zeros: Tensor, version: int) -> dict[str, Tensor]:
    return {
        "qweight": words(q, IN_ORDER).T.contiguous(),
        "qzeros": words((zeros - (2 - version)).T, IN_ORDER),
        "scales": scales.T.contiguous(),
        "g_idx": torch.arange(K, dtype=torch.int32) // G,
    }


def compressed_parts(q: Tensor, scales: Tensor, zeros: Tensor, stored: str) -> dict[str, Tensor]:
    parts = {
        "weight_packed": words(q, IN_ORDER),
        "weight_scale": scales,
        "weight_shape": torch.tensor([N, K]),
    }
    if stored == "packed":
        parts["weight_zero_point"] = words(zeros.T, IN_ORDER).T.contiguous()
    elif stored == "int8":
        parts["weight_zero_point"] = (zeros.to(torch.int8) - 8).contiguous()
    return parts


def config(method: Any, symmetric: bool = False, **changes: Any) -> QuantConfig:
    return QuantConfig(method, **({"group_size": G, "symmetric": symmetric} | changes))


def test_awq_word() -> None:
    """B27: columns 0..7 hold 0..7."""
    q = torch.arange(8, dtype=torch.uint8)[None]
    assert pack_words(q, AWQ_ORDER).item() == 0x75316420
    assert pack_words(q, IN_ORDER).item() == 0x76543210
    assert torch.equal(unpack_words(pack_words(q, AWQ_ORDER), AWQ_ORDER), q)


@pytest.mark.parametrize("order", [AWQ_ORDER, IN_ORDER])
def test_words_of_all_nibbles(order: tuple[int, ...]) -> None:
    """High nibbles of 8 and more make the int32 negative."""
    q = draw(False)[0]
    assert (pack_words(q, order) < 0).any()
    assert torch.equal(pack_words(q, order), words(q, order))
    assert torch.equal(unpack_words(pack_words(q, order), order), q)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    "layout", ["awq", "gptq", "gptq_v2", "compressed packed", "compressed int8"]
)
def test_layouts_are_read_right(layout: str, symmetric: bool) -> None:
    q, scales, zeros, weight = draw(symmetric)
    if layout == "awq":
        read = read_int4(config("awq"), "m", awq_parts(q, scales, zeros))
    elif layout.startswith("gptq"):
        version = 2 if layout == "gptq_v2" else 1
        read = read_int4(config(layout), "m", gptq_parts(q, scales, zeros, version))
    else:
        stored = "none" if symmetric else layout.split()[1]
        parts = compressed_parts(q, scales, zeros, stored)
        read = read_int4(config("compressed-tensors", symmetric), "m", parts)
    assert torch.equal(unpack(read.qweight), q)
    assert (read.zeros is None) == symmetric and read.group_size == G
    assert torch.equal(dequantise(read, torch.float32), weight)
    x = torch.randn(3, K)
    y = int4_linear(x, read.qweight, read.scales.float(), read.zeros, None, G)
    assert torch.allclose(y, linear(x, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("symmetric", [True, False])
def test_awq_round_trip(symmetric: bool) -> None:
    packed = quantise(torch.randn(N, K).half(), G, symmetric)
    parts = to_awq(packed, "m")
    assert parts["qweight"].shape == (K, N // 8) and parts["qzeros"].shape == (K // G, N // 8)
    assert parts["scales"].dtype is torch.float16
    read = read_int4(config("awq"), "m", parts)
    assert torch.equal(read.qweight, packed.qweight) and torch.equal(read.scales, packed.scales)
    assert torch.equal(dequantise(read), dequantise(packed))


def test_compressed_tensors_pads_rows_of_zero_points() -> None:
    """12 output features: the last word of zero points is half empty."""
    q, scales, zeros, weight = (t[:12] for t in draw(False))
    padded = torch.nn.functional.pad(zeros, (0, 0, 0, 4))
    parts = {
        "weight_packed": words(q, IN_ORDER), "weight_scale": scales,
        "weight_shape": torch.tensor([12, K]),
        "weight_zero_point": words(padded.T, IN_ORDER).T.contiguous(),
    }  # fmt: skip
    read = read_int4(config("compressed-tensors"), "m", parts)
    assert torch.equal(dequantise(read, torch.float32), weight)


def test_whole_rows_as_groups() -> None:
    q, scales, zeros, _ = draw(False)
    parts = awq_parts(q, scales[:, :1], zeros[:, :1])
    read = read_int4(config("awq", group_size=-1), "m", parts)
    assert read.group_size == K


def test_gptq_zero_points_that_readers_disagree_on() -> None:
    q, scales, zeros, _ = draw(False)
    parts = gptq_parts(q, scales, zeros, version=2)  # some are 15, and would be 16 in version 1
    assert (zeros == 15).any()
    with pytest.raises(CheckpointError, match=r"m\.down: .* zero points of 15 in a GPTQ version 1"):
        read_int4(config("gptq"), "m.down", parts)


@pytest.mark.parametrize("method", ["gptq", "compressed-tensors"])
def test_activation_order_is_refused(method: str) -> None:
    q, scales, zeros, _ = draw(True)
    if method == "gptq":
        parts = gptq_parts(q, scales, zeros, 1)
    else:
        parts = compressed_parts(q, scales, zeros, "none")
    shuffled = torch.arange(K, dtype=torch.int32).flip(0) // G
    parts["g_idx" if method == "gptq" else "weight_g_idx"] = shuffled
    with pytest.raises(
        CheckpointError, match=r"layers\.0\.m: its columns are grouped by activation"
    ):
        read_int4(config(method, True), "layers.0.m", parts)


def broken(change: str) -> tuple[QuantConfig, dict[str, Tensor]]:
    q, scales, zeros, _ = draw(False)
    parts, settings = awq_parts(q, scales, zeros), config("awq")
    if change == "missing":
        del parts["qzeros"]
    elif change == "scales":
        parts["scales"] = parts["scales"][:, :-1]
    elif change == "group size":
        settings = config("awq", group_size=64)
    elif change == "symmetric":
        settings, parts = (
            config("compressed-tensors", symmetric=True),
            compressed_parts(q, scales, zeros, "packed"),
        )
    return settings, parts


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", "missing qzeros, found qweight, scales"),
        ("scales", r"scales \(15, 2\) and zero points \(16, 2\)"),
        ("group size", "2 groups for 64 input features, but .* group_size 64"),
        ("symmetric", "a weight_zero_point, but .* symmetric True"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change: str, message: str) -> None:
    settings, parts = broken(change)
    with pytest.raises(CheckpointError, match=f"model.layers.0.q_proj: .*{message}"):
        read_int4(settings, "model.layers.0.q_proj", parts)


def test_awq_needs_words_of_columns() -> None:
    with pytest.raises(CheckpointError, match=r"m: 12 output features"):
        to_awq(quantise(torch.randn(12, 32), 32), "m")


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
MODULES = [
    "lm_head",
    *(f"model.layers.{i}.self_attn.{name}" for i in (0, 1, 11) for name in ATTENTION),
    *(f"model.layers.{i}.mlp.{name}" for i in (0, 1, 11) for name in ("gate", *MLP)),
    *(f"model.layers.1.mlp.experts.{e}.{name}" for e in (1, 12) for name in MLP),
]


@pytest.mark.parametrize(
    ("pattern", "skipped"),
    [
        ("mlp.gate", lambda m: m.endswith(".mlp.gate")),
        ("gate", lambda m: m.endswith(".gate")),
        ("model.layers.1.", lambda m: "layers.1." in m),
        ("layers.1", lambda m: "layers.1." in m),
        ("self_attn", lambda m: "self_attn" in m),
        ("lm_head", lambda m: m == "lm_head"),
        ("head", lambda m: False),
        ("gate_up_proj", lambda m: m.endswith((".gate_proj", ".up_proj"))),
        ("self_attn.qkv_proj", lambda m: m.endswith((".q_proj", ".k_proj", ".v_proj"))),
        ("mlp.experts", lambda m: "experts" in m),
        ("experts.1", lambda m: "experts.1." in m),
        ("model.layers.1.mlp.experts.12.up_proj", lambda m: m.endswith("experts.12.up_proj")),
        ("re:.*mlp.gate$", lambda m: m.endswith(".mlp.gate")),
        ("re:layers.1", lambda m: False),  # compressed-tensors matches from the beginning
    ],
)
def test_exclusions_match_dotted_names(pattern: str, skipped: Any) -> None:
    """B30"""
    assert [m for m in MODULES if matches(pattern, m)] == [m for m in MODULES if skipped(m)]


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "GEMM", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (AWQ, QuantConfig("awq", 64, False)),
        (
            AWQ | {"zero_point": False, "modules_to_not_convert": ["lm_head"]},
            QuantConfig("awq", 64, True, ("lm_head",)),
        ),
        (GPTQ, QuantConfig("gptq", 128, True)),
        (GPTQ | {"checkpoint_format": "gptq_v2"}, QuantConfig("gptq_v2", 128, True)),
        (COMPRESSED, QuantConfig("compressed-tensors", 32, True, ("lm_head",))),
        (awq_config(64, ["lm_head"]), QuantConfig("awq", 64, False, ("lm_head",))),
    ],
)
def test_configurations(given: dict[str, Any], expected: QuantConfig) -> None:
    assert read_quant_config(given) == expected


def changed(**changes: Any) -> dict[str, Any]:
    return COMPRESSED | {
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS | changes}}
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported"),
        (AWQ | {"version": "gemv"}, "version 'gemv' .* GEMM layout"),
        (AWQ | {"bits": 8}, "bits 8 .* 4 bits"),
        (AWQ | {"group_size": 0}, "group_size 0"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (COMPRESSED | {"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized'"),
        (COMPRESSED | {"config_groups": {}}, "0 config_groups"),
        (changed(num_bits=8), "num_bits 8"),
        (changed(type="float"), "type 'float'"),
        (changed(group_size=None), "group_size None"),
    ],
)
def test_unsupported_configurations_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_quant_config(given)


def test_transformers_reads_our_configuration() -> None:
    written = awq_config(64, ["lm_head"])
    read = AwqConfig.from_dict(written)
    assert (read.bits, read.group_size, read.zero_point) == (4, 64, True)
    assert read.modules_to_not_convert == ["lm_head"] and read.to_dict()["version"] == "gemm"


def test_int4_of_experts_stays_apart() -> None:
    """Each expert is read by itself; stacking is the caller's."""
    q, scales, zeros, weight = draw(False)
    read = read_int4(config("awq"), "experts.0.up_proj", awq_parts(q, scales, zeros))
    stacked = Int4(*(torch.stack((t, t)) for t in (read.qweight, read.scales, read.zeros)))  # type: ignore[arg-type]
    assert torch.equal(dequantise(stacked, torch.float32)[1], weight)
