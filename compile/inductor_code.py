"""What a package computes each operator with: torch code that Inductor compiles with its
neighbours, or a call.

On the CPU element-wise operators become torch code, and in packages for one token everything does.
On a GPU all are called, plain products too: their launchers choose a kernel by the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from seekforge.kernels.add_rms_norm import add_rms_norm, add_rms_norm_reference
from seekforge.kernels.gemv import gemv, in_memory, one_token_int4_linear
from seekforge.kernels.int4_linear import inlined_int4_linear, int4_linear
from seekforge.kernels.int4_moe_experts import int4_moe_experts, one_token_int4_experts
from seekforge.kernels.linear import linear
from seekforge.kernels.moe_experts import moe_experts, one_token_experts
from seekforge.kernels.moe_route import moe_route, moe_route_reference
from seekforge.kernels.paged_attention import one_token_attention, paged_attention
from seekforge.kernels.paged_mla_attention import one_token_mla_attention, paged_mla_attention
from seekforge.kernels.rms_norm import rms_norm, rms_norm_reference
from seekforge.kernels.rope import rope, rope_reference
from seekforge.kernels.swiglu import swiglu, swiglu_reference
from seekforge.passes.linears import LINEAR

# Weights up to which an INT4 linear layer of several tokens is decoded whole by Inductor's code
# (8 MB in fp32, within the caches); larger ones by the operator, in pieces (docs/cpu.md).
INLINED_WEIGHTS = 1 << 21


def one_token_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The residual stream is stored in every layer. Inductor would store it in some and add up what
    came since in the others, so that no two layers have the same code."""
    total = in_memory(x + residual)
    return rms_norm_reference(total, weight, eps), total


INLINED: dict[Any, Callable[..., Any]] = {
    rms_norm: rms_norm_reference,
    add_rms_norm: add_rms_norm_reference,
    rope: rope_reference,
    swiglu: swiglu_reference,
}
ONE_TOKEN_INLINED: dict[Any, Callable[..., Any]] = {
    add_rms_norm: one_token_add_rms_norm,
    paged_attention: one_token_attention,
    paged_mla_attention: one_token_mla_attention,
    int4_linear: one_token_int4_linear,
    moe_route: moe_route_reference,
    moe_experts: one_token_experts,
    int4_moe_experts: one_token_int4_experts,
}


def choose_code(module: fx.GraphModule, device: str, one_token: bool) -> None:
    """Gives the module's operators the code for "cpu" or "cuda"."""
    inlined = INLINED | (ONE_TOKEN_INLINED if one_token else {}) if device == "cpu" else {}
    for node in list(module.graph.nodes):
        if node.target in inlined:
            node.target = inlined[node.target]
        elif one_token and node.target is LINEAR:
            _use_gemv(node)
        elif device == "cuda" and node.target is LINEAR:
            _use_operator(node)
        elif node.target is int4_linear and device == "cpu" and _is_small(module, node):
            node.target = inlined_int4_linear
    module.recompile()


def _is_small(module: fx.GraphModule, int4: fx.Node) -> bool:
    qweight: Any = int4.args[1]
    return 2 * module.get_parameter(str(qweight.target)).numel() <= INLINED_WEIGHTS


def _use_gemv(node: fx.Node) -> None:
    x, weight, *bias = node.args
    node.target, node.args = gemv, (x, weight)
    if bias and bias[0] is not None:
        with node.graph.inserting_after(node):
            total = node.graph.call_function(torch.ops.aten.add.Tensor, (node, bias[0]))
        node.replace_all_uses_with(total, lambda user: user is not total)


def _use_operator(node: fx.Node) -> None:
    """A linear layer as our operator, which also widens its input: a router's is in fp32."""
    x, weight, bias = (*node.args, None)[:3]
    if (
        isinstance(x, fx.Node)
        and x.target is torch.ops.aten.to.dtype
        and x.args[1] == torch.float32
    ):
        x = x.args[0]
    node.target, node.args = linear, (x, weight, bias)
