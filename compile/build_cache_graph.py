"""A program's digest: equal digests mean that a backend is given the same graph.

Counts: every node with its operator, edges and attributes, dtypes and shapes of all values, names,
dtypes and shapes of the weights and how INT4 ones are packed, the inputs. Does not count: where a
node comes from in the source, what the weights hold.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from seekforge.passes.kv_cache import GraphInput
from seekforge.passes.program import Program

SYMBOL = re.compile(r"\b[suz]\d+\b")  # a dynamic dimension, as torch.export calls it


def graph_digest(program: Program, inputs: Sequence[GraphInput]) -> str:
    """sha256 of the program as text, dynamic dimensions numbered in the order they come up."""
    symbols: dict[str, str] = {}

    def numbered(match: re.Match[str]) -> str:
        return symbols.setdefault(match[0], f"dim{len(symbols)}")

    digest = hashlib.sha256()
    for line in _lines(program, inputs):
        digest.update(SYMBOL.sub(numbered, line).encode() + b"\n")
    return digest.hexdigest()


def _lines(program: Program, inputs: Sequence[GraphInput]) -> list[str]:
    lines = [f"form {program.form} outputs {program.outputs}"]
    lines += [f"input {entry.name} {entry.dtype} {entry.dims}" for entry in inputs]
    for name, weight in sorted(program.weights.items()):
        meta = program.tensor(name)
        lines.append(f"weight {name} {meta.dtype} {tuple(meta.shape)} {weight.int4}")
    for node in program.graph.nodes:
        target = node.target if isinstance(node.target, str) else _callable(node.target)
        given = f"{_text(node.args)} {_text(node.kwargs)}"
        lines.append(f"{node.name} {node.op} {target} {given} -> {_text(node.meta.get('val'))}")
    return lines


def _callable(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', repr(target))}"


def _text(value: Any) -> str:
    """An argument as text. What is not known here is shown by its `repr`: if that has an address in
    it, the digest is of no use, but never wrong."""
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, Tensor):
        return f"{value.dtype}{[_text(size) for size in value.shape]}"
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return str(value.node.expr)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_text(item)}' for name, item in value.items())}}}"
    if isinstance(value, slice):
        return f"slice{_text([value.start, value.stop, value.step])}"
    return repr(value)
