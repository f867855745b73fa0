"""AWQ calibration: runs text through the checkpoint one layer at a time and searches smoothing and
clipping of each.

In: an opened checkpoint, windows of tokens, and which tensors will be INT4. Out: a `Calibration`,
which makes the smoothed and quantised tensors one by one as the weight writer asks for them. One
decoder layer's weights (fp32) and the windows' hidden states are in memory, nothing else. The layer
is transformers' own module; every layer sees the activations of the unquantised model, which
smoothing doesn't change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from seekforge.compile.awq import Collector, Recipe
from seekforge.compile.awq_smoothing import Factors, Heads, merged, smoothing
from seekforge.compile.calibration_inputs import EXPERTS, observed
from seekforge.compile.calibration_search import Outcome, Reader, matrices, search_group
from seekforge.kernels.int4 import Int4, quantise
from seekforge.models.awq_groups import ScaleGroup, scale_groups
from seekforge.models.checkpoint import Checkpoint, tensors_for_parameter
from seekforge.models.exportable import make_exportable
from seekforge.models.module import build_module
from seekforge.models.spec import ModelSpec

PARTS = ("qweight", "scales", "zeros")  # as `Int4` has them


@dataclass(frozen=True, slots=True)
class GroupResult:
    """What one scale group of one layer came to.

    Errors are |X (W' - W)^T|^2 / |X W^T|^2 over the group's INT4 weights: `rtn_error` of plain
    rounding, `scaled_error` after smoothing, `error` after smoothing, clipping and, where it was
    asked for, error feedback.
    clipped: share of the groups of weights whose largest magnitude was cut.
    """

    layer: int
    producer: str
    linears: tuple[str, ...]
    ratio: float
    rtn_error: float
    scaled_error: float
    error: float
    clipped: float


@dataclass(slots=True)
class Calibration:
    """A checkpoint with its smoothing and clipping: the weight writer's source.

    factors, clips: by name of a stored tensor. files: where the INT4 form of a stored tensor lies
    that was rounded with error feedback (none: rounded when asked for). expert_tokens: for each
    MoE layer how many tokens each expert saw.
    """

    checkpoint: Checkpoint
    tokens: int
    factors: dict[str, Factors] = field(default_factory=dict)
    clips: dict[str, Tensor] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)
    groups: list[GroupResult] = field(default_factory=list)
    expert_tokens: dict[int, list[int]] = field(default_factory=dict)

    def read(self, name: str) -> Tensor:
        """The stored tensor, smoothed (then in fp32)."""
        tensor = self.checkpoint.read(name)
        return self.factors[name].apply(tensor.float()) if name in self.factors else tensor

    def int4(self, name: str, group_size: int, symmetric: bool, dtype: torch.dtype) -> Int4:
        """The stored tensor smoothed, clipped and rounded; scales in `dtype`. With error feedback
        group size and symmetry must be those of `calibrate`."""
        if name in self.files:
            packed = _load(self.files[name], name)
            found = (packed.group_size, packed.zeros is None)
            assert found == (group_size, symmetric), f"{name} was calibrated as {found}"
            return replace(packed, scales=packed.scales.to(dtype))
        return quantise(self.read(name), group_size, symmetric, self.clips.get(name), dtype)

    @property
    def neutral_experts(self) -> dict[int, list[int]]:
        """For each MoE layer the experts that saw no token, which are rounded as they are."""
        silent = {
            layer: [e for e, count in enumerate(counts) if not count]
            for layer, counts in self.expert_tokens.items()
        }
        return {layer: experts for layer, experts in silent.items() if experts}

    @property
    def mean_errors(self) -> tuple[float, float]:
        """(of plain rounding, of AWQ): the mean over all groups."""
        count = max(1, len(self.groups))
        plain = sum(group.rtn_error for group in self.groups) / count
        return plain, sum(group.error for group in self.groups) / count


@torch.no_grad()
def calibrate(
    checkpoint: Checkpoint,
    windows: Sequence[Sequence[int]],
    group_sizes: Mapping[str, int],
    symmetric: bool,
    dtype: torch.dtype,
    folder: Path | None = None,
) -> Calibration:
    """Calibrates every decoder layer. windows: token ids, each window by itself from position 0.

    group_sizes: group size by the name of each stored tensor that will be INT4. dtype: of the
    engine, so of the scales. folder: existing; takes one file a layer with its weights rounded with
    error feedback (compile/awq_feedback.py), needed as long as the result is used. None: every
    weight is rounded for itself.
    """
    module = make_exportable(build_module(checkpoint.config, torch.float32))
    model: Any = module.model
    calibration = Calibration(checkpoint, sum(map(len, windows)))
    embedding = checkpoint.read(tensors_for_parameter(checkpoint, "model.embed_tokens.weight")[0])
    states = [embedding[torch.tensor(window)].float()[None] for window in windows]
    del embedding
    for index, layer in enumerate(model.layers):
        prefix = f"model.layers.{index}."
        stored = {n: tensors_for_parameter(checkpoint, prefix + n) for n in layer.state_dict()}
        weights = {name: _assemble(checkpoint, stored[name], layer, name) for name in stored}
        layer.load_state_dict(weights, assign=True)
        kept = [name for name in stored if stored[name][0] not in group_sizes]
        groups = scale_groups(checkpoint.spec.model_type, stored, kept)
        inputs: dict[str, list[Collector]] = {}
        with observed(layer, groups, inputs, folder is not None):
            for i, state in enumerate(states):
                positions = torch.arange(state.shape[1])[None]
                rotary = model.rotary_emb(state, positions)
                states[i] = layer(state, position_ids=positions, position_embeddings=rotary)
        _search_layer(calibration, index, weights, stored, groups, inputs, group_sizes,
                      symmetric, dtype, folder)  # fmt: skip
        layer.to("meta")
    return calibration


def _assemble(
    checkpoint: Checkpoint, names: Sequence[str], layer: nn.Module, parameter: str
) -> Tensor:
    shape = layer.state_dict()[parameter].shape
    return torch.cat([checkpoint.read(name).float() for name in names]).view(shape)


def _search_layer(
    calibration: Calibration,
    index: int,
    weights: Mapping[str, Tensor],
    stored: Mapping[str, tuple[str, ...]],
    groups: Sequence[ScaleGroup],
    inputs: Mapping[str, list[Collector]],
    group_sizes: Mapping[str, int],
    symmetric: bool,
    dtype: torch.dtype,
    folder: Path | None,
) -> None:
    """Searches all groups of one layer and adds what was found to the calibration."""
    heads = heads_of(calibration.checkpoint.spec)
    seen = {name: [c.statistics() for c in found] for name, found in inputs.items()}
    experts = f"{EXPERTS}.gate_up_proj"
    if experts in seen:
        calibration.expert_tokens[index] = [statistics.tokens for statistics in seen[experts]]
    parts, clips, packed = [], dict[str, Tensor](), dict[str, list[Int4]]()
    for group in groups:
        recipe = Recipe(group_sizes[stored[group.linears[0]][0]], symmetric, dtype)
        readers = [
            Reader(name, matrix, statistics)
            for name in group.linears
            for matrix, statistics in zip(
                matrices(weights[name]),
                seen[name] if name.startswith(EXPERTS) else seen[group.producer],
                strict=True,
            )
        ]
        # Each expert's down projection has its own scales; all other readers of a group share them.
        apart = group.rows == "up"
        together = [[reader] for reader in readers] if apart else [readers]
        outcomes = [search_group(some, recipe, group, heads) for some in together]
        scales = torch.stack([o.scales for o in outcomes]) if apart else outcomes[0].scales
        parts.append(smoothing(group, scales, heads, stored))
        bounds = iter([bound for outcome in outcomes for bound in outcome.clips])
        for name in group.linears:
            mine = [next(bounds) for _ in matrices(weights[name])]
            clips[name] = torch.stack(mine) if weights[name].ndim == 3 else mine[0]
        results = iter([result for outcome in outcomes for result in outcome.packed])
        if folder is not None:
            for name in group.linears:
                packed[name] = [next(results) for _ in matrices(weights[name])]
        calibration.groups.append(_result(index, group, outcomes))
    factors, tensors = merged(parts), dict[str, Tensor]()
    for name, names in stored.items():
        found, clip = factors.get(name, Factors()), clips.get(name)
        if clip is not None and found.rows is not None:
            clip = clip * found.rows[..., None]
        for i, stored_name in enumerate(names):
            if name in factors:
                calibration.factors[stored_name] = _factors_of_part(found, i, len(names))
            if clip is not None:
                calibration.clips[stored_name] = _rows_of_part(clip, 1, i, len(names))
            if folder is not None and name in packed:
                whole = _with_rows(packed[name], found.rows)
                for part, tensor in whole.items():
                    tensors[f"{stored_name}.{part}"] = _rows_of_part(tensor, 1, i, len(names))
                calibration.files[stored_name] = _file(folder, index)
    if folder is not None:
        save_file(tensors, _file(folder, index))


def _file(folder: Path, index: int) -> Path:
    return folder / f"layer-{index}.safetensors"


def _load(path: Path, name: str) -> Int4:
    with safe_open(path, framework="pt") as file:
        stored = set(file.keys())
        keys = [f"{name}.{part}" for part in PARTS]
        return Int4(*(file.get_tensor(key) for key in keys if key in stored))


def _with_rows(packed: Sequence[Int4], rows: Tensor | None) -> dict[str, Tensor]:
    """The parts of a parameter in INT4, its rows multiplied by `rows`."""

    def together(tensors: list[Tensor]) -> Tensor:
        return torch.stack(tensors) if len(tensors) > 1 else tensors[0]

    scales = together([weight.scales for weight in packed])
    if rows is not None:
        scales = (scales.float() * rows[..., None]).to(scales.dtype)
    parts = {"qweight": together([weight.qweight for weight in packed]), "scales": scales}
    zeros = [weight.zeros for weight in packed if weight.zeros is not None]
    if zeros:
        parts["zeros"] = together(zeros)
    return parts


def _result(index: int, group: ScaleGroup, outcomes: Sequence[Outcome]) -> GroupResult:
    size = sum(outcome.size for outcome in outcomes) or 1.0
    return GroupResult(
        layer=index,
        producer=group.producer,
        linears=group.linears,
        ratio=sum(outcome.ratio for outcome in outcomes) / len(outcomes),
        rtn_error=sum(outcome.plain_loss for outcome in outcomes) / size,
        scaled_error=sum(outcome.scaled_loss for outcome in outcomes) / size,
        error=sum(outcome.loss for outcome in outcomes) / size,
        clipped=sum(o.clipped for o in outcomes) / sum(o.groups for o in outcomes),
    )


def heads_of(spec: ModelSpec) -> Heads:
    """The attention's shape as smoothing sees it."""
    repeats = spec.num_heads // spec.num_kv_heads
    return Heads(spec.num_kv_heads, repeats, spec.v_head_dim, spec.qk_nope_head_dim)


def _factors_of_part(factors: Factors, part: int, parts: int) -> Factors:
    """Of the factors of a parameter those of one of the `parts` stored tensors it is made of, which
    lie one behind the other (stacked experts: gate and up of one, of the next, ...)."""
    rows, columns = factors.rows, factors.columns
    if rows is not None:
        rows = _rows_of_part(rows, 0, part, parts)
    if columns is not None and columns.ndim == 2 and parts > 1:
        columns = columns[part * len(columns) // parts]
    return Factors(rows, columns)


def _rows_of_part(values: Tensor, trailing: int, part: int, parts: int) -> Tensor:
    """values: [..., rows] and `trailing` more dimensions."""
    if parts == 1:
        return values
    return values.flatten(0, values.ndim - 1 - trailing).chunk(parts)[part].clone()
