"""What calibration gathers while text runs through a decoder layer: its linear layers' inputs.

In: transformers' own layer and its scale groups. Out: collectors that hooks fill. Experts see
different tokens, so each has collectors of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.functional import linear

from seekforge.compile.awq import ROWS, Collector
from seekforge.kernels.swiglu import swiglu_reference
from seekforge.models.awq_groups import ScaleGroup

EXPERTS = "mlp.experts"
# What is kept of the inputs of a dense layer, and of each of many experts (64 experts of 2048
# channels: 0.33 GB): rows, and, for error feedback, channels of one Gram matrix.
DENSE_ROWS, DENSE_BLOCK = ROWS, 2048
EXPERT_ROWS, EXPERT_BLOCK = 128, 512


@contextmanager
def observed(
    layer: nn.Module,
    groups: Sequence[ScaleGroup],
    inputs: dict[str, list[Collector]],
    feedback: bool,
) -> Iterator[None]:
    """While open, gathers the input of each group's readers: one collector for a group (by its
    producer's name), or one for each expert (by the experts' parameter)."""
    handles = []
    wanted = {name for group in groups for name in group.linears}
    for group in groups:
        plain = [name for name in group.linears if not name.startswith(EXPERTS)]
        if plain:
            reader = layer.get_submodule(plain[0].removesuffix(".weight"))
            hook = _gather(inputs.setdefault(group.producer, []), DENSE_BLOCK * feedback)
            handles.append(reader.register_forward_pre_hook(hook))
    if any(name.startswith(EXPERTS) for name in wanted):
        hook = _gather_experts(inputs, wanted, EXPERT_BLOCK * feedback)
        handles.append(layer.get_submodule(EXPERTS).register_forward_pre_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _gather(into: list[Collector], block: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        if not into:
            into.append(Collector(args[0].shape[-1], DENSE_ROWS, block))
        into[0].add(args[0])

    return hook


def _gather_experts(
    inputs: dict[str, list[Collector]], wanted: set[str], block: int
) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    names = [f"{EXPERTS}.{leaf}" for leaf in ("gate_up_proj", "down_proj")]

    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        x, indices, _ = args
        gate_up, down = (getattr(module, leaf) for leaf in ("gate_up_proj", "down_proj"))
        for name, weight in zip(names, (gate_up, down), strict=True):
            if name not in inputs:
                inputs[name] = [Collector(weight.shape[-1], EXPERT_ROWS, block) for _ in weight]
        x, indices = x.reshape(-1, x.shape[-1]), indices.reshape(-1, indices.shape[-1])
        for e in indices.unique().tolist():
            rows = x[(indices == e).any(-1)]
            inputs[names[0]][e].add(rows)
            if names[1] in wanted:
                inputs[names[1]][e].add(swiglu_reference(linear(rows, gate_up[e])))

    return hook
