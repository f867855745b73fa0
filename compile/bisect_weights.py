"""The weights of an engine: smoothed without a change of the model, rounded as far as INT4 may, and
in the engine's file as the checkpoint and the passes say.

Smoothing multiplies the columns of what reads an input and divides what makes it, so that before
rounding every reader gives what it gave (times the factors of its own rows, where it makes the
next input). Both sides are run in float32 and compared reader by reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, fx

from seekforge.compile.bisect_nodes import layer_in, layer_of, operator_name
from seekforge.compile.bisect_result import Culprit, Found, row_error
from seekforge.compile.calibration import Calibration
from seekforge.compile.run_graph import run_graph
from seekforge.compile.run_graph_weights import GraphWeights
from seekforge.compile.weights import Source
from seekforge.kernels.int4 import dequantise
from seekforge.kernels.moe_experts import moe_experts
from seekforge.models.awq_groups import scale_groups
from seekforge.models.checkpoint import Checkpoint, tensors_for_parameter
from seekforge.models.module import build_module
from seekforge.passes.linears import LINEAR
from seekforge.passes.program import Program, source_line

# Of a reader's output in float32: a relative error of 1e-3, after as many layers as there are.
SMOOTHED_LIMIT = 1e-6
# |W' - W|^2 / (|W'|^2 + |W|^2) of a tensor: 0.002 to 0.01 are usual (docs/bisect.md).
ROUNDED_LIMIT = 0.05


@dataclass(frozen=True, slots=True)
class _Pair:
    """A reader of a scale group, by the name of its parameter, and the producer of its input."""

    layer: int
    producer: str
    reader: str


def check_smoothing(
    program: Program, calibration: Calibration, sizes: Mapping[str, int],
    inputs: Mapping[str, Tensor],
) -> float:  # fmt: skip
    """The worst share of the limit of any reader. program: as exported; sizes: group sizes of the
    checkpoint's INT4 tensors. Raises Found."""
    checkpoint = calibration.checkpoint
    nodes: dict[str, fx.Node] = {}  # by parameter
    for node in program.graph.nodes:
        if node.target in (LINEAR, moe_experts):
            for source in node.all_input_nodes:
                if source.op == "get_attr":
                    nodes[str(source.target)] = node
    pairs = [pair for pair in _pairs(checkpoint, sizes) if pair.reader in nodes]
    wanted = {nodes[pair.reader].name for pair in pairs}
    wanted |= {str(nodes[pair.reader].all_input_nodes[0].name) for pair in pairs}
    before, after = (
        run_graph(program, read, inputs, wanted, wide=True)
        for read in (checkpoint.read, calibration.read)
    )
    order = {node: at for at, node in enumerate(program.graph.nodes)}
    worst = 0.0
    for pair in sorted(pairs, key=lambda pair: order[nodes[pair.reader]]):
        node = nodes[pair.reader]
        expected = before[node.name]
        rows = _rows(calibration, pair.reader) if node.target is LINEAR else None
        if rows is not None:
            expected = expected * rows
        error = row_error(expected, after[node.name])
        worst = max(worst, error / SMOOTHED_LIMIT)
        if error > SMOOTHED_LIMIT:
            read = node.all_input_nodes[0].name
            raise Found(
                Culprit(
                    step="smoothed",
                    node=node.name,
                    operator=operator_name(node),
                    layer=pair.layer,
                    module=pair.reader.removesuffix(".weight"),
                    source=source_line(node),
                    error=error,
                    limit=SMOOTHED_LIMIT,
                    detail=_folded(calibration, pair),
                    tensors={
                        "reference": expected, "found": after[node.name],
                        f"input.0.{read}": after[read], f"unsmoothed.0.{read}": before[read],
                    },
                )
            )  # fmt: skip
    return worst


def _pairs(checkpoint: Checkpoint, sizes: Mapping[str, int]) -> Iterator[_Pair]:
    spec = checkpoint.spec
    state = build_module(checkpoint.config, torch.float32).state_dict()
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        names = [name.removeprefix(prefix) for name in state if name.startswith(prefix)]
        kept = [n for n in names if tensors_for_parameter(checkpoint, prefix + n)[0] not in sizes]
        for group in scale_groups(spec.model_type, names, kept):
            for reader in group.readers:
                yield _Pair(layer, prefix + group.producer, prefix + reader)


def _rows(calibration: Calibration, parameter: str) -> Tensor | None:
    """What the rows of a parameter are multiplied by."""
    stored = tensors_for_parameter(calibration.checkpoint, parameter)
    rows = [calibration.factors[n].rows if n in calibration.factors else None for n in stored]
    if len(rows) != 1:
        return None
    return rows[0]


def _folded(calibration: Calibration, pair: _Pair) -> str:
    """What the weights themselves say: the producer's rows times the reader's columns."""
    made, read = pair.producer, pair.reader
    names = [tensors_for_parameter(calibration.checkpoint, name)[0] for name in (made, read)]
    factors = [calibration.factors.get(name) for name in names]
    rows = factors[0].rows if factors[0] is not None else None
    columns = factors[1].columns if factors[1] is not None else None
    told = f"the scale of {read} is not folded into {made}: "
    if columns is not None and rows is None:
        low, high = float(columns.min()), float(columns.max())
        return told + f"columns are multiplied by {low:.3g} to {high:.3g}, rows by nothing"
    if columns is not None and rows is not None and rows.numel() == columns.numel():
        product = rows.flatten() * columns.flatten()
        low, high = float(product.min()), float(product.max())
        return told + f"rows times columns are {low:.3g} to {high:.3g}, expected 1"
    return told + "the reader's output is not what it is without smoothing"


def decoded(source: Source, sizes: Mapping[str, int], symmetric: bool, dtype: torch.dtype) -> (
    Callable[[str], Tensor]
):  # fmt: skip
    """Reads a checkpoint tensor as an INT4 engine has it: what its rounded form decodes to."""

    def read(name: str) -> Tensor:
        if name not in sizes:
            return source.read(name)
        return dequantise(source.int4(name, sizes[name], symmetric, dtype), dtype)

    return read


def check_rounding(
    source: Source, read: Callable[[str], Tensor], sizes: Mapping[str, int]
) -> float:
    """The worst share of the limit of any INT4 tensor against the one it was rounded from. Raises
    Found."""
    worst = 0.0
    for name in sizes:
        before, after = source.read(name).double(), read(name).double()
        size = float(before.square().sum() + after.square().sum())
        error = float((before - after).square().sum()) / (size or 1.0)
        worst = max(worst, error / ROUNDED_LIMIT)
        if not error <= ROUNDED_LIMIT:
            raise Found(
                Culprit(
                    step="rounded",
                    node=name,
                    operator="INT4",
                    layer=layer_in(name),
                    module=name.removesuffix(".weight"),
                    source="",
                    error=error,
                    limit=ROUNDED_LIMIT,
                    detail="what the rounded weight decodes to is too far from the weight",
                    tensors={"reference": before.float(), "found": after.float()},
                )
            )
    return worst


def check_stored(program: Program, weights: GraphWeights, path: Path) -> int:
    """Compares the engine's weights file with what the passes say it holds, bit for bit; returns
    the number of tensors. Raises Found."""
    with safe_open(path, framework="pt") as file:
        there = set(file.keys())
        for name in sorted(program.weights):
            expected = weights.whole(program, name, False)
            found = file.get_tensor(name) if name in there else torch.empty(0)
            if not _same(expected, found):
                raise Found(_stored_culprit(program, name, expected, found))
    return len(program.weights)


def _same(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    x, y = (t.contiguous().flatten().view(torch.uint8) for t in (a, b))
    return torch.equal(x, y)


def _stored_culprit(program: Program, name: str, expected: Tensor, found: Tensor) -> Culprit:
    node: Any = next(
        (n for n in program.graph.find_nodes(op="get_attr") if str(n.target) == name), None
    )
    reader = next(iter(node.users), None) if node is not None else None
    made = ", ".join(program.weights[name].sources[:4]) or "computed values"
    missing = "it is missing" if not found.numel() else "other bytes"
    return Culprit(
        step="weights",
        node=name,
        operator=operator_name(reader) if reader is not None else "",
        layer=layer_in(name) if reader is None else layer_of(reader),
        module=name.rpartition(".")[0],
        source=source_line(reader) if reader is not None else "",
        error=row_error(expected, found),
        limit=0.0,
        detail=f"the engine's weights file has {missing} for this tensor, made of {made}",
        tensors={"reference": expected, "found": found},
    )
