"""Faults planted in the installed code, one function each, for the tests of bisect.

Each takes pytest's monkeypatch and, where the fault is one layer's, the number of that layer. What
is built or bisected while it is in force is wrong as if the code had been written so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

import seekforge.compile.bisect_inductor
import seekforge.compile.calibration
import seekforge.compile.inductor
import seekforge.compile.onnx_translations
import seekforge.kernels.rope
import seekforge.models.exportable
import seekforge.passes.rope
import seekforge.passes.swiglu
import seekforge.runtime.session
from seekforge.compile.awq_smoothing import Factors
from seekforge.compile.bisect_nodes import layer_in, layer_of
from seekforge.compile.onnx_builder import OnnxBuilder
from seekforge.kernels.swiglu import swiglu
from seekforge.runtime.blocks import BlockManager


def wrong_rope_pairing(patch: pytest.MonkeyPatch, layer: int) -> None:
    """The RoPE pass takes halves for pairs, or pairs for halves."""
    right = seekforge.passes.rope._rewrite

    def rewrite(program: Any, pair: list[Any], *rest: fx.Node) -> None:
        if layer_of(pair[0].root) == layer:
            pair = [replace(rotation, interleaved=not rotation.interleaved) for rotation in pair]
        right(program, pair, *rest)

    patch.setattr(seekforge.passes.rope, "_rewrite", rewrite)


def swapped_halves(patch: pytest.MonkeyPatch, layer: int) -> None:
    """The SwiGLU pass puts up before gate."""
    right = seekforge.passes.swiglu.concatenate

    def concatenate(program: Any, linears: Sequence[fx.Node], name: str) -> fx.Node:
        return right(program, linears[::-1] if layer_in(name) == layer else linears, name)

    patch.setattr(seekforge.passes.swiglu, "concatenate", concatenate)


def scale_not_folded(patch: pytest.MonkeyPatch, layer: int, producer: str) -> None:
    """AWQ multiplies the readers' columns and forgets the rows of what makes their input."""
    right = seekforge.compile.calibration.smoothing
    seen: list[str] = []

    def smoothing(group: Any, *rest: Any) -> dict[str, Factors]:
        factors = right(group, *rest)
        if group.producer == producer:
            if len(seen) == layer:
                for name in (producer, producer.removesuffix("weight") + "bias"):
                    factors.pop(name, None)
            seen.append(producer)
        return factors

    patch.setattr(seekforge.compile.calibration, "smoothing", smoothing)


def wrong_translation(patch: pytest.MonkeyPatch, layer: int) -> None:
    """SwiGLU's translation to ONNX leaves out the gate: sigmoid(gate) * up."""
    table = seekforge.compile.onnx_translations.TRANSLATIONS
    right = table[swiglu]

    def translate(b: OnnxBuilder, node: fx.Node, gate_up: str) -> Any:
        if layer_of(node) != layer:
            return right(b, node, gate_up)
        gate, up = b.op("Split", gate_up, outputs=2, axis=-1, num_outputs=2)
        return b.op("Mul", b.op("Sigmoid", gate), up)

    patch.setitem(table, swiglu, translate)


def overflowing_norm(patch: pytest.MonkeyPatch) -> None:
    """RMSNorm's translation to ONNX squares in the model's own dtype: 256 is too much for fp16."""

    def norm(
        b: OnnxBuilder, x: str, weight: str, eps: float, dtype: torch.dtype, width: int
    ) -> str:
        mean = b.op("ReduceMean", b.op("Mul", x, x), b.constant([-1]))
        root = b.op("Sqrt", b.op("Add", mean, b.constant(eps, dtype)))
        return str(b.op("Mul", b.op("Div", x, root), weight))

    patch.setattr(seekforge.compile.onnx_translations, "_norm", norm)


def shifted_slots(patch: pytest.MonkeyPatch) -> None:
    """The runtime looks up the block of a position one too far: the block of the next token."""
    right = seekforge.runtime.session._slots

    def slots(chunk: Any, block_size: int) -> torch.Tensor:
        at = torch.arange(chunk.start, chunk.start + len(chunk.token_ids))
        last = len(chunk.block_table) - 1
        blocks = torch.tensor(chunk.block_table)[((at + 1) // block_size).clamp(max=last)]
        return blocks * block_size + at % block_size

    assert right is not slots
    patch.setattr(seekforge.runtime.session, "_slots", slots)


def short_tables(patch: pytest.MonkeyPatch) -> None:
    """The runtime hands over the full blocks of the past and forgets the one begun."""
    right = seekforge.runtime.session._pad

    def pad(tables: Sequence[Sequence[int]]) -> torch.Tensor:
        return right([table[:-1] if len(table) > 1 else table for table in tables])

    patch.setattr(seekforge.runtime.session, "_pad", pad)


def shared_block(patch: pytest.MonkeyPatch) -> None:
    """The block manager goes back one block when a sequence's table grows: it is another's."""
    right = BlockManager.allocate

    def allocate(self: BlockManager, sequence_id: int, tokens: int) -> bool:
        grows = bool(self.table(sequence_id))
        before = len(self.table(sequence_id))
        done = right(self, sequence_id, tokens)
        table: Any = self.table(sequence_id)
        if grows and len(table) > before and table[-1] > 0:
            table[-1] -= 1
        return done

    patch.setattr(BlockManager, "allocate", allocate)


def wrong_rope_kernel(patch: pytest.MonkeyPatch) -> None:
    """The operator pairs halves where it is told pairs, and pairs where it is told halves."""
    right = seekforge.kernels.rope.rotate_reference

    def rotate(
        x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
    ) -> torch.Tensor:
        return right(x, cos, sin, not interleaved)

    patch.setattr(seekforge.kernels.rope, "rotate_reference", rotate)


def wrong_attention_scale(patch: pytest.MonkeyPatch, layer: int) -> None:
    """What attention becomes for the export divides by head_dim, not by its root."""
    right = seekforge.models.exportable._attention

    def attention(module: Any, query: torch.Tensor, *rest: Any, **named: Any) -> Any:
        if module.layer_idx == layer:
            named["scaling"] = 1 / query.shape[-1]
        return right(module, query, *rest, **named)

    patch.setattr(seekforge.models.exportable, "_attention", attention)


def wrong_inductor_code(patch: pytest.MonkeyPatch, layer: int) -> None:
    """What is given to Inductor has down_proj's input scaled in one layer."""
    right = seekforge.compile.inductor.module_of

    def module_of(program: Any) -> fx.GraphModule:
        module = right(program)
        for node in module.graph.find_nodes(
            op="call_function", target=torch.ops.aten.linear.default
        ):
            if f"layers.{layer}.mlp.down_proj" in str(node.args[1].target):
                with module.graph.inserting_before(node):
                    args = (node.args[0], 1.25)
                    scaled = module.graph.call_function(torch.ops.aten.mul.Tensor, args)
                node.replace_input_with(node.args[0], scaled)
        module.recompile()
        return module

    for owner in (seekforge.compile.inductor, seekforge.compile.bisect_inductor):
        patch.setattr(owner, "module_of", module_of)
