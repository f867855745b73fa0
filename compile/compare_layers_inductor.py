"""An AOTInductor package again, with the hidden states as outputs.

The engine's program is made as the build made it, from the checkpoint and what the manifest says of
the build; that it is the same one shows in its weights, which must be those of the engine's file.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import fx

from seekforge.compile.export import export_checkpoint
from seekforge.compile.inductor import lower_inductor
from seekforge.compile.options import Options
from seekforge.compile.plan import int4_options
from seekforge.compile.weights import WEIGHTS_NAME
from seekforge.kernels.add_rms_norm import add_rms_norm
from seekforge.kernels.errors import InputError
from seekforge.kernels.rms_norm import rms_norm
from seekforge.models.checkpoint import Checkpoint, open_checkpoint
from seekforge.passes.int4_options import QUANTISATIONS, Int4Options
from seekforge.passes.pipeline import run_pipeline
from seekforge.passes.program import Program
from seekforge.runtime.manifest import Manifest


def add_hidden_package(
    manifest: Manifest, checkpoint: Path, folder: Path, names: Sequence[str]
) -> None:
    """Writes `folder`/model.pt2 for the weights file that is there; its outputs are the logits and
    then the hidden states. names: of the norms' weights."""
    opened = open_checkpoint(checkpoint)
    program = export_checkpoint(opened, manifest.dtype, manifest.limits.max_len)
    int4 = _int4(opened, manifest)
    _, inputs = run_pipeline(
        program, manifest.form, manifest.limits.max_len, None, int4, manifest.device
    )
    _check_weights(program, folder / WEIGHTS_NAME, checkpoint)
    states = hidden_states(program, names)
    output = program.graph.output_node()
    output.args = ((*output.args[0], *states),)  # type: ignore[misc]
    program.graph_module.recompile()
    lower_inductor(program, inputs, manifest.device, folder, decode=False)


def _int4(checkpoint: Checkpoint, manifest: Manifest) -> Int4Options | None:
    made = manifest.quantization
    if made is None:
        return None
    if made["method"] not in QUANTISATIONS:  # stored so
        return int4_options(checkpoint, Options())
    return Int4Options(made["group_size"], made["symmetric"], tuple(made["skip"]))


def _check_weights(program: Program, path: Path, checkpoint: Path) -> None:
    with safe_open(path, framework="pt") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    made = {name: tuple(program.tensor(name).shape) for name in program.weights}
    if made != found:
        odd = sorted(made.items() ^ found.items())[:2]
        raise InputError(
            f"--layers: the graph made of {checkpoint} has other weights than the engine ({odd}): "
            "another checkpoint, or another seekforge; build the engine again"
        )


def hidden_states(program: Program, names: Sequence[str]) -> list[fx.Node]:
    """The nodes that the norms with these weights normalise."""
    return [_read_by_norm(program, name) for name in names]


def _read_by_norm(program: Program, name: str) -> fx.Node:
    for node in program.nodes(rms_norm):
        if _is_weight(node.args[1], name):
            return node.args[0]  # type: ignore[return-value]
    for node in program.nodes(add_rms_norm):
        if _is_weight(node.args[2], name):
            for item in node.users:
                if item.args[1] == 1:
                    return item
            with program.graph.inserting_after(node):  # the last sum, which nothing else reads
                return program.emit(operator.getitem, node, 1, like=node)
    raise InputError(f"--layers: no norm of the graph reads {name}: layers can't be told apart")


def _is_weight(node: Any, name: str) -> bool:
    return isinstance(node, fx.Node) and node.op == "get_attr" and node.target == name
