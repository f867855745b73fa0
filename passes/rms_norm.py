"""RMSNorm: the six nodes of transformers' `LlamaRMSNorm` and its copies become one.

hidden = hidden.to(float32); variance = hidden.pow(2).mean(-1, keepdim=True)
weight * (hidden * rsqrt(variance + eps)).to(input_dtype)
"""

from __future__ import annotations

import torch

from seekforge.kernels.rms_norm import rms_norm as op
from seekforge.passes.pattern import Call, Cast, Literal, Match, Number, Var, skip_cast
from seekforge.passes.program import Program
from seekforge.passes.rule import Rule

aten = torch.ops.aten

_wide = Var("wide")
_variance = Call(
    aten.mean.dim, Call(aten.pow.Tensor_Scalar, _wide, Literal(2)), Literal([-1]), Literal(True)
)
_scale = Call(aten.rsqrt.default, Call(aten.add.Tensor, _variance, Number("eps")))
_normed = Call(aten.mul.Tensor, _wide, _scale, commutes=True)


def _check(program: Program, found: Match) -> str | None:
    x, weight = skip_cast(found["wide"]).meta["val"], found["weight"].meta["val"]
    if weight.shape != x.shape[-1:]:
        return f"weight {tuple(weight.shape)} does not span the last dimension of {tuple(x.shape)}"
    normed = found["normed"].meta["val"]
    if not weight.dtype == normed.dtype == x.dtype:
        return f"weight is {weight.dtype}, input {x.dtype}, normalised value cast to {normed.dtype}"
    if found["wide"].meta["val"].dtype != torch.float32:
        return f"normalised in {found['wide'].meta['val'].dtype}, not float32"
    return None


def _rewrite(program: Program, found: Match) -> None:
    root = found.nodes[0]
    with program.graph.inserting_before(root):
        x = skip_cast(found["wide"])
        root.replace_all_uses_with(program.emit(op, x, found["weight"], found["eps"], like=root))


RULE = Rule(
    name="rms_norm",
    root=aten.mul.Tensor,
    anchor=aten.rsqrt.default,
    pattern=Call(
        aten.mul.Tensor, Var("weight", weight=True), Cast(_normed, "normed"), commutes=True
    ),
    check=_check,
    rewrite=_rewrite,
)
