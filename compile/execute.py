"""Runs a program's graph on the CPU or a GPU as it stands, between any two passes.

In: a program and a function that reads checkpoint tensors. Out: a module that takes the graph's
inputs in their order. This is what verification and bisect compare; engines don't use it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

from seekforge.passes.program import Program


def materialise(
    program: Program, read: Callable[[str], Tensor], device: str = "cpu"
) -> fx.GraphModule:
    """The graph with real weights, as a copy that later passes don't change.

    read: checkpoint tensor by name. A weight made of several is concatenated along dimension 0 and
    cast to the dtype the graph expects; equal weights of the checkpoint are not shared.
    """
    weights: dict[str, Tensor] = {}
    for name, weight in program.weights.items():
        parts = (
            [read(source) for source in weight.sources] if weight.value is None else [weight.value]
        )
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        meta = program.tensor(name)
        assert whole.shape == meta.shape, f"{name}: {tuple(whole.shape)}, not {tuple(meta.shape)}"
        weights[name] = whole.to(device=device, dtype=meta.dtype)
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    return fx.GraphModule(weights, graph)


def run(program: Program, read: Callable[[str], Tensor], *inputs: object) -> tuple[Tensor, ...]:
    """The graph's outputs for `inputs`, one for each placeholder, in order."""
    device = next((str(value.device) for value in inputs if isinstance(value, Tensor)), "cpu")
    with torch.no_grad():
        outputs = materialise(program, read, device)(*inputs)
    return tuple(outputs)
