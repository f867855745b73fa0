"""A graph's nodes as the report shows them: plain text, that stays when the graph changes.

In: a program between two passes. Out: for each call its operator, arguments, shape, module and the
line of transformers it comes from. Knows nothing of pages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from seekforge.compile.account import layer_of_nodes, operator_name
from seekforge.passes.kv_cache import PADDED, RAGGED
from seekforge.passes.program import TORCH, Program, module_path

Dims = Mapping[str, tuple[str, ...]]
EXPORTED: Dims = {"input_ids": ("batch", "seq"), "position_ids": ("batch", "seq")}
DIMS: Mapping[str | None, Dims] = {
    None: EXPORTED,
    "ragged": RAGGED,
    "padded": PADDED,
}  # by the program's form
DTYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64",
    torch.int64: "i64", torch.int32: "i32", torch.uint8: "u8", torch.bool: "bool",
}  # fmt: skip
_PREFIX = re.compile(r"^.*?\b(?:layers|h|blocks)\.\d+\.?")
_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<func>\S+))?\n?(?P<code>.*)'
)

Names = tuple[tuple[Any, str], ...]  # symbols of dynamic sizes, and what they are called


class Source(NamedTuple):
    """A line of the model's Python: `llama/modeling_llama.py:58`, its function, its text."""

    line: str
    function: str
    code: str


@dataclass(frozen=True, slots=True)
class ShownNode:
    """args: as in the graph, other nodes as `%name`. refs: those nodes, in the order of the
    arguments. shape: `[batch, seq, 576] fp32`. module: within its layer."""

    name: str
    operator: str
    args: str
    refs: tuple[str, ...]
    shape: str
    module: str
    source: Source | None


def shown_layers(program: Program, num_layers: int) -> list[list[ShownNode]]:
    """The calls of each layer in order; in the last place those of none."""
    names = _dim_names(program)
    layers: list[list[ShownNode]] = [[] for _ in range(num_layers + 1)]
    for node, layer in layer_of_nodes(program, num_layers).items():
        if node.op == "call_function":
            layers[layer].append(_shown(node, names))
    return layers


def _shown(node: fx.Node, names: Names) -> ShownNode:
    refs: list[str] = []
    args = [_text(arg, refs) for arg in node.args]
    args += [f"{key}={_text(arg, refs)}" for key, arg in node.kwargs.items()]
    return ShownNode(
        name=node.name,
        operator=operator_name(node),
        args=", ".join(args),
        refs=tuple(refs),
        shape=_shape(node.meta.get("val"), names),
        module=_PREFIX.sub("", module_path(node)).removeprefix("model."),
        source=source_of(node.meta.get("stack_trace") or ""),
    )


def _text(value: Any, refs: list[str]) -> str:
    if isinstance(value, fx.Node):
        if value.op == "get_attr":
            return _PREFIX.sub("", str(value.target))
        if value.op != "call_function":
            return value.name
        refs.append(value.name)
        return f"%{value.name}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(item, refs) for item in value)}]"
    return DTYPES.get(value, str(value)) if isinstance(value, torch.dtype) else str(value)


def _dim_names(program: Program) -> Names:
    """Symbols of the graph's dynamic sizes to the names of the dimensions."""
    names: dict[Any, str] = {}
    for node in program.graph.find_nodes(op="placeholder"):
        value, dims = node.meta.get("val"), DIMS[program.form].get(node.name, ())
        if "_pool_" in node.name:
            dims = ("blocks", "block_size")
        if isinstance(value, Tensor):
            for size, name in zip(value.shape, dims, strict=False):
                if isinstance(size, torch.SymInt):
                    names.setdefault(size.node.expr, name)
    return tuple(names.items())


def _shape(value: Any, names: Names) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(_shape(item, names) for item in value)
    if isinstance(value, torch.SymInt):
        return _size(value.node.expr, names)
    if not isinstance(value, Tensor):
        return "" if value is None else str(value)
    sizes = [str(s) if isinstance(s, int) else _size(s.node.expr, names) for s in value.shape]
    return f"[{', '.join(sizes)}] {DTYPES.get(value.dtype, str(value.dtype))}"


@lru_cache(1 << 12)
def _size(size: Any, names: Names) -> str:
    text = str(size)
    for symbol, name in names:
        text = re.sub(rf"\b{re.escape(str(symbol))}\b", name, text)
    return text.replace("*", "·")


@lru_cache(1 << 12)
def source_of(trace: str) -> Source | None:
    """The innermost frame of a stack that is not torch's own; None where there is none."""
    frames = [f for f in _FRAME.finditer(trace) if not f["file"].startswith((TORCH, "torch/"))]
    if not frames:
        return None
    frame = frames[-1]
    file = "/".join(frame["file"].split("/")[-2:])
    return Source(f"{file}:{frame['line']}", frame["func"] or "", frame["code"].strip())
