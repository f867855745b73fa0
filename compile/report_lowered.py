"""What a backend made of the final graph: ONNX nodes, TensorRT's kernels, Inductor's calls.

In: a finished engine and the program it was made from. Out: `Lowered` items in execution order,
each with the names of the graph's nodes behind it.
"""

from __future__ import annotations

import re
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from torch import fx

from seekforge.compile.account import LAYER, operator_name
from seekforge.compile.inductor import MODEL_NAME
from seekforge.compile.lower import MODEL_NAME as ONNX_NAME
from seekforge.compile.onnx_nodes import FX_KEY
from seekforge.compile.report_graphs import Lowered
from seekforge.kernels.rope import rope
from seekforge.kernels.swiglu import swiglu
from seekforge.passes.linears import LINEAR
from seekforge.passes.program import Program, module_path
from seekforge.runtime.manifest import Manifest

# Before a library call or an operator's; Inductor writes none before its own loops.
_COMMENT = re.compile(
    r"// .*Source Nodes: \[(?P<nodes>[^]]*)\], Original ATen: \[(?P<aten>[^]]*)\]"
)
_CALL = re.compile(
    r"\b(?:(?P<loop>(?:cpp|triton_\w+?)_fused_\w+)"
    r"|aoti_torch_(?:cpu|cuda)_(?P<library>\w+?)"
    r"|(?P<operator>aoti_torch_proxy_executor_call_function))\((?P<args>.*)"
)
# Operators that are inlined as torch code and take no weight of their layer: what gives the loop
# away, in its name or its arguments.
_INLINED = {swiglu: "silu", rope: "rope_cos"}


def lowered_items(
    folder: Path, manifest: Manifest, program: Program
) -> list[tuple[str, list[Lowered]]]:
    """What the engine in `folder` consists of, under titles; empty where nothing can be read."""
    table = (manifest.layers or {}).get("table")
    if manifest.backend == "inductor":
        return [("Inductor's code", inductor_items(folder / MODEL_NAME, program))]
    if manifest.backend == "onnxruntime":
        model = onnx.load(folder / ONNX_NAME, load_external_data=False)
        return [("ONNX nodes", onnx_items(model))]
    return [] if table is None else tensorrt_items(table, program)


def onnx_items(model: onnx.ModelProto) -> list[Lowered]:
    """The nodes of the graph; those inside a branch or a loop count as the node that has it."""
    items = []
    for node in model.graph.node:
        made_from = tuple(p.value for p in node.metadata_props if p.key == FX_KEY)
        domain = "" if node.domain in ("", "ai.onnx") else f"{node.domain}."
        items.append(Lowered(node.name, domain + node.op_type, made_from))
    return items


def tensorrt_items(table: Mapping[str, Any], program: Program) -> list[tuple[str, list[Lowered]]]:
    """(title, kernels) for each profile of a manifest's layer table (tensorrt_table.py), which
    knows operators and modules of the graph's nodes, but not their names."""
    named: dict[tuple[str, str], list[str]] = {}
    for node in program.graph.nodes:
        if node.op == "call_function":
            named.setdefault((module_path(node), operator_name(node)), []).append(node.name)
    behind = [named.get((node["layer"], node["operator"]), ()) for node in table["nodes"]]
    found = []
    for number, profile in enumerate(table["profiles"]):
        items = [
            Lowered(
                kernel["name"], kernel["kind"],
                tuple(dict.fromkeys(name for at in kernel["nodes"] for name in behind[at])),
            )
            for kernel in profile["kernels"]
        ]  # fmt: skip
        found.append((f"TensorRT kernels, profile {number}", items))
    return found


def inductor_items(package: Path, program: Program) -> list[Lowered]:
    """The calls in the code that Inductor generated for `package`, in order; empty where there is
    none to read. What ties them to the graph: the weights they take, the number of an operator (the
    third `paged_attention` there is the third here), and for loops without weights their order."""
    calls = list(_calls(package))
    readers = _weight_readers(program)
    numbered = _operator_numbers(program)
    inlined: dict[int, str] = {}
    for target, mark in _INLINED.items():
        nodes, marked = program.nodes(target), [c for c in calls if c.loop and c.has(mark)]
        if len(nodes) == len(marked):
            inlined |= {id(call): node.name for call, node in zip(marked, nodes, strict=True)}
    items: list[Lowered] = []
    layer: int | None = None
    for call in calls:
        taken = [node for word in call.words for node in readers.get(word, ())]
        products = [node for node in taken if node.target is LINEAR]
        others = [node for node in taken if node.target is not LINEAR]
        names = [node.name for node in (others if call.loop else products or others)]
        names += [numbered[n] for n in call.nodes if n.startswith(call.operator) and n in numbered]
        names += [inlined[id(call)]] if id(call) in inlined else []
        layer = next((at for word in call.words if (at := _layer(word)) is not None), layer)
        items.append(Lowered(call.name, call.kind, tuple(dict.fromkeys(names)), layer))
    return items


@dataclass(frozen=True, slots=True)
class _Call:
    """words: of its arguments. nodes: of the exported graph, that the comment before it names."""

    name: str
    kind: str
    words: tuple[str, ...]
    nodes: tuple[str, ...]

    @property
    def loop(self) -> bool:
        return self.kind == "loop"

    @property
    def operator(self) -> str:
        """`paged_attention`, which its nodes' names start with; no name starts with a space."""
        return self.name.partition(".")[2] if self.kind == "operator call" else " "

    def has(self, mark: str) -> bool:
        return mark in self.name or mark in self.words


def _calls(package: Path) -> Iterator[_Call]:
    with zipfile.ZipFile(package) as archive:
        code = [name for name in archive.namelist() if name.endswith(".wrapper.cpp")]
        lines = archive.read(code[0]).decode(errors="replace").split("\n") if code else []
    start = next((at for at, line in enumerate(lines) if "::run_impl(" in line), len(lines))
    nodes: tuple[str, ...] = ()
    aten = ""
    for line in lines[start:]:
        if comment := _COMMENT.search(line):
            nodes, aten = tuple(comment["nodes"].split(", ")), comment["aten"]
        found = _CALL.search(line)
        if found is None:
            continue
        words = tuple(re.findall(r"\w+", found["args"]))
        if found["loop"]:
            yield _Call(found["loop"], "loop", words, ())
        elif found["library"]:
            yield _Call(found["library"], "library call", words, nodes)
        else:
            ours = [name for name in aten.split(", ") if name.startswith("seekforge.")]
            yield _Call((ours or ["seekforge.operator"])[-1], "operator call", words, nodes)


def _layer(word: str) -> int | None:
    layer = LAYER.search(re.sub(r"_(layers|h|blocks)_(\d+)_", r".\1.\2.", word))
    return int(layer[1]) if layer else None


def _weight_readers(program: Program) -> dict[str, list[fx.Node]]:
    """Weights as C++ names to the nodes that read them."""
    return {
        re.sub(r"\W", "_", str(node.target)): list(node.users)
        for node in program.graph.find_nodes(op="get_attr")
        if not str(node.target).startswith("rope.")  # read by all layers
    }


def _operator_numbers(program: Program) -> dict[str, str]:
    """Names that a new export gives (`linear`, `linear_1`, …) to the names of our nodes."""
    seen: Counter[str] = Counter()
    names: dict[str, str] = {}
    for node in program.graph.nodes:
        if node.op == "call_function":
            base = operator_name(node).removeprefix("aten.").partition(".")[0]
            names[f"{base}_{seen[base]}" if seen[base] else base] = node.name
            seen[base] += 1
    return names
