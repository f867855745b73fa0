"""Logits only for the rows asked for: the head reads the selected tokens instead of all.

    linear(hidden [batch, seq, hidden])  ->  linear(hidden.view(-1, hidden)[rows])  [rows, vocab]

Of a 2,048-token prompt one row is needed; the head is a fifth of the default model's weights.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import fx

from seekforge.passes.linears import LINEAR
from seekforge.passes.pattern import Miss, describe
from seekforge.passes.program import Program, source_line
from seekforge.passes.rule import PassResult

aten = torch.ops.aten


def select_rows(program: Program, rows: fx.Node) -> PassResult:
    """`rows`: the placeholder logits_rows, indices into batch * seq. fired: 1, or 0 with the
    reason."""
    start, before = time.perf_counter(), len(program.graph.nodes)
    output = program.graph.output_node()
    outputs: Any = output.args[0]
    (logits,) = outputs
    head = logits
    # A scale or a cast of the logits keeps rows apart; a tensor might have one value a row.
    while head.target in ELEMENTWISE and not isinstance(head.args[1], fx.Node):
        head = head.args[0]
    misses: tuple[Miss, ...] = ()
    if head.target is LINEAR:
        hidden = head.args[0]
        width = head.args[1].meta["val"].shape[-1]  # of the weight [vocab, hidden]
        with program.graph.inserting_before(head):
            flat = program.emit(aten.reshape.default, hidden, [-1, width], like=head)
            chosen = program.emit(aten.index_select.default, flat, 0, rows, like=head)
        head.replace_input_with(hidden, chosen)
    else:
        reason = f"the logits are not the output of a linear layer: {describe(head)}"
        misses = (Miss(logits.name, reason, source_line(logits)),)
    after = len(program.graph.nodes)
    seconds = time.perf_counter() - start
    return PassResult("logits_rows", int(not misses), misses, before, after, seconds)


ELEMENTWISE = (aten.mul.Tensor, aten.div.Tensor, aten.to.dtype)
