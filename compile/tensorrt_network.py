"""A TensorRT network parsed from ONNX, and the proof that the parser lost nothing of it.

In: an ONNX file and an empty network. Out: the network's inputs, outputs, layer types and
attention layers. Raises `BuildError` for a refused node and for anything the parser ignored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from seekforge.compile.failures import worded
from seekforge.compile.onnx_nodes import OnnxNodes
from seekforge.compile.tensorrt_layers import parse_nodes
from seekforge.compile.tensorrt_messages import parser_failure
from seekforge.runtime.tensorrt_api import import_tensorrt


class ParsedNetwork:
    """`network` filled from `nodes.path`."""

    def __init__(
        self, product: str, network: Any, logger: Any, nodes: OnnxNodes, log_path: Path
    ) -> None:
        trt = import_tensorrt(product)
        self.network = network
        self._nodes = nodes
        self._log_path = log_path
        parser = trt.OnnxParser(network, logger)
        # From a file, not from bytes: external data is looked up beside it.
        if not parser.parse_from_file(str(nodes.path)):
            errors = [parser.get_error(i) for i in range(parser.num_errors)]
            raise parser_failure(product, nodes, errors, log_path)
        self._parser = parser  # owns the weights the network points to
        self._allow_decomposition(trt)
        self._check_nothing_lost()

    @property
    def inputs(self) -> list[Any]:
        return [self.network.get_input(i) for i in range(self.network.num_inputs)]

    @property
    def outputs(self) -> list[Any]:
        return [self.network.get_output(i) for i in range(self.network.num_outputs)]

    @property
    def layer_types(self) -> Counter[str]:
        """Layers by type; the two ends of an attention count as one."""
        types = Counter(layer.type.name.lower() for layer in self._layers())
        types["attention"] = types.pop("attention_input", 0)
        types.pop("attention_output", None)
        return +types

    @property
    def attention(self) -> list[str]:
        """Names of the ONNX nodes that became attention layers."""
        ends = (layer for layer in self._layers() if layer.type.name == "ATTENTION_OUTPUT")
        return [name for layer in ends for name in parse_nodes(layer.metadata)[:1]]

    def _layers(self) -> Iterator[Any]:
        return (self.network.get_layer(i) for i in range(self.network.num_layers))

    def _allow_decomposition(self, trt: Any) -> None:
        """Without a fused kernel the builder may then decompose; otherwise it fails and names no
        node. It changes nothing where a fused kernel exists; `check_fused` names those without."""
        for layer in self._layers():
            if layer.type.name == "ATTENTION_INPUT":
                layer.__class__ = trt.IAttentionInputLayer  # the binding returns the base class
                layer.attention.decomposable = True

    def _check_nothing_lost(self) -> None:
        """Raises unless the outputs depend on every input and every node that carries data."""
        reached, dead = self._reached()
        unused = [tensor.name for tensor in self.inputs if tensor.name not in reached]
        dropped = sorted(dead & self._nodes.carrying_data)
        if not unused and not dropped:
            return
        what = [f"input {name!r}{_read_by(self._nodes, name)}" for name in unused]
        for name in dropped:
            outputs = self._nodes.by_name[name].output
            what.append(f"{self._nodes.describe(name)}{_read_by(self._nodes, *outputs)}")
        raise worded(
            f"{self._nodes.path}: TensorRT ignores {'; '.join(what)}",
            "no output of the parsed network depends on it: the engine would compute something "
            "else",
            "remove it from the graph, or lower what reads it in a form TensorRT uses",
            self._nodes.chain(dropped[0]) if dropped else (),
            log=self._log_path,
        )

    def _reached(self) -> tuple[set[str], set[str]]:
        """Tensors the outputs depend on; ONNX nodes all of whose layers they do not depend on."""
        layers = list(self._layers())
        maker = {
            layer.get_output(i).name: layer for layer in layers for i in range(layer.num_outputs)
        }
        reached: set[str] = set()
        wanted = [tensor.name for tensor in self.outputs]
        while wanted:
            name = wanted.pop()
            if name in reached:
                continue
            reached.add(name)
            if (layer := maker.get(name)) is not None:
                tensors = (layer.get_input(i) for i in range(layer.num_inputs))
                wanted.extend(tensor.name for tensor in tensors if tensor is not None)
        alive, dead = set[str](), set[str]()
        for layer in layers:
            used = any(layer.get_output(i).name in reached for i in range(layer.num_outputs))
            (alive if used else dead).update(parse_nodes(layer.metadata))
        return reached, dead - alive


def _read_by(nodes: OnnxNodes, *tensors: str) -> str:
    readers = ", ".join(map(nodes.describe, nodes.readers(*tensors)))
    return f", read by {readers}" if readers else ", which no node reads"
