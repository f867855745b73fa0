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
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from seekforge.compile.awq import Collector, Recipe
from seekforge.compile.awq_smoothing import Factors, Heads, merged, smoothing
from seekforge.compile.calibration_inputs import EXPERTS, observed
from seekforge.compile.calibration_result import Calibration as Calibration
from seekforge.compile.calibration_result import GroupResult as GroupResult
from seekforge.compile.calibration_result import load_layer, save_layer
from seekforge.compile.calibration_search import Outcome, Reader, matrices, search_group
from seekforge.kernels.int4 import Int4
from seekforge.models.awq_groups import ScaleGroup, scale_groups
from seekforge.models.checkpoint import Checkpoint, tensors_for_parameter
from seekforge.models.exportable import make_exportable
from seekforge.models.module import build_module
from seekforge.models.spec import ModelSpec

LAYERS = "layer-*.safetensors"  # in the folder of a calibration


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
    error feedback (compile/awq_feedback.py), needed as long as the result is used; layers whose
    file is there already are not searched again. None: every weight is rounded for itself.
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
        known = None if folder is None else load_layer(checkpoint, _file(folder, index))
        watched = observed(layer, groups, inputs, folder is not None)
        with watched if known is None else nullcontext():
            for i, state in enumerate(states):
                positions = torch.arange(state.shape[1])[None]
                rotary = model.rotary_emb(state, positions)
                states[i] = layer(state, position_ids=positions, position_embeddings=rotary)
        if known is None:
            known = _search_layer(checkpoint, index, weights, stored, groups, inputs, group_sizes,
                                  symmetric, dtype, folder)  # fmt: skip
        else:
            calibration.kept += 1
        calibration.add(known)
        layer.to("meta")
    return calibration


def _assemble(
    checkpoint: Checkpoint, names: Sequence[str], layer: nn.Module, parameter: str
) -> Tensor:
    shape = layer.state_dict()[parameter].shape
    return torch.cat([checkpoint.read(name).float() for name in names]).view(shape)


def _search_layer(
    checkpoint: Checkpoint,
    index: int,
    weights: Mapping[str, Tensor],
    stored: Mapping[str, tuple[str, ...]],
    groups: Sequence[ScaleGroup],
    inputs: Mapping[str, list[Collector]],
    group_sizes: Mapping[str, int],
    symmetric: bool,
    dtype: torch.dtype,
    folder: Path | None,
) -> Calibration:
    """Searches all groups of one layer; its file is written last."""
    calibration = Calibration(checkpoint, 0)
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
        save_layer(calibration, tensors, _file(folder, index))
    return calibration


def _file(folder: Path, index: int) -> Path:
    return folder / LAYERS.replace("*", str(index))


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
