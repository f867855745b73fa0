"""TensorRT's failures in the user's terms: which node, which source line, why, what to do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seekforge.compile.onnx_nodes import OnnxNodes
from seekforge.kernels.errors import BuildError

# (pattern in the backend's text, cause, what to do); the first that matches is used.
KNOWN = (
    (
        r"not supported by a dedicated kernel",
        "TensorRT has no fused attention kernel for this dtype and head size",
        "use float16 or bfloat16 and a head size that is a multiple of 16, up to 256",
    ),
    (
        r"same head dimension",
        "TensorRT's attention needs one head size for Q, K and V",
        "pad V to the head size of Q and K in the lowering",
    ),
    (
        r"[Ss]oftcap|softcap",
        "TensorRT's attention has no logit soft cap",
        "build this model for onnxruntime or inductor",
    ),
    (
        r"zero.?point",
        "TensorRT accepts only zero as an INT4 zero point",
        "quantise symmetrically for TensorRT",
    ),
    (
        r"Plugin not found",
        "the operator is neither standard ONNX nor a TensorRT plugin that is loaded",
        "lower it to standard operators of opset 23",
    ),
    (
        r"Could not find any implementation|no implementation",
        "TensorRT has no kernel for this node with these types, shapes and workspace",
        "raise the workspace limit, or change the node's dtype",
    ),
    (
        r"[Oo]ut.?[Oo]f.?[Mm]emory|bad_alloc|cannot allocate",
        "memory ran out during the build",
        "lower --max-batch, --max-len or the workspace limit, or build on a machine with more",
    ),
    (
        r"missing dimensions in profile",
        "an input with dynamic dimensions has no range in a profile",
        "the graph's inputs and the profiles must list the same names",
    ),
    (
        r"UNSUPPORTED_NODE",
        "TensorRT's parser does not support this operator, or not in this form",
        "lower it to other operators, or build for onnxruntime or inductor",
    ),
)
_NO_GPU = "catchCudaError"  # noise of every failure on a machine without a GPU


def parser_failure(nodes: OnnxNodes, errors: Sequence[Any], log_path: Path) -> BuildError:
    """The parser's first error (`ParserError`), with node and source line."""
    error = errors[0]
    text = _clean(error.desc())
    where = nodes.describe(error.node_name(), error.node())
    operator, code = error.node_operator(), str(error.code()).rpartition(".")[2]
    if error.node() < 0 and not error.node_name():
        where = "the model"
    return _failure(f"TensorRT's parser refused {where}", f"{code} {operator}: {text}", log_path)


def builder_failure(nodes: OnnxNodes, errors: Sequence[str], log_path: Path) -> BuildError:
    """The builder's first error; it names the node itself, or not at all."""
    errors = [text for text in map(_clean, errors) if text]
    text = errors[0] if errors else "no reason given"
    named = nodes.mentioned(text)
    where = f" at {nodes.describe(named[0])}" if named else ""
    return _failure(f"TensorRT could not build {nodes.path}{where}", text, log_path)


def _failure(what: str, text: str, log_path: Path) -> BuildError:
    for pattern, cause, advice in KNOWN:
        if re.search(pattern, text):
            return BuildError(
                f"{what}: {cause}. {_capital(advice)}. TensorRT: {text} (log: {log_path})"
            )
    return BuildError(f"{what}. TensorRT: {text} (log: {log_path})")


def _clean(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and _NO_GPU not in line]
    return " ".join(lines)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
