"""Runs a program's graph on the CPU or a GPU as it stands, between any two passes.

In: a program and a function that reads checkpoint tensors. Out: a module that takes the graph's
inputs in their order. Tests run graphs so, without a backend; engines don't use it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

from seekforge.compile.weights import read_pieces
from seekforge.kernels.int4 import Int4
from seekforge.passes.program import Program


def materialise(
    program: Program,
    read: Callable[[str], Tensor],
    device: str = "cpu",
    int4: Callable[[str, int, bool, torch.dtype], Int4] | None = None,
) -> fx.GraphModule:
    """The graph with real weights, as a copy that later passes don't change.

    read: checkpoint tensor by name. A weight made of several is concatenated along dimension 0 and
    viewed and cast as the graph expects; equal weights of the checkpoint are not shared.
    """
    weights: dict[str, Tensor] = {}
    for name in program.weights:
        pieces = [
            piece[name] for piece in read_pieces(program, _together(program, name), read, int4)
        ]
        whole = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        meta = program.tensor(name)
        assert whole.numel() == meta.numel(), f"{name}: {tuple(whole.shape)}, {tuple(meta.shape)}"
        weights[name] = whole.reshape(meta.shape).to(device)
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    return fx.GraphModule(weights, graph)


def _together(program: Program, name: str) -> list[str]:
    """`name`, and for a part of an INT4 weight the other parts: they are made in one go."""
    weight = program.weights[name]
    if weight.int4 is None:
        return [name]
    return [n for n, w in program.weights.items() if w.int4 and w.sources == weight.sources]


def run(program: Program, read: Callable[[str], Tensor], *inputs: object) -> tuple[Tensor, ...]:
    """The graph's outputs for `inputs`, one for each placeholder, in order."""
    device = next((str(value.device) for value in inputs if isinstance(value, Tensor)), "cpu")
    with torch.no_grad():
        outputs = materialise(program, read, device)(*inputs)
    return tuple(outputs)
