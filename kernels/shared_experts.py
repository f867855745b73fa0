"""Experts beside shared ones, which every token goes through: both in one operator, for GPUs.

    y = moe_experts(x, weights, indices, gate_up, down)            formats: kernels/moe_experts,
        + shared_down (silu(shared_gate x) * shared_up x)          kernels/int4_moe_experts

    shared gate_up  [2 * width, hidden]   gate rows, then up rows
    shared down     [hidden, width]       width: the shared experts' intermediates side by side
    y               [..., hidden]         dtype of x

One token is bound by launches. Where `width` is a multiple of the experts' intermediate, the shared
experts are further experts of weight 1 to the kernels for one token: two launches in place of six.
More tokens take the launches that separate operators would.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from seekforge.kernels.int4_layout import UNIT
from seekforge.kernels.int4_linear import int4_linear_reference, int4_linear_triton
from seekforge.kernels.int4_moe_experts import (
    int4_moe_config,
    int4_moe_experts_reference,
    int4_moe_experts_triton,
)
from seekforge.kernels.linear import linear_reference, linear_triton
from seekforge.kernels.moe_config import Config, FewConfig, GemvConfig, moe_config
from seekforge.kernels.moe_experts import moe_experts_reference, moe_experts_triton
from seekforge.kernels.moe_gemv import moe_gemv_triton
from seekforge.kernels.moe_int4_few import Packed, moe_int4_few_triton
from seekforge.kernels.ops import register
from seekforge.kernels.swiglu import swiglu_reference, swiglu_triton


def moe_shared_experts_reference(
    x: Tensor, weights: Tensor, indices: Tensor, gate_up: Tensor, down: Tensor,
    shared_gate_up: Tensor, shared_down: Tensor,
) -> Tensor:  # fmt: skip
    inner = swiglu_reference(linear_reference(x, shared_gate_up, None))
    routed = moe_experts_reference(x, weights, indices, gate_up, down)
    return routed + linear_reference(inner, shared_down, None)


def moe_shared_experts_triton(
    x: Tensor, weights: Tensor, indices: Tensor, gate_up: Tensor, down: Tensor,
    shared_gate_up: Tensor, shared_down: Tensor, config: Config | None = None,
) -> Tensor:  # fmt: skip
    top_k, hidden = indices.shape[-1], x.shape[-1]
    tokens = x.reshape(-1, hidden).contiguous()
    if not tokens.shape[0]:
        return x.new_empty(x.shape)
    config = config or moe_config(
        "moe_experts", tokens=tokens.shape[0], pairs=indices.numel(), experts=gate_up.shape[0]
    )
    if isinstance(config, GemvConfig) and shared_down.shape[-1] % down.shape[-1] == 0:
        y = moe_gemv_triton(
            tokens, weights.reshape(-1, top_k).float().contiguous(),
            indices.reshape(-1, top_k).contiguous(), gate_up.contiguous(), down.contiguous(),
            config, (shared_gate_up.contiguous(), shared_down.contiguous()),
        )  # fmt: skip
        return y.view(x.shape)
    inner = swiglu_triton(linear_triton(x, shared_gate_up, None))
    routed = moe_experts_triton(x, weights, indices, gate_up, down, config)
    return routed.add_(linear_triton(inner, shared_down, None))


def _fake(
    x: Tensor, weights: Tensor, indices: Tensor, gate_up: Tensor, down: Tensor,
    shared_gate_up: Tensor, shared_down: Tensor,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape)


moe_shared_experts = register(
    "moe_shared_experts(Tensor x, Tensor weights, Tensor indices, Tensor gate_up, Tensor down, "
    "Tensor shared_gate_up, Tensor shared_down) -> Tensor",
    reference=moe_shared_experts_reference,
    fake=_fake,
    cuda=moe_shared_experts_triton,
)


def int4_moe_shared_experts_reference(
    x: Tensor, weights: Tensor, indices: Tensor,
    gate_up_q: Tensor, gate_up_scales: Tensor, gate_up_zeros: Tensor | None,
    down_q: Tensor, down_scales: Tensor, down_zeros: Tensor | None, group_size: int,
    shared_gate_up_q: Tensor, shared_gate_up_scales: Tensor, shared_gate_up_zeros: Tensor | None,
    shared_down_q: Tensor, shared_down_scales: Tensor, shared_down_zeros: Tensor | None,
) -> Tensor:  # fmt: skip
    """The shared experts' group sizes follow from the shapes."""
    gate_up = shared_gate_up_q, shared_gate_up_scales, shared_gate_up_zeros
    down = shared_down_q, shared_down_scales, shared_down_zeros
    inner = swiglu_reference(int4_product(int4_linear_reference, x, gate_up))
    routed = int4_moe_experts_reference(
        x, weights, indices, gate_up_q, gate_up_scales, gate_up_zeros,
        down_q, down_scales, down_zeros, group_size,
    )  # fmt: skip
    return routed + int4_product(int4_linear_reference, inner, down)


def int4_product(linear: Any, x: Tensor, weight: Packed) -> Tensor:
    """x W^T by `linear`, one of int4_linear's; its group size follows from the shapes."""
    qweight, scales, zeros = weight
    y: Tensor = linear(x, qweight, scales, zeros, None, x.shape[-1] // scales.shape[-1])
    return y


def int4_moe_shared_experts_triton(
    x: Tensor, weights: Tensor, indices: Tensor,
    gate_up_q: Tensor, gate_up_scales: Tensor, gate_up_zeros: Tensor | None,
    down_q: Tensor, down_scales: Tensor, down_zeros: Tensor | None, group_size: int,
    shared_gate_up_q: Tensor, shared_gate_up_scales: Tensor, shared_gate_up_zeros: Tensor | None,
    shared_down_q: Tensor, shared_down_scales: Tensor, shared_down_zeros: Tensor | None,
    config: Config | None = None,
) -> Tensor:  # fmt: skip
    top_k, hidden = indices.shape[-1], x.shape[-1]
    tokens = x.reshape(-1, hidden).contiguous()
    if not tokens.shape[0]:
        return x.new_empty(x.shape)
    routed = (
        _contiguous(gate_up_q, gate_up_scales, gate_up_zeros),
        _contiguous(down_q, down_scales, down_zeros),
    )
    shared = (
        _contiguous(shared_gate_up_q, shared_gate_up_scales, shared_gate_up_zeros),
        _contiguous(shared_down_q, shared_down_scales, shared_down_zeros),
    )
    config = int4_moe_config(
        tokens, indices, gate_up_q.shape[0], hidden // gate_up_scales.shape[-1],
        2 * down_q.shape[-1] // down_scales.shape[-1], config,
    )  # fmt: skip
    if isinstance(config, FewConfig) and _takes(routed, shared, config):
        y = moe_int4_few_triton(
            tokens, weights.reshape(-1, top_k).float().contiguous(),
            indices.reshape(-1, top_k).contiguous(), *routed[0], *routed[1], config, shared,
        )  # fmt: skip
        return y.view(x.shape)
    inner = swiglu_triton(int4_product(int4_linear_triton, x, shared[0]))
    y = int4_moe_experts_triton(x, weights, indices, *routed[0], *routed[1], group_size, config)
    return y.add_(int4_product(int4_linear_triton, inner, shared[1]))


def _takes(routed: tuple[Packed, Packed], shared: tuple[Packed, Packed], config: FewConfig) -> bool:
    """Whether shared experts can be taken along with these: their width a multiple, groups
    along it whole units, zeros in both or none, the input's groups the same."""
    gate_up, down = routed
    intermediate, features = down[0].shape[-1], shared[1][0].shape[-1]
    return (
        config.m == 0
        and features % intermediate == 0
        and 2 * features // shared[1][1].shape[-1] % UNIT == 0
        and gate_up[1].shape[-1] == shared[0][1].shape[-1]
        and all((a[2] is None) == (b[2] is None) for a, b in zip(routed, shared, strict=True))
    )


def _contiguous(qweight: Tensor, scales: Tensor, zeros: Tensor | None) -> Packed:
    zeros = None if zeros is None else zeros.contiguous()
    return qweight.contiguous(), scales.contiguous(), zeros


def _int4_fake(
    x: Tensor, weights: Tensor, indices: Tensor,
    gate_up_q: Tensor, gate_up_scales: Tensor, gate_up_zeros: Tensor | None,
    down_q: Tensor, down_scales: Tensor, down_zeros: Tensor | None, group_size: int,
    shared_gate_up_q: Tensor, shared_gate_up_scales: Tensor, shared_gate_up_zeros: Tensor | None,
    shared_down_q: Tensor, shared_down_scales: Tensor, shared_down_zeros: Tensor | None,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape)


int4_moe_shared_experts = register(
    "int4_moe_shared_experts(Tensor x, Tensor weights, Tensor indices, "
    "Tensor gate_up_q, Tensor gate_up_scales, Tensor? gate_up_zeros, "
    "Tensor down_q, Tensor down_scales, Tensor? down_zeros, int group_size, "
    "Tensor shared_gate_up_q, Tensor shared_gate_up_scales, Tensor? shared_gate_up_zeros, "
    "Tensor shared_down_q, Tensor shared_down_scales, Tensor? shared_down_zeros) -> Tensor",
    reference=int4_moe_shared_experts_reference,
    fake=_int4_fake,
    cuda=int4_moe_shared_experts_triton,
)
