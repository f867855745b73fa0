"""The experts of a mixture of experts with INT4 weights (formats: kernels/int4, moe_experts).

    x                [..., hidden]
    weights          [..., top_k], indices [..., top_k]               int64
    gate_up_q        [experts, 2 * intermediate, hidden / 2]          uint8; gate rows, then up rows
    gate_up_scales   [experts, 2 * intermediate, hidden / group_size]
    gate_up_zeros    like gate_up_scales, uint8, or None: symmetric
    down_q           [experts, hidden, intermediate / 2]              uint8
    down_scales      [experts, hidden, groups]: the group size of `down` follows from the shapes,
                     for group_size need not divide `intermediate`
    down_zeros       like down_scales, uint8, or None
    y                [..., hidden]

Computes what `moe_experts` computes with the decoded weights. Only the experts that some token
chose are read; on the CPU each is decoded once, one after the other.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from seekforge.kernels.gemv import int4_gemv
from seekforge.kernels.int4_linear import int4_linear_reference
from seekforge.kernels.moe_config import DEFAULT, ONE, Config, FewConfig, GemvConfig, moe_config
from seekforge.kernels.moe_int4_few import Packed, moe_int4_few_triton, reads
from seekforge.kernels.moe_int4_gemm import moe_int4_gemm_triton, takes
from seekforge.kernels.moe_int4_gemv import in_words, moe_int4_gemv_triton
from seekforge.kernels.moe_int4_plain import moe_int4_plain_triton
from seekforge.kernels.ops import register
from seekforge.kernels.swiglu import swiglu_reference


def int4_moe_experts_reference(
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    gate_up_q: Tensor,
    gate_up_scales: Tensor,
    gate_up_zeros: Tensor | None,
    down_q: Tensor,
    down_scales: Tensor,
    down_zeros: Tensor | None,
    group_size: int,
) -> Tensor:
    top_k = indices.shape[-1]
    tokens = x.reshape(-1, x.shape[-1])
    # fp16 experts are computed in fp32: products of models trained in bf16 pass 65504.
    wide = tokens.float() if x.dtype is torch.float16 else tokens
    gate_up, down = (
        (gate_up_q, gate_up_scales, gate_up_zeros),
        (down_q, down_scales, down_zeros),
    )
    y = torch.zeros_like(tokens, dtype=torch.float32, memory_format=torch.contiguous_format)
    chosen = indices.flatten()
    order = chosen.argsort(stable=True)
    rows, by_expert = order // top_k, weights.flatten().float()[order, None]
    start = 0
    for e, count in enumerate(chosen.bincount(minlength=gate_up_q.shape[0]).tolist()):
        if count:
            part = slice(start, start + count)
            inner = swiglu_reference(_product(wide[rows[part]], gate_up, e))
            y.index_add_(0, rows[part], _product(inner, down, e).float() * by_expert[part])
            start += count
    return y.to(x.dtype).view(x.shape)


def _product(x: Tensor, weight: Packed, expert: int) -> Tensor:
    qweight, scales, zeros = weight
    group_size = 2 * qweight.shape[-1] // scales.shape[-1]
    zero = None if zeros is None else zeros[expert]
    return int4_linear_reference(x, qweight[expert], scales[expert], zero, None, group_size)


def int4_moe_experts_triton(
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    gate_up_q: Tensor,
    gate_up_scales: Tensor,
    gate_up_zeros: Tensor | None,
    down_q: Tensor,
    down_scales: Tensor,
    down_zeros: Tensor | None,
    group_size: int,
    config: Config | None = None,
) -> Tensor:
    top_k, hidden, intermediate = indices.shape[-1], x.shape[-1], 2 * down_q.shape[-1]
    tokens = x.reshape(-1, hidden).contiguous()
    if not tokens.shape[0]:
        return x.new_empty(x.shape)
    groups = gate_up_scales.shape[-1], down_scales.shape[-1]
    sizes = hidden // groups[0], intermediate // groups[1]
    config = int4_moe_config(tokens, indices, gate_up_q.shape[0], *sizes, config)
    if isinstance(config, GemvConfig) and not in_words(hidden, intermediate, *groups):
        config = DEFAULT
    run: Any = moe_int4_plain_triton
    if isinstance(config, GemvConfig):
        run = partial(moe_int4_gemv_triton, config=config)
    elif isinstance(config, FewConfig):
        run = partial(moe_int4_few_triton, config=config)
    elif takes(x.dtype, *sizes):
        run = partial(moe_int4_gemm_triton, config=config)
    packed = (gate_up_q, gate_up_scales, gate_up_zeros, down_q, down_scales, down_zeros)
    y: Tensor = run(
        tokens, weights.reshape(-1, top_k).float().contiguous(),
        indices.reshape(-1, top_k).contiguous(),
        *(None if part is None else part.contiguous() for part in packed),
    )  # fmt: skip
    return y.view(x.shape)


def int4_moe_config(
    tokens: Tensor, indices: Tensor, experts: int, group_size: int, down_group_size: int,
    given: Config | None = None,
) -> Config:  # fmt: skip
    """`given` or the file's row; a FewConfig only where its kernels serve."""
    config = given or moe_config(
        "int4_moe_experts", tokens=tokens.shape[0], pairs=indices.numel(), experts=experts
    )
    if isinstance(config, FewConfig) and not reads(tokens, group_size, down_group_size):
        return ONE if config.m == 0 else DEFAULT
    return config


def _fake(
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    gate_up_q: Tensor,
    gate_up_scales: Tensor,
    gate_up_zeros: Tensor | None,
    down_q: Tensor,
    down_scales: Tensor,
    down_zeros: Tensor | None,
    group_size: int,
) -> Tensor:
    return x.new_empty(x.shape)


int4_moe_experts = register(
    "int4_moe_experts(Tensor x, Tensor weights, Tensor indices, "
    "Tensor gate_up_q, Tensor gate_up_scales, Tensor? gate_up_zeros, "
    "Tensor down_q, Tensor down_scales, Tensor? down_zeros, int group_size) -> Tensor",
    reference=int4_moe_experts_reference,
    fake=_fake,
    cuda=int4_moe_experts_triton,
)


def one_token_int4_experts(
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    gate_up_q: Tensor,
    gate_up_scales: Tensor,
    gate_up_zeros: Tensor | None,
    down_q: Tensor,
    down_scales: Tensor,
    down_zeros: Tensor | None,
    group_size: int,
) -> Tensor:
    """The same for exactly one token in all, written for a compiler: no data-dependent Python."""
    chosen = indices.flatten()  # [top_k]
    row = x.reshape(1, -1).expand(chosen.shape[0], -1)
    hidden = int4_gemv(row, gate_up_q, gate_up_scales, gate_up_zeros, chosen)
    gate, up = hidden.chunk(2, -1)  # [top_k, intermediate]
    out = int4_gemv(silu(gate) * up, down_q, down_scales, down_zeros, chosen)
    y: Tensor = (out * weights.reshape(-1, 1)).sum(0).to(x.dtype)
    return y.view(x.shape)
