"""Grows an ONNX graph node by node: names, constants, weights in a file of their own, subgraphs.

Knows the ONNX format and nothing of operators' meaning. Every node keeps the transformers source
line it came from, so that a backend's refusal can be worded in the user's terms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import fx

from seekforge.compile.onnx_nodes import FX_KEY
from seekforge.compile.weights import data_offsets
from seekforge.passes.program import Program, module_path

STACK_KEY = "pkg.torch.onnx.stack_trace"
DTYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.int64: TensorProto.INT64,
    torch.uint8: TensorProto.UINT8,
    torch.bool: TensorProto.BOOL,
}
NUMPY = {torch.int64: np.int64, torch.uint8: np.uint8}
Value = str | list[str]


class OnnxBuilder:
    """Grows the list of ONNX nodes; `values` maps each graph node to the name of its ONNX value.

    target: "onnxruntime", "tensorrt" or "tensorrt-rtx"; a few operators have a form for each.
    """

    def __init__(self, program: Program, weights: Path, target: str) -> None:
        self.program = program
        self.target = target
        self.weights_name = weights.name
        self.offsets = data_offsets(weights)
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.values: dict[fx.Node, Value] = {}
        self.known: dict[Any, Any] = {}  # what the graph, or the branch that grows, has already
        self.constants: dict[Any, str] = {}
        self.names: set[str] = set()
        self.domains: set[str] = set()  # of the operators that are not ONNX's own
        self.outputs = dict(
            zip(program.graph.output_node().args[0], program.outputs, strict=True)  # type: ignore[arg-type]
        )
        self.origin: fx.Node | None = None

    def op(
        self,
        kind: str,
        *inputs: str,
        output: str | None = None,
        outputs: int = 1,
        **attributes: Any,
    ) -> Any:
        """Adds a node; equal nodes are added once. Returns its output name, or names if several."""
        key = (kind, inputs, outputs, tuple(sorted((k, str(v)) for k, v in attributes.items())))
        if output is None and key in self.known:
            return self.known[key]
        for read in inputs:
            if read in self.program.weights:
                self.weight(read)
        self.domains.update({attributes["domain"]} if "domain" in attributes else ())
        name = self.unique(f"{module_path(self.origin) if self.origin else ''}.{kind}".strip("."))
        if outputs > 1:
            results = [f"{name}:{i}" for i in range(outputs)]
        else:
            results = [output or f"{name}:0"]
        node = helper.make_node(kind, list(inputs), results, name=name, **attributes)
        trace = self.origin.meta.get("stack_trace") if self.origin else None
        if trace:
            # The innermost frame of the model's own code; the whole stack would be half the file.
            frames = [f for f in trace.split("  File ")[1:] if "/torch/" not in f.split(",")[0]]
            entry = node.metadata_props.add()
            entry.key, entry.value = STACK_KEY, "  File " + frames[-1] if frames else trace
        if self.origin is not None:
            node.metadata_props.add(key=FX_KEY, value=self.origin.name)
        self.nodes.append(node)
        result: Any = results if outputs > 1 else results[0]
        if output is None:
            self.known[key] = result
        return result

    def unique(self, name: str) -> str:
        candidate, number = name, 1
        while candidate in self.names:
            number += 1
            candidate = f"{name}_{number}"
        self.names.add(candidate)
        return candidate

    def weight(self, name: str) -> str:
        """An initializer whose data lies in the weights file; a bare file name, so folders can
        move. `op` declares those it reads."""
        meta = self.program.tensor(name)
        return self.stored(name, name, DTYPES[meta.dtype], meta.shape)

    def stored(
        self, label: str, name: str, data_type: int, dims: Sequence[int], item: int = 0, of: int = 1
    ) -> str:
        """An initializer `label`: item number `item` of the `of` equal parts of a weight's bytes,
        as another type and shape of as many bytes."""
        if label not in self.names:
            offset, length = self.offsets[name]
            tensor = TensorProto(
                name=label,
                data_type=data_type,
                dims=list(dims),
                data_location=TensorProto.EXTERNAL,
            )
            length //= of
            for key, value in (
                ("location", self.weights_name), ("offset", str(offset + item * length)),
                ("length", str(length)),
            ):  # fmt: skip
                tensor.external_data.add(key=key, value=value)
            self.initializers.append(tensor)
            self.names.add(label)
        return label

    def constant(self, value: Any, dtype: torch.dtype = torch.int64) -> str:
        """A small constant inside the model file."""
        key = (str(value), dtype)
        if key not in self.constants:
            name = self.unique("constant")
            array = np.asarray(value, dtype=NUMPY.get(dtype, np.float32))
            tensor = numpy_helper.from_array(array, name)
            if dtype not in (*NUMPY, torch.float32):
                values = torch.tensor(array).to(dtype).flatten()
                raw = values.view(torch.int16).numpy().tobytes()
                tensor = helper.make_tensor(name, DTYPES[dtype], array.shape, raw, raw=True)
            self.initializers.append(tensor)
            self.constants[key] = name
        return self.constants[key]

    def subgraph(
        self,
        name: str,
        make: Callable[[], Sequence[tuple[str, torch.dtype, Sequence[int | str]]]],
        inputs: Sequence[tuple[str, torch.dtype, Sequence[int | str]]] = (),
    ) -> onnx.GraphProto:
        """What `make` adds, as the body of an If or a Loop: it returns the outputs (name, dtype,
        dims). A body sees the values around it; its own are not seen outside. Constants lie
        outside."""
        around = self.nodes, self.known
        self.nodes, self.known = [], dict(self.known)
        results = make()
        graph = helper.make_graph(
            self.nodes,
            self.unique(name),
            [helper.make_tensor_value_info(n, DTYPES[t], list(dims)) for n, t, dims in inputs],
            [helper.make_tensor_value_info(n, DTYPES[t], list(dims)) for n, t, dims in results],
        )
        self.nodes, self.known = around
        return graph

    def shape(self, sizes: Sequence[int | str]) -> str:
        """A shape: numbers, and names of one-element tensors for the dynamic ones."""
        if all(isinstance(size, int) for size in sizes):
            return self.constant(list(sizes))
        pieces = [self.constant([s]) if isinstance(s, int) else s for s in sizes]
        return str(self.op("Concat", *pieces, axis=0))

    def reshape(self, x: str, sizes: Sequence[int | str]) -> str:
        return str(self.op("Reshape", x, self.shape(sizes)))

    def cast(self, x: str, dtype: torch.dtype) -> str:
        return str(self.op("Cast", x, to=DTYPES[dtype]))

    def size(self, x: str, first: int, end: int | None = None) -> str:
        """Sizes of the dimensions first..end - 1 (end: first + 1 by default), as a vector."""
        return str(self.op("Shape", x, start=first, end=first + 1 if end is None else end))
