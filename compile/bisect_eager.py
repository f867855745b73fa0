"""What transformers' eager model computes, by the names of the exported graph's nodes.

In: the eager module, tokens, the exported program. Out: {node name: value} of the nodes at which a
module begins or ends. Hooks see each module's input and output; in the graph these are the last
node of the module, and what its first node reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from seekforge.compile.bisect_result import row_error
from seekforge.passes.program import Program


def eager_values(
    module: nn.Module, inputs: dict[str, Tensor], program: Program
) -> dict[str, Tensor]:
    """Values at the boundaries of modules. inputs: input_ids and position_ids."""
    boundaries = _boundaries(program)
    given: dict[str, list[Tensor]] = {}
    with torch.no_grad(), _hooks(module, boundaries, given):
        logits: Tensor = module(**inputs, use_cache=False).logits
    nodes: Any = program.graph.output_node().args[0]
    given[nodes[0].name] = [logits]
    shapes = {node.name: node for node in program.graph.nodes}
    found = {}
    for name, tensors in given.items():
        fits = [t for t in tensors if _fits(t, shapes[name], inputs["input_ids"].shape)]
        if len(fits) == 1 or (fits and all(row_error(fits[0], t) == 0 for t in fits)):
            found[name] = fits[0]
    return found


def _boundaries(program: Program) -> dict[tuple[str, str], fx.Node]:
    """{(module path, "input" or "output"): node}."""
    inside: dict[str, list[fx.Node]] = {}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, Tensor):
            continue
        for path, _ in (node.meta.get("nn_module_stack") or {}).values():
            inside.setdefault(path, []).append(node)
    found: dict[tuple[str, str], fx.Node] = {}
    for path, nodes in inside.items():
        if not path:
            continue
        found[path, "output"] = nodes[-1]
        read = [n for n in nodes[0].all_input_nodes if n.op == "call_function"]
        if read and read[0] not in nodes:
            found[path, "input"] = read[0]
    return found


@contextmanager
def _hooks(
    module: nn.Module, boundaries: dict[tuple[str, str], fx.Node], given: dict[str, list[Tensor]]
) -> Iterator[None]:
    """Fills `given` with all tensors that could be the node's value. A module that runs twice has
    no one value, and is left out."""
    handles, calls = [], dict[str, int]()

    def keep(path: str, end: str, tensors: list[Tensor]) -> None:
        node = boundaries.get((path, end))
        if node is not None and calls[path] == 1:
            given.setdefault(node.name, []).extend(t.detach().clone() for t in tensors)

    def before(path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            calls[path] = calls.get(path, 0) + 1
            keep(path, "input", _tensors((*args, *kwargs.values()))[:1])

        return hook

    def after(path: str) -> Any:
        return lambda module, args, output: keep(path, "output", _tensors(output))

    try:
        for path, part in module.named_modules():
            if path:
                handles.append(part.register_forward_pre_hook(before(path), with_kwargs=True))
                handles.append(part.register_forward_hook(after(path)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in _tensors(part)]
    return []


def _fits(tensor: Tensor, node: fx.Node, tokens: torch.Size) -> bool:
    """Whether the node's fake value may be this one's: same sizes where they are fixed."""
    shape = node.meta["val"].shape
    if len(shape) != tensor.dim() or node.meta["val"].dtype != tensor.dtype:
        return False
    return all(
        isinstance(size, torch.SymInt) or size == real
        for size, real in zip(shape, tensor.shape, strict=True)
    )
