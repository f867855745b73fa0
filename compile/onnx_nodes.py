"""What an ONNX file says about its own nodes: names, source lines, liveness, external data.

Used to word a backend's refusal in the user's terms. Reads the graph only, never the weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import onnx

from seekforge.kernels.errors import BuildError

# torch's exporter keeps the Python stack that made a node under this key, innermost frame last, and
# the name of the node of its own graph under the other.
_STACK_KEY = "pkg.torch.onnx.stack_trace"
FX_KEY = "pkg.torch.onnx.fx_node"
_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<func>\S+))?\n?(?P<code>.*)'
)
_SHAPE_OPS = ("Shape", "Size")


@dataclass(frozen=True)
class OnnxNodes:
    """The nodes of one ONNX file, by name. Raises `BuildError` where the file cannot be read."""

    path: Path

    @cached_property
    def model(self) -> onnx.ModelProto:
        try:
            return onnx.load(self.path, load_external_data=False)
        except MemoryError:
            raise
        except Exception as error:  # onnx raises protobuf's own types
            raise BuildError(
                f"{self.path}: not a readable ONNX model ({error}); export it again"
            ) from None

    @cached_property
    def nodes(self) -> list[onnx.NodeProto]:
        """All nodes in order; those of a branch or a loop's body before the node that has it."""
        return list(_flattened(self.model.graph))

    @cached_property
    def by_name(self) -> dict[str, onnx.NodeProto]:
        return {node.name: node for node in self.nodes if node.name}

    def find(self, name: str, index: int = -1) -> onnx.NodeProto | None:
        """By name, else by position in the graph, else None."""
        if name in self.by_name or not 0 <= index < len(self.model.graph.node):
            return self.by_name.get(name)
        node: onnx.NodeProto = self.model.graph.node[index]
        return node

    def describe(self, name: str, index: int = -1) -> str:
        """`node 'x' (Attention), from modeling_llama.py:294 in forward: attn = …`."""
        node = self.find(name, index)
        if node is None:
            return f"node {name!r}"
        line = source_line(node)
        return f"node {node.name!r} ({node.op_type})" + (f", from {line}" if line else "")

    def chain(self, name: str, index: int = -1) -> list[str]:
        """Where a node comes from: [source line, FX node, ONNX node], without what is unknown."""
        node = self.find(name, index)
        if node is None:
            return [f"ONNX node {name!r}"] if name else []
        line = source_line(node)
        made = [f"FX node {p.value}" for p in node.metadata_props if p.key == FX_KEY]
        return [*([line] if line else []), *made, f"ONNX node {node.name!r} ({node.op_type})"]

    def mentioned(self, text: str) -> list[str]:
        """Names of this file's nodes that occur in a backend's message, in order of appearance."""
        words = (word.strip(".,:;()[]{}'\"") for word in re.split(r"[\s]+|\.\.\.|[\[\]{}()]", text))
        return list(dict.fromkeys(word for word in words if word in self.by_name))

    @cached_property
    def carrying_data(self) -> set[str]:
        """Names of live nodes whose value depends on input *data*, not on shapes alone.

        A backend may drop the others (it folds shape arithmetic), but none of these.
        """
        graph = self.model.graph
        tensors = {value.name for value in graph.input} - {t.name for t in graph.initializer}
        data: set[int] = set()
        for index, node in enumerate(self.nodes):  # ONNX graphs are topologically sorted
            if node.op_type not in _SHAPE_OPS and tensors.intersection(_reads(node)):
                tensors.update(node.output)
                data.add(index)
        wanted, live = {value.name for value in graph.output}, set[str]()
        for index in reversed(range(len(self.nodes))):
            node = self.nodes[index]
            if wanted.intersection(node.output):
                wanted.update(_reads(node))
                if index in data:
                    live.add(node.name)
        return live

    def readers(self, *tensors: str) -> list[str]:
        """Names of the nodes that read one of the tensors."""
        return [n.name for n in self.nodes if set(tensors).intersection(n.input)]

    def dim_names(self, tensor: str) -> list[str]:
        """Names of the dimensions of an input or output; `dim_0` … where ONNX has none."""
        graph = self.model.graph
        value = next(v for v in (*graph.input, *graph.output) if v.name == tensor)
        dims = value.type.tensor_type.shape.dim
        return [dim.dim_param or f"dim_{index}" for index, dim in enumerate(dims)]

    def check_domains(self) -> None:
        """Raises `BuildError` for an operator that is not ONNX's own.

        TensorRT's parser looks at the operator's name only: a `MatMul` of any other domain would
        silently become ONNX's.
        """
        functions = {(function.domain, function.name) for function in self.model.functions}
        for node in self.nodes:
            if node.domain in ("", "ai.onnx") or (node.domain, node.op_type) in functions:
                continue
            raise BuildError(
                f"{self.path}: {self.describe(node.name)} is of domain {node.domain!r}; only "
                "standard ONNX operators can be lowered further: translate it to those of opset 23"
            )

    def check_external_data(self) -> None:
        """Raises `BuildError` unless all weights stored outside are there, beside the model."""
        for tensor in self.model.graph.initializer:
            if tensor.data_location != onnx.TensorProto.EXTERNAL:
                continue
            entry = {item.key: item.value for item in tensor.external_data}
            location = entry.get("location", "")
            where = f"{self.path}: initializer {tensor.name!r} is stored in {location!r}"
            if not location or Path(location).name != location:
                raise BuildError(f"{where}; a bare file name beside the model was expected")
            file = self.path.parent / location
            if not file.is_file():
                raise BuildError(f"{where}, which is missing from {file.parent}; export it again")
            end = int(entry.get("offset", 0)) + int(entry.get("length", 0))
            if end > file.stat().st_size:
                raise BuildError(
                    f"{where} up to byte {end}, but the file has {file.stat().st_size}; "
                    "it was cut or belongs to another model: export it again"
                )


def _subgraphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    return [a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]


def _flattened(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        for inner in _subgraphs(node):
            yield from _flattened(inner)
        yield node


def _reads(node: onnx.NodeProto) -> set[str]:
    """What a node reads: its inputs, and the results of its branches."""
    return {*node.input, *(v.name for inner in _subgraphs(node) for v in inner.output)}


def source_line(node: onnx.NodeProto) -> str | None:
    """The innermost Python line that made the node, as `file:line in function: code`."""
    stacks: Iterable[str] = [p.value for p in node.metadata_props if p.key == _STACK_KEY]
    for text in (*stacks, node.doc_string):
        frames = list(_FRAME.finditer(text))
        if frames:
            file, line, func, code = frames[-1].group("file", "line", "func", "code")
            return (
                f"{file}:{line}"
                + (f" in {func}" if func else "")
                + (f": {code.strip()}" if code.strip() else "")
            )
    return None
