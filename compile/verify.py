"""Proof of every pass: the graph before it and the graph after it give the same logits.

In: a checkpoint, and each pass's name and program as the pipeline's observer sees them. Out: the
error of each pass, for the manifest; BuildError that names the first pass beyond its limit.

Both graphs are run in float32 whatever the engine's dtype, with the checkpoint's weights unrounded:
what two graphs that mean the same then differ by is the order of sums, and the limit can be tight.
For a lower dtype they are run in it too. There a pass may change the roundings on purpose, so only
what no rounding explains is refused: values that are no longer finite, and an error against float32
that is OWN_FACTOR times that of the exported graph.

`int4` changes numbers on purpose. The graph after it is held against the graph before it with the
weights that the INT4 form decodes to; what the rounding lost is recorded beside that.
"""

from __future__ import annotations

import ctypes
import math
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from seekforge.compile.run_graph_weights import GraphWeights
from seekforge.compile.verify_error import PassError, difference, median_error
from seekforge.compile.verify_inputs import draw_tokens, logits_of
from seekforge.compile.weights import Source
from seekforge.kernels.errors import BuildError, CheckpointError
from seekforge.kernels.int4 import dequantise
from seekforge.kernels.tolerance import TOLERANCE, normalised_error
from seekforge.models.checkpoint import Checkpoint
from seekforge.passes.int4 import int4_tensors
from seekforge.passes.program import Program

OWN_FACTOR = 4.0  # of the normalised error, which is a square: twice the exported graph's error


@dataclass(frozen=True, slots=True)
class _Logits:
    """What one graph gives: in float32, and in the engine's dtype where that is another."""

    wide: Tensor
    own: Tensor | None


@dataclass(slots=True)
class Verifier:
    """Holds each program against the one before it; `observe` is the pipeline's observer.

    layers: of the model that the programs have. dtype: the engine's. errors: by the passes' names,
    in their order.
    """

    checkpoint: Checkpoint
    layers: int
    dtype: str
    max_len: int
    errors: dict[str, PassError] = field(default_factory=dict)
    _weights: GraphWeights = field(init=False)
    _tokens: list[Tensor] = field(init=False)
    _before: Program | None = None
    _old: _Logits = field(init=False)  # of `_before`
    _judge: Tensor = field(init=False)  # of the exported graph in float32
    _allowed: float = 0.0  # median error in the engine's own dtype
    _plain: Program | None = None  # the last graph before `int4`
    _int4: Program | None = None  # the graph after it

    def __post_init__(self) -> None:
        self._weights = GraphWeights(self.checkpoint.read, self.checkpoint.int4)
        self._tokens = self._draw(0)

    @property
    def limit(self) -> float:
        """Of the normalised error in float32. It is a square, and squares of independent errors add
        up over the layers."""
        return TOLERANCE[torch.float32] * max(1, self.layers)

    @property
    def own_limit(self) -> float | None:
        """Of the median error in the engine's own dtype; None where that is float32, or the
        exported graph is not finite in it, so that no pass can be blamed."""
        return self._allowed if 0 < self._allowed < math.inf else None

    @property
    def positions(self) -> int:
        """Tokens that each graph is run on."""
        return sum(map(len, self._tokens))

    def observe(self, name: str, program: Program) -> None:
        """Raises BuildError for a pass beyond its limit, and for a graph that can't be run."""
        start = time.perf_counter()
        if self._before is None:
            self._judged_by(self._run(program))
            if not bool(self._judge.isfinite().all()):
                raise self._not_finite(program)
        elif _text(program) == _text(self._before):
            self.errors[name] = PassError(0.0, 0.0, 0.0, 0.0, same=True)
        else:
            error = self._compare(name, program)
            seconds = round(time.perf_counter() - start, 4)
            self.errors[name] = replace(error, seconds=seconds)
            self._check(name, error)
        self._before = copied(program)

    def check_source(self, source: Source) -> dict[str, float]:
        """Of weights that calibration made: that smoothing by itself changes nothing ("smoothing",
        a normalised error), and what INT4 then loses ("rounding"). Raises BuildError for smoothing
        beyond the limit of a pass."""
        assert self._plain is not None and self._int4 is not None, "the graph has no INT4"
        full = self._wide(self._plain, GraphWeights(self.checkpoint.read, room=0))
        error = difference(full, self._wide(self._plain, GraphWeights(source.read, room=0)))
        if not error.normalised <= self.limit:
            raise BuildError(
                f"AWQ's smoothing changes what the model computes: {self._beyond(error)}: a factor "
                f"was not taken back where it belongs.\n{self._advice()}"
            )
        loss = normalised_error(full, self._wide(self._plain, self._decoded(source)))
        return {"smoothing": error.normalised, "rounding": loss}

    def release(self) -> None:
        """Drops the weights held, which a further observation would read again, and gives their
        memory back: what matrices of some MB took, glibc keeps (1.6 GB of V2-Lite's experts)."""
        self._weights.drop()
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)

    def _compare(self, name: str, program: Program) -> PassError:
        assert self._before is not None
        rounding = None
        if int4_tensors(program) and self._plain is None:
            self._plain, self._int4 = self._before, copied(program)
            self._weights.drop(int4_tensors(program))  # no later graph reads them unquantised
            full = self._old.wide
            self._judged_by(self._run(self._before, self._decoded(self.checkpoint)))
            rounding = normalised_error(self._old.wide, full)
        try:
            new = self._run(program)
        except BuildError as failed:
            raise BuildError(
                f"pass {name!r} leaves a graph that can't be run: {failed}\n{self._advice()}"
            ) from failed
        error = difference(self._old.wide, new.wide)
        if not error.normalised <= self.limit and self.checkpoint.spec.num_experts:
            error = min(error, self._again(program), key=lambda e: e.normalised)
        self._old = new
        own = None if new.own is None else median_error(self._judge, new.own)
        return replace(error, own=own, rounding=rounding)

    def _again(self, program: Program) -> PassError:
        """The error on other tokens. Where a router likes two experts nearly the same, rounding
        decides between them, and a token's logits differ by much; hardly twice by chance."""
        assert self._before is not None
        inserts = self._before is self._plain
        weights = self._decoded(self.checkpoint) if inserts else self._weights
        tokens = self._draw(1)
        old = logits_of(self._before, tokens, weights, wide=True)
        return difference(old, logits_of(program, tokens, self._weights, wide=True))

    def _run(self, program: Program, weights: GraphWeights | None = None) -> _Logits:
        weights = weights or self._weights
        own = None
        if self.dtype != "float32":
            own = logits_of(program, self._tokens, weights, wide=False)
        return _Logits(self._wide(program, weights), own)

    def _wide(self, program: Program, weights: GraphWeights) -> Tensor:
        return logits_of(program, self._tokens, weights, wide=True)

    def _judged_by(self, found: _Logits) -> None:
        self._old, self._judge = found, found.wide
        if found.own is not None:
            self._allowed = OWN_FACTOR * median_error(found.wide, found.own)

    def _decoded(self, source: Source) -> GraphWeights:
        """`source` with the weights that its INT4 form decodes to, where the graph has that."""
        assert self._int4 is not None
        sizes = int4_tensors(self._int4)
        parts = [weight.int4 for weight in self._int4.weights.values() if weight.int4 is not None]
        symmetric, dtype = parts[0].symmetric, getattr(torch, self.dtype)

        def read(name: str) -> Tensor:
            if name not in sizes:
                return source.read(name)
            return dequantise(source.int4(name, sizes[name], symmetric, dtype), torch.float32)

        held = {key: kept for key, kept in self._weights.held.items() if key[0] not in sizes}
        return GraphWeights(read, room=self._weights.room, held=held)

    def _draw(self, seed: int) -> list[Tensor]:
        return draw_tokens(self.checkpoint.spec.vocab_size, self.max_len, seed)

    def _not_finite(self, program: Program) -> CheckpointError:
        """What the user is told of a checkpoint whose own logits are NaN or infinite."""
        sources = (name for weight in program.weights.values() for name in weight.sources)
        bad = next((n for n in sources if not bool(self.checkpoint.read(n).isfinite().all())), None)
        why = "its values are too large" if bad is None else f"tensor {bad} holds NaN or infinity"
        return CheckpointError(
            f"{self.checkpoint.path}: its logits are not finite in float32, before any pass, on "
            f"{self.where()}: {why}"
        )

    def _check(self, name: str, error: PassError) -> None:
        if not error.normalised <= self.limit:
            raise BuildError(
                f"pass {name!r} changes what the model computes: {self._beyond(error)}\n"
                f"{self._advice()}"
            )
        if error.own is not None and not error.own <= self._allowed:
            raise BuildError(
                f"pass {name!r} loses precision in {self.dtype}, though in float32 it is right: "
                f"normalised error {error.own:.1e} against float32, "
                f"{self._allowed / OWN_FACTOR:.1e} before the passes (limit {self._allowed:.1e}), "
                f"on {self.where()}\n{self._advice()}"
            )

    def _beyond(self, error: PassError) -> str:
        return (
            f"the logits in float32 differ from those before it by a normalised error of "
            f"{error.normalised:.1e} (limit {self.limit:.0e}), at most by {error.max:.1e} of their "
            f"size, on {self.where()}"
        )

    def where(self) -> str:
        """What was run, in words."""
        return f"{self.layers} of {self.checkpoint.spec.num_layers} layers, {self.positions} tokens"

    def _advice(self) -> str:
        return (
            "  do: report it; to see more, build with --no-verify: `seekforge bisect ENGINE` then "
            "names the layer and the node"
        )


def copied(program: Program) -> Program:
    """A copy that later passes don't change."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    module = fx.GraphModule(program.graph_module, graph)
    return replace(program, graph_module=module, weights=dict(program.weights))


def _text(program: Program) -> list[Any]:
    """Equal for two graphs that do the same calls with the same weights."""
    names = {node: f"%{i}" for i, node in enumerate(program.graph.nodes)}
    calls = [
        (node.op, str(node.target), fx.node.map_arg((node.args, node.kwargs), names.__getitem__))
        for node in program.graph.nodes
    ]
    made = [(name, w.sources, w.int4, id(w.value)) for name, w in program.weights.items()]
    return [program.form, calls, made]
