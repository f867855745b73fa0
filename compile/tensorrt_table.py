"""Each compiled kernel of a TensorRT engine with the operators and source lines it came from.

The builder's listing names ONNX nodes (tensorrt_layers.py); an ONNX node remembers its FX node and
the transformers line behind it; the program knows the FX node's operator and module. Joined here,
once, as plain data for the manifest:

    sources   ["llama/modeling_llama.py:258 in forward: attn_output, … = attention_interface("]
    nodes     [{"onnx", "operator", "layer", "source": index into sources}], None where not known;
              each ONNX node that a kernel names
    profiles  [{"kernels": [{"name", "kind", "nodes": [index into nodes]}],
                "operators", "found", "missing": [{"node", "operator", "source"}], "views"}]

`operators` counts the graph's nodes that compute on data, `found` those that some kernel of the
profile names, `missing` are the others. `views` counts the nodes that no kernel names and that only
move or reinterpret data: the builder folds them into how a kernel reads.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import fx

from seekforge.compile.account import VIEWS
from seekforge.compile.account import operator_name as operator
from seekforge.compile.onnx_nodes import FX_KEY, OnnxNodes, source_line
from seekforge.compile.tensorrt_layers import CompiledLayer
from seekforge.kernels.errors import InputError
from seekforge.passes.program import Program, module_path
from seekforge.passes.program import source_line as fx_line

_FOLDERS = re.compile(r"^\S*/(?=[^/\s]+/[^/\s]+:\d)")


def layer_table(
    compiled: Sequence[CompiledLayer], nodes: OnnxNodes, program: Program, num_profiles: int
) -> dict[str, Any]:
    """The table above; `nodes` is the ONNX file that `program` was written to."""
    graph = {node.name: node for node in program.graph.nodes}
    origin = {
        name: graph[prop.value]
        for name, node in nodes.by_name.items()
        for prop in node.metadata_props
        if prop.key == FX_KEY and prop.value in graph
    }
    data = [name for name in nodes.by_name if name in nodes.carrying_data and name in origin]
    carrying = list(dict.fromkeys(origin[name] for name in data))
    index: dict[str, int] = {}
    profiles = [
        _profile([layer for layer in compiled if layer.profile == i], origin, carrying, index)
        for i in range(num_profiles)
    ]
    sources: dict[str, int] = {}
    described = [_described(name, nodes, origin.get(name), sources) for name in index]
    return {"sources": list(sources), "nodes": described, "profiles": profiles}


def _profile(
    kernels: Sequence[CompiledLayer],
    origin: dict[str, fx.Node],
    carrying: Sequence[fx.Node],
    index: dict[str, int],
) -> dict[str, Any]:
    named = {origin[name] for layer in kernels for name in layer.nodes if name in origin}
    unnamed = [node for node in carrying if node not in named]
    missing = [node for node in unnamed if not _only_moves(node)]
    computing = [node for node in carrying if not _only_moves(node)]
    return {
        "kernels": [
            {
                "name": layer.name, "kind": layer.kind,
                "nodes": [index.setdefault(name, len(index)) for name in layer.nodes],
            }
            for layer in kernels
        ],
        "operators": len(computing),
        "found": len(computing) - len(missing),
        "missing": [
            {"node": node.name, "operator": operator(node), "source": fx_line(node)}
            for node in missing
        ],
        "views": len(unnamed) - len(missing),
    }  # fmt: skip


def _only_moves(node: fx.Node) -> bool:
    return operator(node) in (*VIEWS, "getitem")


def _described(
    name: str, nodes: OnnxNodes, node: fx.Node | None, sources: dict[str, int]
) -> dict[str, Any]:
    made = nodes.find(name)
    line = _FOLDERS.sub("", (source_line(made) or "") if made is not None else "")
    return {
        "onnx": name,
        "operator": operator(node) if node is not None else None,
        "layer": module_path(node) if node is not None else None,
        "source": sources.setdefault(line, len(sources)) if line else None,
    }


def format_tables(described: dict[str, Any]) -> str:
    """The tables of what `inspect` describes. Raises InputError where no engine has one."""
    tables = {
        name: table
        for name, engine in described.get("engines", {}).items()
        if (table := (engine["layers"] or {}).get("table")) is not None
    }
    if not tables:
        raise InputError(
            "--layers: no TensorRT engine here, or one of an older seekforge; give the directory "
            "of one that was built with --backend tensorrt-rtx or tensorrt"
        )
    return "\n".join(line for name in tables for line in [name, *format_table(tables[name])])


def format_table(table: dict[str, Any]) -> list[str]:
    """Each kernel: kind and name, its operators, then the modules and source lines behind it."""
    lines = []
    for number, profile in enumerate(table["profiles"]):
        share = profile["found"] / profile["operators"] if profile["operators"] else 1.0
        lines.append(
            f"  profile {number}: {len(profile['kernels'])} kernels name {profile['found']} of "
            f"{profile['operators']} operators that compute ({share:.0%}); {profile['views']} "
            "views are in none"
        )
        for node in profile["missing"]:
            lines.append(f"    in no kernel: {node['node']} ({node['operator']}) {node['source']}")
        for kernel in profile["kernels"]:
            nodes = [table["nodes"][i] for i in kernel["nodes"]]
            operators = ", ".join(dict.fromkeys(n["operator"] for n in nodes if n["operator"]))
            lines.append(f"    {kernel['kind']:<15} {kernel['name']}")
            if operators:
                lines.append(f"      {operators}")
            for layer, source in dict.fromkeys((n["layer"], n["source"]) for n in nodes):
                if source is not None:
                    lines.append(f"      {layer}  {table['sources'][source]}")
    return lines
