"""TensorRT's failures in the user's terms: which node, which layer; the rest is failures.py's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seekforge.compile.failures import failure
from seekforge.compile.onnx_nodes import OnnxNodes
from seekforge.kernels.errors import BuildError

_NO_GPU = "catchCudaError"  # noise of every failure on a machine without a GPU
_LAYER = re.compile(r"for node (\{.*?\}|\S+)|(\{ForeignNode\[.*?\]\})")


def parser_failure(
    product: str, nodes: OnnxNodes, errors: Sequence[Any], log_path: Path
) -> BuildError:
    """The parser's first error (`ParserError`), with node and source line."""
    error = errors[0]
    name, index, operator = error.node_name(), error.node(), error.node_operator()
    said = f"{str(error.code()).rpartition('.')[2]} {operator}: {_clean(error.desc())}"
    if index < 0 and not name:
        return failure(product, f"refused {nodes.path}", said, log_path)
    node = nodes.find(name, index)
    what = f"refused node {name!r} ({operator or (node.op_type if node else 'unknown')})"
    return failure(product, what, said, log_path, nodes.chain(name, index))


def builder_failure(
    product: str, nodes: OnnxNodes, errors: Sequence[str], log_path: Path
) -> BuildError:
    """The builder's first error; it names nodes and its own layer itself, or not at all."""
    errors = [text for text in map(_clean, errors) if text]
    said = errors[0] if errors else "no reason given"
    named, layer = nodes.mentioned(said), _LAYER.search(said)
    at = nodes.chain(named[0]) if named else []
    if layer:
        at.append(f"layer {layer[1] or layer[2]}")
    return failure(product, f"could not build {nodes.path}", said, log_path, at)


def _clean(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and _NO_GPU not in line]
    return " ".join(lines)
