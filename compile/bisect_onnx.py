"""An ONNX model against the graph it was made from, operator by operator, in one run.

In: the final graph with its values in one step, and the model as the engine has it. The model is
cut at every value that the graph has, too: the value becomes an output, and whoever reads it reads
the graph's own value instead, as an input. So each operator's translation is judged by itself, on
the right inputs. ONNX Runtime's optimiser does not reach over the cuts: what goes wrong there alone
shows when the engine is run as it is (bisect_engine.py).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import helper
from safetensors import safe_open
from torch import Tensor, fx

from seekforge.compile.bisect_nodes import culprit_at
from seekforge.compile.bisect_result import Culprit, Found, limit_of, row_error
from seekforge.compile.onnx import translated
from seekforge.compile.onnx_builder import DTYPES
from seekforge.compile.onnx_nodes import FX_KEY
from seekforge.kernels.moe_route import moe_route
from seekforge.passes.program import Program

REFERENCE = "reference/"  # of an input that takes the place of a value


class CutModel:
    """A model cut at the graph's values; `judge` runs it in one step. model: path of the ONNX file,
    beside its weights. target: the backend it was written for. values: of one step, by node."""

    def __init__(
        self, program: Program, model: Path, weights: Path, target: str,
        values: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        self.program = program
        self.weights = weights
        self.model = onnx.load(model, load_external_data=False)
        self.made_by = {
            name: key for node, key in _with_keys(self.model.graph) for name in node.output
        }
        self.cut = self._values(target, values)
        self.session = self._open(values)

    def _values(self, target: str, values: Mapping[str, Tensor]) -> dict[str, fx.Node]:
        """{name of an ONNX value: the graph's node that has it}, in the graph's order.

        Names come from translating the graph again. Where the model was made by another
        translation of a node, it is the one value of it that others read.
        """
        left = self._read_elsewhere()
        found: dict[str, fx.Node] = {}
        for node, value in translated(self.program, self.weights, target).values.items():
            if not isinstance(value, str) or node.name not in values:
                continue
            if value not in left:
                others = [name for name in left if self.made_by[name] == node.name]
                if len(others) != 1:
                    continue
                (value,) = others
            found.setdefault(value, node)
        return found

    def _read_elsewhere(self) -> set[str]:
        """The values that another of the graph's nodes reads than the one they were made for."""
        found = {value.name for value in self.model.graph.output if value.name in self.made_by}
        for node, key in _with_keys(self.model.graph):
            found.update(n for n in node.input if self.made_by.get(n, key) != key)
        return found

    def judge(self, inputs: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> float:
        """The worst share of its limit that a value of one step comes to. inputs: the graph's.

        Raises Found.
        """
        feeds = dict(inputs) | {REFERENCE + name: values[n.name] for name, n in self.cut.items()}
        found = self._run(feeds, {name: values[node.name] for name, node in self.cut.items()})
        by_node = {node.name: found[name] for name, node in self.cut.items()}
        worst = 0.0
        for name, node in self.cut.items():
            reference, value = (ordered(node, given) for given in (values, by_node))
            error, limit = row_error(reference, value), limit_of(value)
            worst = max(worst, error / limit if limit else error)
            if error > limit:
                raise Found(self.culprit(node, name, reference, value, {**values, **inputs}))
        return worst

    def _open(self, values: Mapping[str, Tensor]) -> Any:
        """The model with cuts, in ONNX Runtime."""
        import onnxruntime

        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        for node, key in _with_keys(model.graph):
            for index, name in enumerate(node.input):
                if name in self.cut and self.made_by[name] != key:
                    node.input[index] = REFERENCE + name
        known = {value.name for value in model.graph.output}
        for name, fx_node in self.cut.items():
            value = values[fx_node.name]
            kind, dims = DTYPES[value.dtype], [None] * value.dim()
            model.graph.input.append(helper.make_tensor_value_info(REFERENCE + name, kind, dims))
            if name not in known:
                model.graph.output.append(helper.make_tensor_value_info(name, kind, None))
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # inputs that nothing reads are meant to be there
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(self.weights.parent)
        )
        return onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    def _run(self, feeds: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        binding: Any = self.session.io_binding()
        held = []  # what is bound must live until the run is over
        for entry in self.session.get_inputs():
            held.append(feeds[entry.name].contiguous())
            binding.bind_input(entry.name, *_place(held[-1]))
        results = {name: torch.empty_like(value).contiguous() for name, value in like.items()}
        for entry in self.session.get_outputs():
            if entry.name in results:
                binding.bind_output(entry.name, *_place(results[entry.name]))
            else:
                binding.bind_output(entry.name, "cpu")
        self.session.run_with_iobinding(binding)
        return results

    def culprit(
        self, node: fx.Node, value: str, reference: Tensor, found: Tensor,
        given: Mapping[str, Tensor], how: str = "on the right inputs",
    ) -> Culprit:  # fmt: skip
        """The node that an ONNX value was made for. given: values by name of node or input."""
        key = self.made_by[value]
        made = next(n for n in self.program.graph.nodes if n.name == key)
        nodes = [n for n, k in _with_keys(self.model.graph) if k == key]
        inputs = {}
        for index, source in enumerate(made.all_input_nodes):
            if source.name in given:
                inputs[f"input.{index}.{source.name}"] = given[source.name]
            elif source.op == "get_attr":
                with safe_open(self.weights, framework="pt") as file:
                    inputs[f"input.{index}.{source.name}"] = file.get_tensor(str(source.target))
        detail = (
            f"its ONNX translation gives another value ({value}) {how}: "
            f"{', '.join(f'{n.op_type} {n.name}' for n in nodes[:6])}"
        )
        return culprit_at("lowered", made, reference, found, detail, inputs)


def ordered(node: fx.Node, values: Mapping[str, Tensor]) -> Tensor:
    """The node's value. A token's experts and their weights may stand in any order: by number."""
    value = values[node.name]
    source: Any = node.args[0] if node.target is operator.getitem else None
    if source is None or source.target is not moe_route:
        return value
    chosen = next((u.name for u in source.users if u.args[1] == 1 and u.name in values), None)
    return value if chosen is None else value.gather(-1, values[chosen].argsort(-1))


def _with_keys(graph: onnx.GraphProto) -> Iterator[tuple[onnx.NodeProto, str]]:
    """Every node with the name of the graph's node it was made for, those of bodies too."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _with_keys(attribute.g)
        yield node, next((p.value for p in node.metadata_props if p.key == FX_KEY), "")


def _place(tensor: Tensor) -> Sequence[Any]:
    """Arguments of bind_input and bind_output after the name."""
    return "cpu", 0, DTYPES[tensor.dtype], list(tensor.shape), tensor.data_ptr()
