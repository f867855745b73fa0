"""Residual add + RMSNorm: one node that returns the norm and the sum, which is read again.

hidden = residual + hidden; normed = rms_norm(hidden)
"""

from __future__ import annotations

import operator

import torch

from seekforge.kernels.add_rms_norm import add_rms_norm as op
from seekforge.kernels.rms_norm import rms_norm
from seekforge.passes.pattern import Call, Match, Number, Var
from seekforge.passes.program import Program, same_shape
from seekforge.passes.rule import Rule

aten = torch.ops.aten


def _check(program: Program, found: Match) -> str | None:
    x, residual = found["x"].meta["val"], found["residual"].meta["val"]
    if not same_shape(x, residual) or x.dtype != residual.dtype:
        return f"adds {x.dtype} {tuple(x.shape)} and {residual.dtype} {tuple(residual.shape)}"
    return None


def _rewrite(program: Program, found: Match) -> None:
    norm, add = found.nodes
    with program.graph.inserting_before(add):
        both = program.emit(
            op, found["x"], found["residual"], found["weight"], found["eps"], like=norm
        )
        normed = program.emit(operator.getitem, both, 0, like=norm)
        total = program.emit(operator.getitem, both, 1, like=add)
    norm.replace_all_uses_with(normed)
    add.replace_all_uses_with(total)


RULE = Rule(
    name="add_rms_norm",
    root=rms_norm,
    anchor=rms_norm,
    pattern=Call(
        rms_norm,
        Call(aten.add.Tensor, Var("x"), Var("residual")),
        Var("weight", weight=True),
        Number("eps"),
    ),
    check=_check,
    rewrite=_rewrite,
)
