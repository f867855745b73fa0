"""`quantization_config` of config.json: which INT4 layout, and which modules stay unquantised.

In: the parsed JSON object. Out: a `QuantConfig`, or a `CheckpointError` that says what is not
supported. Knows nothing of tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from seekforge.kernels.errors import CheckpointError

Method = Literal["awq", "gptq", "gptq_v2", "compressed-tensors"]
# A fused name in an exclusion list means all its parts.
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
REGEX = "re:"  # prefix of a pattern in compressed-tensors' `ignore`


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """group_size: weights along the input features that share a scale; -1: the whole row.
    skipped: patterns of modules that stay as they are."""

    method: Method
    group_size: int
    symmetric: bool
    skipped: tuple[str, ...] = ()

    def quantises(self, module: str) -> bool:
        """Whether the linear layer `module` (dotted name, whole path) is quantised.

        A pattern matches whole components of the name, in a row, anywhere: "mlp.gate" is in
        "model.layers.1.mlp.gate", not in "model.layers.1.mlp.gate_proj".
        """
        return not any(matches(pattern, module) for pattern in self.skipped)


def matches(pattern: str, module: str) -> bool:
    """Whether an exclusion pattern covers a module; see `QuantConfig.quantises`."""
    if pattern.startswith(REGEX):
        return re.match(pattern.removeprefix(REGEX), module) is not None
    wanted, parts = pattern.strip(".").split("."), module.split(".")
    names = [(*FUSED.get(name, ()), name) for name in wanted]
    return any(
        all(part in name for part, name in zip(parts[start:], names, strict=False))
        for start in range(len(parts) - len(names) + 1)
    )


def read_quant_config(config: Mapping[str, Any]) -> QuantConfig:
    """Parses a `quantization_config`; raises CheckpointError for what can't be read."""
    method = config.get("quant_method")
    if method == "awq":
        _require(config, "version", ("gemm",), "the GEMM layout of AutoAWQ")
        _require(config, "bits", (4,), "4 bits")
        return _parsed("awq", config, not config.get("zero_point", True))
    if method == "gptq":
        _require(config, "bits", (4,), "4 bits")
        _require(config, "checkpoint_format", ("gptq", "gptq_v2", None), "gptq or gptq_v2")
        kind: Method = "gptq_v2" if config.get("checkpoint_format") == "gptq_v2" else "gptq"
        return _parsed(kind, config, bool(config.get("sym", True)))
    if method == "compressed-tensors":
        return _compressed(config)
    raise CheckpointError(
        f"config.json: quant_method {method!r} is not supported; supported are awq, gptq and "
        "compressed-tensors (pack-quantized). Use the unquantised checkpoint and --quant awq-int4."
    )


def awq_config(group_size: int, skipped: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint in the AutoAWQ GEMM layout. Zero points are always
    stored (8 for symmetric weights), for its readers always read them."""
    return {
        "quant_method": "awq", "version": "gemm", "bits": 4, "group_size": group_size,
        "zero_point": True, "modules_to_not_convert": list(skipped) or None,
    }  # fmt: skip


def _parsed(method: Method, config: Mapping[str, Any], symmetric: bool) -> QuantConfig:
    skipped = tuple(config.get("modules_to_not_convert") or ())
    return QuantConfig(method, _group_size(config.get("group_size", 128)), symmetric, skipped)


def _compressed(config: Mapping[str, Any]) -> QuantConfig:
    _require(config, "format", ("pack-quantized",), "pack-quantized")
    groups = list((config.get("config_groups") or {}).values())
    if len(groups) != 1:
        raise CheckpointError(
            f"config.json: {len(groups)} config_groups in quantization_config; supported is one "
            "scheme for all quantised layers. Use the unquantised checkpoint."
        )
    weights = groups[0].get("weights") or {}
    _require(groups[0], "targets", (["Linear"],), '["Linear"] (all linear layers)')
    _require(groups[0], "input_activations", (None,), "none: weights only")
    _require(weights, "num_bits", (4,), "4 bits")
    _require(weights, "type", ("int",), "integers")
    _require(weights, "strategy", ("group", "channel"), "group or channel")
    channel = weights.get("strategy") == "channel"
    group_size = -1 if channel else _group_size(weights.get("group_size"))
    symmetric = bool(weights.get("symmetric", True))
    skipped = tuple(config.get("ignore") or ())
    return QuantConfig("compressed-tensors", group_size, symmetric, skipped)


def _group_size(value: Any) -> int:
    if not isinstance(value, int) or not (value == -1 or (value > 0 and value % 2 == 0)):
        raise CheckpointError(
            f"config.json: group_size {value!r} in quantization_config is not a positive even "
            "number or -1 (whole rows). Correct config.json."
        )
    return value


def _require(config: Mapping[str, Any], key: str, values: tuple[Any, ...], expected: str) -> None:
    """Refuses another value; an absent key means the first one."""
    value = config.get(key, values[0])
    if (value.lower() if key == "version" else value) not in values:
        raise CheckpointError(
            f"config.json: {key} {value!r} in quantization_config is not supported, only "
            f"{expected}. Use the unquantised checkpoint and --quant awq-int4."
        )
