"""The program that passes transform: a graph, and where each of its weights comes from.

A program holds no weights. Its parameters are meta tensors; `weights` says for each one how it is
made from checkpoint tensors, and the writer streams them when the engine is written. So memory
during the passes does not grow with the model. Knows nothing of checkpoints' files or of backends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.node import map_arg

TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True, slots=True)
class Int4Part:
    """One of the tensors that an INT4 weight is stored as (kernels/int4.py).

    part: "qweight", "scales" or "zeros". signed: qweight as pairs of signed INT4, as ONNX's own
    type has them; symmetric only.
    """

    part: str
    group_size: int
    symmetric: bool
    signed: bool = False


@dataclass(frozen=True, slots=True)
class Weight:
    """How one parameter of the graph is made: checkpoint tensors concatenated along dim 0 and
    viewed in the parameter's shape (stacked experts), or a value.

    int4: the parameter is that part of each checkpoint tensor's INT4 form.
    """

    sources: tuple[str, ...] = ()
    value: Tensor | None = None
    int4: Int4Part | None = None

    def __post_init__(self) -> None:
        assert bool(self.sources) != (self.value is not None), "either sources or a value"


@dataclass(slots=True)
class Program:
    """graph_module: parameters as meta tensors, read by `get_attr` nodes; every node has
    `meta["val"]`.

    weights: for each parameter or buffer of graph_module the recipe. constants: real values of the
    buffers that the checkpoint does not hold (rotary frequencies). form: None, "ragged" or
    "padded".
    """

    graph_module: fx.GraphModule
    weights: dict[str, Weight]
    constants: dict[str, Tensor]
    form: str | None = None
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)

    @property
    def graph(self) -> fx.Graph:
        return self.graph_module.graph

    def nodes(self, target: Any) -> list[fx.Node]:
        """All nodes that call `target`, in order."""
        return list(self.graph.find_nodes(op="call_function", target=target))

    def tensor(self, name: str) -> Tensor:
        """The meta tensor behind a `get_attr` name."""
        found: Any = self.graph_module
        for part in name.split("."):
            found = getattr(found, part)
        assert isinstance(found, Tensor)
        return found

    def emit(self, target: Any, *args: Any, like: fx.Node) -> fx.Node:
        """Inserts a call at the graph's insertion point, with the origin of `like` and its fake
        value.

        Without the value where an input has none: the KV-cache pass computes all values anew at its
        end.
        """
        node = self.graph.call_function(target, args)
        node.meta = {
            key: like.meta[key] for key in ("stack_trace", "nn_module_stack") if key in like.meta
        }
        if all("val" in source.meta for source in node.all_input_nodes):
            with fake_mode(self.graph), enable_python_dispatcher():
                node.meta["val"] = target(*map_arg(args, lambda n: n.meta["val"]))
        return node

    def add_weight(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, weight: Weight
    ) -> fx.Node:
        """A new parameter and the `get_attr` node that reads it, at the head of the graph."""
        while name in self.weights:  # a second fusion of the same kind in one module
            name += "_"
        owner: nn.Module = self.graph_module
        *path, leaf = name.split(".")
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        assert not hasattr(owner, leaf), f"{name} exists"
        meta = torch.empty(shape, dtype=dtype, device="meta")
        owner.register_buffer(leaf, meta)
        self.weights[name] = weight
        first = next(iter(self.graph.nodes))
        with self.graph.inserting_before(first):
            node = self.graph.get_attr(name)
        mode = fake_mode(self.graph)
        node.meta["val"] = mode.from_tensor(meta, static_shapes=True)
        return node

    def drop_unused(self) -> None:
        """Removes dead nodes and the weights that no node reads any more."""
        self.graph.eliminate_dead_code()
        for node in list(self.graph.nodes):
            if node.op == "get_attr" and not node.users:
                self.graph.erase_node(node)
        read = {node.target for node in self.graph.nodes if node.op == "get_attr"}
        for name in [name for name in self.weights if name not in read]:
            del self.weights[name]
        self.graph_module.delete_all_unused_submodules()
        self.graph_module.recompile()


def fake_mode(graph: fx.Graph) -> Any:
    """The FakeTensorMode of the graph's values (one per graph)."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch._subclasses.FakeTensor):
            return value.fake_mode
    raise AssertionError("graph without fake values")


def same_shape(a: Tensor, b: Tensor) -> bool:
    """Same shape for certain: equal numbers, or one symbolic expression. Adds no guard."""
    return len(a.shape) == len(b.shape) and all(map(same_size, a.shape, b.shape))


def same_size(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    if isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt):
        return bool(a.node.expr == b.node.expr)
    return isinstance(a, int) and isinstance(b, int) and a == b


def source_line(node: fx.Node) -> str:
    """`file.py:123` of the transformers line a node comes from, or its name where unknown."""
    trace = node.meta.get("stack_trace") or ""
    lines = [line for line in trace.splitlines() if line.lstrip().startswith("File ")]
    # The innermost line that is not torch's own: the model's source.
    for line in reversed(lines):
        path, number = line.split('"')[1], line.split("line ")[1].split(",")[0]
        if not path.startswith(TORCH):
            return f"{'/'.join(path.split('/')[-2:])}:{number}"
    return node.name


def module_path(node: fx.Node) -> str:
    """Dotted name of the innermost module a node comes from: `model.layers.3.self_attn.q_proj`."""
    stack = node.meta.get("nn_module_stack")
    return list(stack.values())[-1][0] if stack else ""


def ancestors(node: fx.Node) -> Iterator[fx.Node]:
    """Every node that `node` depends on, itself first; each once."""
    seen, queue = {node}, [node]
    while queue:
        current = queue.pop()
        yield current
        for source in current.all_input_nodes:
            if source not in seen:
                seen.add(source)
                queue.append(source)
