"""What a model would cost, from its configuration alone: `seekforge inspect config.json`.

In: a configuration. Out: plain data: parameters, bytes of weights and cache, what each pass did
beside what was expected of it, and the operators that are left. The graph is exported and
transformed on the meta device, so the 671 billion parameters of DeepSeek-V3 need no more than their
names. Reads no weights.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx
from transformers import PreTrainedConfig

from seekforge.compile.export import export_module
from seekforge.compile.steps import Steps
from seekforge.models.families import expected_fusions
from seekforge.models.module import build_module
from seekforge.models.spec import ModelSpec
from seekforge.passes.pipeline import run_pipeline
from seekforge.passes.program import Program, module_path
from seekforge.passes.rule import PassResult

DTYPE = torch.bfloat16  # the deployment dtype that sizes are given in
# These only describe other values anew: no kernel runs for them where the data is contiguous.
VIEWS = (
    "aten.view", "aten._unsafe_view", "aten.reshape", "aten.flatten.using_ints", "aten.squeeze.dim",
    "aten.unsqueeze", "aten.transpose.int", "aten.permute", "aten.expand", "aten.slice.Tensor",
    "aten.select.int", "aten.split.Tensor", "aten.split_with_sizes", "aten.sym_size.int",
)  # fmt: skip
LAYER = re.compile(r"\b(?:layers|h|blocks)\.(\d+)\b")  # as transformers' models name them
LENGTH = 2048  # rows of the RoPE table, as `build` makes them by default


def account(config: PreTrainedConfig, steps: Steps | None = None) -> dict[str, Any]:
    """The model's sizes and its graph after all passes, in ragged form.

    Keys beyond those of `graph_account`: kv_token_bytes (all layers), weight_bytes by dtype and
    steps (seconds and peak memory). Raises `CheckpointError` for a configuration that is not
    supported and `BuildError` if export or a pass fails; a fusion that fires too rarely is shown.
    """
    spec = ModelSpec.from_config(config)
    steps = steps or Steps(f"inspect {spec.model_type} {spec.num_layers}x{spec.hidden_size}")
    length = min(LENGTH, spec.max_position_embeddings)
    with steps.step("export"):
        module = build_module(config, DTYPE)
        names: dict[int, str] = {}  # a tied tensor has two names and is stored once
        stored = module.state_dict(keep_vars=True).items()
        sources = {name: (names.setdefault(id(tensor), name),) for name, tensor in stored}
        program = export_module(module, sources, length)
    exported = len(program.graph.nodes)
    with steps.step("passes"):
        results, _ = run_pipeline(program, "ragged", length, None)
    return {
        "kv_token_bytes": kv_token_bytes(spec, DTYPE),
        "weight_bytes": weight_bytes(program),
        "nodes_exported": exported,
        "nodes": len(program.graph.nodes),
        **graph_account(spec, program, results),
        "steps": steps.done,
    }


def kv_token_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes that one token takes in the caches of all layers."""
    return spec.num_layers * dtype.itemsize * sum(map(math.prod, spec.kv_pools.values()))


def weight_bytes(program: Program) -> dict[str, int]:
    """Bytes of the program's weights by dtype, as an engine would store them."""
    found: Counter[str] = Counter()
    for name in program.weights:
        tensor = program.tensor(name)
        found[str(tensor.dtype).removeprefix("torch.")] += tensor.nbytes
    return dict(found.most_common())


def graph_account(spec: ModelSpec, program: Program, results: list[PassResult]) -> dict[str, Any]:
    """passes: see `account_passes`. layers: one entry for each run of layers with the same
    operators, {"layers": "3-59", "compute": 15, "operators": {name: count}, "views": {name:
    count}}; what belongs to no layer comes last, as "outside"."""
    return {
        "passes": account_passes(results, expected_fusions(spec)),
        "layers": operators_by_layer(program, spec.num_layers),
    }


def account_passes(
    results: Sequence[PassResult], expected: Mapping[str, int]
) -> list[dict[str, Any]]:
    """The fields of each `PassResult` and "expected": how often it must fire, or None where nothing
    is known (passes that tidy up, models without expectations)."""
    return [dataclasses.asdict(r) | {"expected": expected.get(r.name)} for r in results]


def operators_by_layer(program: Program, num_layers: int) -> list[dict[str, Any]]:
    """Calls of each layer, as `graph_account` says."""
    counts = calls_by_layer(program, num_layers)
    runs: list[dict[str, Any]] = []
    for operators, group in itertools.groupby(range(num_layers), key=lambda i: counts[i]):
        indices = list(group)
        layers = str(indices[0]) if len(indices) == 1 else f"{indices[0]}-{indices[-1]}"
        runs.append(_run(layers, operators))
    return [*runs, _run("outside", counts[num_layers])]


def calls_by_layer(program: Program, num_layers: int) -> list[Counter[str]]:
    """Operators of each layer, and in the last place of what belongs to none. Picking one result of
    an operator that has several is no call."""
    counts: list[Counter[str]] = [Counter() for _ in range(num_layers + 1)]
    for node, layer in layer_of_nodes(program, num_layers).items():
        if node.op == "call_function" and node.target is not getitem:
            counts[layer][operator_name(node)] += 1
    return counts


def layer_of_nodes(program: Program, num_layers: int) -> dict[fx.Node, int]:
    """The layer of each node; num_layers where it belongs to none."""
    home: dict[fx.Node, int] = {}
    for node in program.graph.nodes:
        path = module_path(node)
        layer = LAYER.search(path)
        home[node] = int(layer[1]) if layer else num_layers
        if not path:  # inserted by a pass: belongs where its input does
            homes = [home[source] for source in node.all_input_nodes if source.op != "placeholder"]
            home[node] = min(homes, default=num_layers)
    return home


def operator_name(node: fx.Node) -> str:
    """`rope` for seekforge::rope, `aten.view` for an operator of torch."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removesuffix(".default").removeprefix("seekforge.")
    return getattr(target, "__name__", str(target))


def _run(layers: str, counts: Counter[str]) -> dict[str, Any]:
    operators = {name: count for name, count in counts.most_common() if name not in VIEWS}
    views = {name: count for name, count in counts.most_common() if name in VIEWS}
    compute = sum(operators.values())
    return {"layers": layers, "compute": compute, "operators": operators, "views": views}
