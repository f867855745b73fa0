"""What a build will meet, from configuration and headers alone: one layer of each kind is exported
on the meta device and counted as often as the model has it.

In: a checkpoint directory or a config.json, and what is to be built. Out: `Facts` of the whole
model. Reads no weights; the 61 layers of DeepSeek-V3 cost as much as its first four.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx
from transformers import PreTrainedConfig

from seekforge.compile.account import calls_by_layer
from seekforge.compile.export import DTYPES, export_checkpoint, export_module
from seekforge.compile.weights import write_order
from seekforge.kernels.errors import CheckpointError
from seekforge.kernels.int4_linear import int4_linear
from seekforge.kernels.int4_moe_experts import int4_moe_experts
from seekforge.kernels.moe_experts import moe_experts
from seekforge.kernels.shared_experts import int4_moe_shared_experts, moe_shared_experts
from seekforge.models.checkpoint import EXPERTS as STACKED
from seekforge.models.checkpoint import Checkpoint, open_checkpoint
from seekforge.models.config import parse_config
from seekforge.models.module import build_module
from seekforge.models.moe import read_experts
from seekforge.models.shards import TensorInfo, has_weights
from seekforge.models.spec import ModelSpec
from seekforge.passes.int4 import Int4Options
from seekforge.passes.kv_cache import GraphInput
from seekforge.passes.pipeline import run_pipeline
from seekforge.passes.program import Program, module_path
from seekforge.passes.rule import PassResult

LAYER = re.compile(r"\blayers\.(\d+)\.")
EXPERTS = (moe_experts, int4_moe_experts, moe_shared_experts, int4_moe_shared_experts)
INT4 = (int4_linear, int4_moe_experts, int4_moe_shared_experts)


@dataclass(frozen=True, slots=True)
class Subject:
    """What is asked about. checkpoint: None for a configuration without weights."""

    path: Path
    config: PreTrainedConfig
    spec: ModelSpec
    checkpoint: Checkpoint | None

    @property
    def stored_bytes(self) -> int:
        """Bytes of the checkpoint's tensors; of a configuration, as its own dtype has them."""
        if self.checkpoint is not None:
            return sum(shard.size for shard in self.checkpoint.shards)
        return self.spec.parameters * self.stored_dtype.itemsize

    @property
    def stored_dtype(self) -> torch.dtype:
        dtype = getattr(self.config, "dtype", None)
        return dtype if isinstance(dtype, torch.dtype) else torch.bfloat16


@dataclass(frozen=True, slots=True)
class Facts:
    """Counts of the whole model. Bytes: `weights` of the engine's weights file; `embedding` of its
    largest weight; `pieces` the most that writing them holds at once.

    exported, nodes: calls before and after the passes. experts: layers with a mixture; int4: INT4
    operators.
    """

    exported: int
    nodes: int
    experts: int
    int4: int
    weights: int
    embedding: int
    pieces: int


@dataclass(frozen=True, slots=True)
class Examined:
    """facts, and the graph of one layer of each kind after the passes, for what grows with steps
    and not with layers."""

    facts: Facts
    program: Program
    inputs: list[GraphInput]
    passes: list[PassResult]


def open_subject(path: Path) -> Subject:
    """A checkpoint directory, a folder with only a config.json, or such a file. Raises
    CheckpointError for what is missing or not supported."""
    file = path if path.suffix == ".json" else path / "config.json"
    if file == path or (file.is_file() and not has_weights(path)):
        if not file.is_file():
            raise CheckpointError(f"{file} is not there; give a checkpoint or a config.json")
        config = parse_config(file)
        return Subject(path, config, ModelSpec.from_config(config), None)
    checkpoint = open_checkpoint(path)
    return Subject(path, checkpoint.config, checkpoint.spec, checkpoint)


def examine(
    subject: Subject, form: str, dtype: str, max_len: int, int4: Int4Options | None, device: str
) -> Examined:
    """Exports one layer of each kind in `form` and counts. Raises what a build would."""
    times = alike(subject, int4)
    config = shortened(subject.config, 1 + max(times))
    program = _export(subject, config, dtype, max_len)
    exported = _calls(program, config.num_hidden_layers)
    passes, inputs = run_pipeline(program, form, max_len, None, int4, device)
    nodes = _calls(program, config.num_hidden_layers)

    def whole(shares: Sequence[int]) -> int:
        return shares[-1] + sum(count * shares[layer] for layer, count in times.items())

    facts = Facts(
        exported=whole(exported),
        nodes=whole(nodes),
        experts=whole(_shares(config, [n for op in EXPERTS for n in program.nodes(op)])),
        int4=whole(_shares(config, [n for op in INT4 for n in program.nodes(op)])),
        weights=whole(_bytes(program, config.num_hidden_layers)),
        **_largest(program, _stored(subject)),
    )
    return Examined(facts, program, inputs, passes)


def facts_of(program: Program, exported: int, num_layers: int, subject: Subject) -> Facts:
    """The same of a whole graph. exported: its calls before the passes."""
    return Facts(
        exported=exported,
        nodes=sum(_calls(program, num_layers)),
        experts=sum(len(program.nodes(op)) for op in EXPERTS),
        int4=sum(len(program.nodes(op)) for op in INT4),
        weights=sum(_bytes(program, num_layers)),
        **_largest(program, _stored(subject)),
    )


def count_calls(program: Program, num_layers: int) -> int:
    return sum(_calls(program, num_layers))


def alike(subject: Subject, int4: Int4Options | None) -> dict[int, int]:
    """{layer: how many are like it}: the first layer, which adds no residual, and then of each kind
    the first. Layers are alike that have the same operators and stored tensors."""
    layers = subject.config.num_hidden_layers
    if int4 is not None and any(re.search(r"\d", name) for name in int4.skip):
        return dict.fromkeys(range(layers), 1)  # layers chosen by number
    experts = set(read_experts(subject.config).layers)
    stored: dict[int, set[Hashable]] = defaultdict(set)
    for name, info in (subject.checkpoint.tensors if subject.checkpoint else {}).items():
        if found := LAYER.search(name):
            stored[int(found[1])].add((name[found.end() :], info.dtype, info.shape))
    kinds: dict[Hashable, list[int]] = defaultdict(list)
    for layer in range(layers):
        kinds[layer == 0, layer in experts, frozenset(stored[layer])].append(layer)
    return {members[0]: len(members) for members in kinds.values()}


def shortened(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """The same model with its first layers only."""
    short = copy.deepcopy(config)
    short.num_hidden_layers = layers
    if getattr(short, "layer_types", None) is not None:
        short.layer_types = short.layer_types[:layers]
    return short


def _export(subject: Subject, config: PreTrainedConfig, dtype: str, max_len: int) -> Program:
    if subject.checkpoint is not None:
        return export_checkpoint(replace(subject.checkpoint, config=config), dtype, max_len)
    module = build_module(config, DTYPES[dtype])
    names: dict[int, str] = {}  # a tied tensor has two names and is stored once
    sources = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        first = names.setdefault(id(tensor), name)
        base, _, leaf = first.rpartition(".")
        parts = STACKED.get(leaf, ()) if base.endswith(".experts") else ()
        experts = range(tensor.shape[0]) if parts else ()
        stored = tuple(f"{base}.{i}.{part}" for i in experts for part in parts)
        sources[name] = stored or (first,)
    return export_module(module, sources, max_len)


def _calls(program: Program, layers: int) -> list[int]:
    return [counts.total() for counts in calls_by_layer(program, layers)]


def _shares(config: PreTrainedConfig, nodes: Sequence[fx.Node]) -> list[int]:
    counts = [0] * (config.num_hidden_layers + 1)
    for node in nodes:
        found = LAYER.search(module_path(node) + ".")
        counts[int(found[1]) if found else -1] += 1
    return counts


def _bytes(program: Program, layers: int) -> list[int]:
    counts = [0] * (layers + 1)
    for name in program.weights:
        found = LAYER.search(name)
        counts[int(found[1]) if found else -1] += program.tensor(name).nbytes
    return counts


def _stored(subject: Subject) -> Mapping[str, TensorInfo] | torch.dtype:
    return subject.checkpoint.tensors if subject.checkpoint else subject.stored_dtype


def _largest(program: Program, stored: Mapping[str, TensorInfo] | torch.dtype) -> dict[str, int]:
    """embedding and pieces. The writer maps a stored tensor, converts it where the dtype differs,
    and still holds what it made of the one before."""
    most = before = largest = 0
    for names in write_order(program):
        target = sum(program.tensor(name).nbytes for name in names)
        largest = max(largest, target)
        weight = program.weights[names[0]]
        if not weight.sources:
            most = max(most, target + before)
            before = target
            continue
        target //= len(weight.sources)
        read = target
        if not isinstance(stored, torch.dtype):
            read = max(stored[name].nbytes for name in weight.sources)
        made = 0 if read == target else target  # else the mapped tensor itself is written
        most = max(most, before + read + made)
        before = made
    return {"embedding": largest, "pieces": most}


def operators_without(program: Program, known: Mapping[Any, Any]) -> dict[str, str]:
    """{operator: the source line of the first that calls it} of those that `known` has not."""
    from seekforge.compile.account import operator_name
    from seekforge.passes.program import source_line

    missing: dict[str, str] = {}
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target not in known:
            missing.setdefault(operator_name(node), source_line(node))
    return missing
