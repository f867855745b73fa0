"""Gate-up + SwiGLU: down(silu(gate(x)) * up(x)) with one matrix product and one activation.

Seen in the MLP of Llama, Qwen and DeepSeek (also its shared experts). The halves keep their order:
silu is applied to the gate, which comes first. Other activations (gelu, sigmoid) are near-misses.
"""

from __future__ import annotations

import torch

from seekforge.kernels.swiglu import swiglu
from seekforge.passes.linears import LINEAR, cannot_concatenate, concatenate
from seekforge.passes.pattern import Call, Match, Pattern, Var
from seekforge.passes.program import Program, module_path, same_shape
from seekforge.passes.rule import Rule

aten = torch.ops.aten


class _Linear(Pattern):
    """A linear layer with or without bias, bound as a node."""

    def __init__(self, name: str) -> None:
        self.name = name

    def match(self, value, so_far, at):  # type: ignore[no-untyped-def]
        found = Var(self.name).match(value, so_far, at)
        if isinstance(found, Match) and value.target is not LINEAR:
            return Call(LINEAR).match(value, so_far, at)
        return found


def _check(program: Program, found: Match) -> str | None:
    gate, up = found["gate"], found["up"]
    if gate is up:
        return f"gate and up are one layer, {gate}"
    if not same_shape(gate.meta["val"], up.meta["val"]):
        return f"gate {tuple(gate.meta['val'].shape)} and up {tuple(up.meta['val'].shape)} differ"
    return cannot_concatenate(program, (gate, up))


def _rewrite(program: Program, found: Match) -> None:
    root = found.nodes[0]
    owner = module_path(root)
    fused = concatenate(program, (found["gate"], found["up"]), f"{owner}.gate_up_proj")
    with program.graph.inserting_before(root):
        root.replace_all_uses_with(program.emit(swiglu, fused, like=root))


RULE = Rule(
    name="swiglu",
    root=aten.mul.Tensor,
    anchor=aten.silu.default,
    pattern=Call(
        aten.mul.Tensor,
        Call(aten.silu.default, _Linear("gate")),
        _Linear("up"),
        commutes=True,
    ),
    check=_check,
    rewrite=_rewrite,
)
