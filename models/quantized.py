"""Ready-made INT4 checkpoints: the layouts of others, read into ours (kernels/int4) or refused.

    AutoAWQ GEMM        qweight int32 [in, out / 8], qzeros int32 [in / g, out / 8],
                        scales [in / g, out]; nibble i of a word is column AWQ_ORDER[i]
    GPTQ                qweight int32 [in / 8, out], qzeros int32 [in / g, out / 8],
                        scales [in / g, out], g_idx [in]; nibbles in order. Version 1 stores z - 1,
                        version 2 (`checkpoint_format: gptq_v2`) stores z
    compressed-tensors  weight_packed int32 [out, in / 8], weight_scale [out, in / g],
    (pack-quantized)    weight_shape [2], asymmetric weight_zero_point: int32 [out / 8, in / g]
                        packed along the rows, or int8 [out, in / g]; nibbles in order, signed
                        values stored + 8

In all of them w = (q - z) * s. Knows nothing of files: one module's stored tensors in, `Int4` out.
Sources: AutoAWQ `awq/utils/packing_utils.py`, GPTQModel `utils/model.py` (conversion of version 1),
compressed-tensors `compressors/pack_quantized`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from seekforge.kernels.errors import CheckpointError
from seekforge.kernels.int4 import SYMMETRIC_ZERO, Int4, pack, unpack
from seekforge.models.quantized_config import Method, QuantConfig

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
IN_ORDER = tuple(range(8))
# The tensors that make up one weight, by suffix of the module's name.
PARTS: Mapping[Method, tuple[str, ...]] = {
    "awq": ("qweight", "qzeros", "scales"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "gptq_v2": ("qweight", "qzeros", "scales", "g_idx"),
    "compressed-tensors": (
        "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx",
    ),
}  # fmt: skip
OPTIONAL = ("g_idx", "weight_g_idx", "weight_zero_point")


def read_int4(config: QuantConfig, module: str, parts: Mapping[str, Tensor]) -> Int4:
    """One module's weight from its stored tensors, `parts` by suffix (see `PARTS`).

    Scales keep their stored dtype; zeros that are all 8 make the result symmetric. Raises
    CheckpointError, naming the module, where parts are missing, of wrong shape, or in an order of
    columns that needs the input permuted.
    """
    missing = [p for p in PARTS[config.method] if p not in parts and p not in OPTIONAL]
    if missing:
        raise CheckpointError(
            f"{module}: {config.method} weights need {', '.join(PARTS[config.method])}; missing "
            f"{', '.join(missing)}, found {', '.join(sorted(parts)) or 'nothing'}. Fetch the "
            "checkpoint again, or list the module under modules_to_not_convert."
        )
    weight = READERS[config.method](config, module, parts)
    groups, in_features = weight.scales.shape[-1], 2 * weight.qweight.shape[-1]
    expected = 1 if config.group_size == -1 else in_features / config.group_size
    if groups != expected:
        raise CheckpointError(
            f"{module}: scales of {groups} groups for {in_features} input features, but the "
            f"quantisation config says group_size {config.group_size}. Correct config.json."
        )
    if weight.zeros is not None and bool((weight.zeros == SYMMETRIC_ZERO).all()):
        return replace(weight, zeros=None)
    if config.symmetric and weight.zeros is not None:
        raise CheckpointError(
            f"{module}: zero points other than {SYMMETRIC_ZERO}, but the quantisation config says "
            "the weights are symmetric. Correct config.json."
        )
    return weight


def to_awq(weight: Int4, module: str) -> dict[str, Tensor]:
    """The AutoAWQ GEMM tensors of a weight, by suffix. Scales become fp16, as its kernels want.

    Raises CheckpointError where out_features is not a multiple of 8, which the layout can't hold.
    """
    out_features = weight.qweight.shape[0]
    if out_features % 8:
        raise CheckpointError(
            f"{module}: {out_features} output features do not fill words of 8 columns, which the "
            "AutoAWQ layout is made of. Leave the module unquantised."
        )
    zeros = weight.zeros
    if zeros is None:
        zeros = torch.full_like(weight.scales, SYMMETRIC_ZERO, dtype=torch.uint8)
    return {
        "qweight": pack_words(unpack(weight.qweight).T, AWQ_ORDER),
        "qzeros": pack_words(zeros.T, AWQ_ORDER),
        "scales": weight.scales.T.to(torch.float16).contiguous(),
    }


def pack_words(q: Tensor, order: tuple[int, ...]) -> Tensor:
    """0..15 [..., n] -> int32 [..., n / 8]: nibble i of a word is column order[i]."""
    columns = q.to(torch.int32).reshape(*q.shape[:-1], q.shape[-1] // 8, 8)
    words = torch.zeros(columns.shape[:-1], dtype=torch.int32)
    for i, column in enumerate(order):
        words |= columns[..., column] << (4 * i)
    return words


def unpack_words(words: Tensor, order: tuple[int, ...]) -> Tensor:
    """int32 [..., n / 8] -> uint8 [..., n] of 0..15."""
    columns = torch.empty(*words.shape, 8, dtype=torch.uint8)
    for i, column in enumerate(order):
        columns[..., column] = (words >> (4 * i)) & 15
    return columns.flatten(-2)


def _read_awq(config: QuantConfig, module: str, parts: Mapping[str, Tensor]) -> Int4:
    q = unpack_words(parts["qweight"], AWQ_ORDER)
    zeros = unpack_words(parts["qzeros"], AWQ_ORDER)
    return _int4(module, q.T, parts["scales"].T, zeros.T)


def _read_gptq(config: QuantConfig, module: str, parts: Mapping[str, Tensor]) -> Int4:
    q = unpack_words(parts["qweight"].T.contiguous(), IN_ORDER)  # [out, in]
    zeros = unpack_words(parts["qzeros"], IN_ORDER).T
    _check_order(module, parts.get("g_idx"), q.shape[1], parts["scales"].shape[0])
    if config.method == "gptq":
        if bool((zeros == 15).any()):
            raise CheckpointError(
                f"{module}: {int((zeros == 15).sum())} zero points of 15 in a GPTQ version 1 "
                "checkpoint, which stores z - 1: readers disagree whether that is 16 or 0. "
                "Convert it to version 2 (checkpoint_format gptq_v2) with the tool that made it."
            )
        zeros = zeros + 1
    return _int4(module, q, parts["scales"].T, zeros)


def _read_compressed(config: QuantConfig, module: str, parts: Mapping[str, Tensor]) -> Int4:
    out_features, in_features = parts["weight_shape"].tolist()
    q = unpack_words(parts["weight_packed"], IN_ORDER)[:, :in_features]
    scales, zeros = parts["weight_scale"], parts.get("weight_zero_point")
    _check_order(module, parts.get("weight_g_idx"), in_features, scales.shape[1])
    if (zeros is None) != config.symmetric:
        raise CheckpointError(
            f"{module}: {'no' if zeros is None else 'a'} weight_zero_point, but the quantisation "
            f"config says symmetric {config.symmetric}. Correct config.json."
        )
    if zeros is None:
        zeros = torch.full_like(scales, SYMMETRIC_ZERO, dtype=torch.uint8)
    elif zeros.dtype is torch.int32:
        zeros = unpack_words(zeros.T.contiguous(), IN_ORDER).T[:out_features]
    else:
        zeros = (zeros.to(torch.int16) + SYMMETRIC_ZERO).to(torch.uint8)
    return _int4(module, q, scales, zeros)


def _int4(module: str, q: Tensor, scales: Tensor, zeros: Tensor) -> Int4:
    """q [out, in], scales and zeros [out, groups], any strides."""
    groups = scales.shape[1]
    fit = scales.shape == zeros.shape and scales.shape[0] == q.shape[0]
    if not fit or not groups or q.shape[1] % groups or q.shape[1] % 2:
        raise CheckpointError(
            f"{module}: weights {tuple(q.shape)}, scales {tuple(scales.shape)} and zero points "
            f"{tuple(zeros.shape)} [output features, input features or groups] do not fit each "
            "other. The checkpoint is damaged or of another layout."
        )
    return Int4(pack(q.contiguous()), scales.contiguous(), zeros.contiguous())


def _check_order(module: str, g_idx: Tensor | None, in_features: int, groups: int) -> None:
    """Refuses groups of columns that are not neighbours (act-order)."""
    plain = torch.arange(in_features) // max(1, in_features // groups)
    if g_idx is not None and not torch.equal(g_idx.long(), plain):
        raise CheckpointError(
            f"{module}: its columns are grouped by activation order (desc_act or actorder), so "
            "each product would have to permute its input; not supported. Use a checkpoint "
            "quantised with desc_act false."
        )


READERS: Mapping[Method, Callable[[QuantConfig, str, Mapping[str, Tensor]], Int4]] = {
    "awq": _read_awq,
    "gptq": _read_gptq,
    "gptq_v2": _read_gptq,
    "compressed-tensors": _read_compressed,
}
