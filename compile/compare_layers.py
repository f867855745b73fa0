"""Hidden states of an engine, layer by layer: what its compiled code computes on the way.

Engines return logits only, so a second one is made of the same graph, whose outputs are the hidden
states too; HOW says how. In: an engine directory and its checkpoint. Out: a function from token ids
to [tokens, hidden] behind each layer. The state behind a layer is what the next layer's first norm
reads, or the model's last norm.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from seekforge.compile.bundle import link_or_copy
from seekforge.compile.compare_layers_inductor import add_hidden_package
from seekforge.compile.compare_layers_onnx import add_hidden_model
from seekforge.compile.weights import WEIGHTS_NAME
from seekforge.kernels.errors import InputError
from seekforge.runtime.inductor import InductorSession
from seekforge.runtime.manifest import Manifest, read_manifest
from seekforge.runtime.onnxruntime import OnnxRuntimeSession
from seekforge.runtime.session import Chunk, padded_batches, ragged_inputs

States = Callable[[Sequence[int]], list[Tensor]]
HOW = {
    "onnxruntime": "ONNX Runtime on the same model with the hidden states as further outputs",
    "inductor": "the same program compiled again with the hidden states as further outputs, "
    "which Inductor may fuse differently",
}


def norm_weights(num_layers: int) -> list[str]:
    """The weights of the norms that read the hidden states, in the layers' order."""
    names = [f"model.layers.{layer}.input_layernorm.weight" for layer in range(1, num_layers)]
    return [*names, "model.norm.weight"]


@contextmanager
def layer_states(directory: Path, checkpoint: Path) -> Iterator[States]:
    """Raises InputError for a backend whose engines can't be opened up, and for a graph in which a
    layer's norm is not found."""
    manifest = read_manifest(directory)
    if manifest.backend not in HOW:
        raise InputError(
            f"--layers: {directory} is a {manifest.backend} engine, which has no place to look "
            f"at its hidden states; possible for {', '.join(HOW)}"
        )
    if manifest.backend == "onnxruntime" and manifest.dtype == "bfloat16":
        raise InputError(
            f"--layers: {directory} is an ONNX Runtime engine in bfloat16, which numpy does not "
            "have; look at one in float16 or float32"
        )
    names = norm_weights(manifest.kv.num_layers)
    with tempfile.TemporaryDirectory(prefix="seekforge-") as temporary:
        folder = Path(temporary)
        link_or_copy((directory / WEIGHTS_NAME).resolve(), folder / WEIGHTS_NAME)
        if manifest.backend == "onnxruntime":
            outputs = add_hidden_model(directory, folder, names)
            yield _of_onnxruntime(OnnxRuntimeSession(folder, manifest), outputs)
        else:
            add_hidden_package(manifest, checkpoint, folder, names)
            yield _of_inductor(InductorSession(folder, manifest))


def _chunk(manifest: Manifest, tokens: Sequence[int]) -> Chunk:
    """All tokens in one step, into blocks 0, 1, 2 …"""
    blocks = -(-len(tokens) // manifest.kv.block_size)
    return Chunk(list(tokens), 0, range(blocks), [len(tokens) - 1])


def _of_onnxruntime(session: OnnxRuntimeSession, outputs: list[str]) -> States:
    size = session.manifest.kv.block_size

    def states(tokens: Sequence[int]) -> list[Tensor]:
        chunk = _chunk(session.manifest, tokens)
        session.allocate(len(chunk.block_table), size)
        (batch,) = padded_batches([chunk], size)
        given = {
            "token_ids": batch.token_ids, "positions": batch.positions,
            "block_tables": batch.block_tables, "past_lens": batch.past_lens,
            "logits_rows": batch.logits_rows, **session.pools,
        }  # fmt: skip
        found = session.session.run(outputs, {k: v.cpu().numpy() for k, v in given.items()})
        return [torch.from_numpy(value).float() for value in found]

    return states


def _of_inductor(session: InductorSession) -> States:
    size = session.manifest.kv.block_size

    def states(tokens: Sequence[int]) -> list[Tensor]:
        chunk = _chunk(session.manifest, tokens)
        session.allocate(len(chunk.block_table), size)
        step = ragged_inputs([chunk], size)
        index = (
            step.token_ids, step.positions, step.slot_mapping, step.block_tables,
            step.context_lens, step.query_start, step.logits_rows,
        )  # fmt: skip
        given = [tensor.to(session.device) for tensor in index]
        _, *found = session.model.run([*given, *session.pools])
        return [state.float().cpu() for state in found]

    return states
