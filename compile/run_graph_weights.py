"""A program's weights as a run of its graph needs them: whole, by rows, or piece by piece.

In: a function that reads checkpoint tensors. Out: tensors for the nodes that run now. What was read
stays in memory up to a number of bytes, so that a small model is read once however often its graphs
run, while of a large one only the weight in use is there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from seekforge.kernels.int4 import Int4, quantise
from seekforge.passes.program import Program

HELD_BYTES = 1 << 30  # of what is kept from run to run
BLOCK = 1 << 25  # elements of a piece: 128 MB in fp32


@dataclass(slots=True)
class GraphWeights:
    """read, int4: as in `compile.weights.Source`; without int4, what `read` gives is rounded to
    nearest. room: bytes kept. block: elements of a piece. One instance may serve all graphs of one
    checkpoint.
    """

    read: Callable[[str], Tensor]
    int4: Callable[[str, int, bool, torch.dtype], Int4] | None = None
    room: int = HELD_BYTES
    block: int = BLOCK
    held: dict[tuple[object, ...], Tensor] = field(default_factory=dict)

    def whole(self, program: Program, name: str, wide: bool) -> Tensor:
        """The weight in the graph's dtype; wide: in float32 instead, and never rounded."""
        pieces = list(self.pieces(program, name, wide))
        whole = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        return whole.reshape(program.tensor(name).shape)

    def rows(self, program: Program, name: str, rows: Tensor, wide: bool) -> Tensor:
        """Some rows of a matrix; of a large one no others are read."""
        if self.is_small(program, name) or len(program.weights[name].sources) != 1:
            return self.whole(program, name, wide)[rows]
        stored = self.read(program.weights[name].sources[0])
        return _cast(stored[rows], program.tensor(name).dtype, wide)

    def pieces(self, program: Program, name: str, wide: bool) -> Iterator[Tensor]:
        """The weight in pieces along dimension 0: one for each checkpoint tensor, and of a tensor
        larger than `block` several."""
        weight, dtype = program.weights[name], program.tensor(name).dtype
        if weight.value is not None:
            yield _cast(weight.value, dtype, wide)
        for source in weight.sources:
            yield from self._pieces(program, name, source, wide)

    def experts(self, program: Program, name: str, chosen: Sequence[int], wide: bool) -> Tensor:
        """[len(chosen), rows, columns] of a weight [experts, rows, columns]; of one that is stored
        expert by expert no others are read."""
        sources, shape = program.weights[name].sources, program.tensor(name).shape
        each, rest = divmod(len(sources), shape[0])
        if rest or not each:
            return self.whole(program, name, wide)[list(chosen)]
        parts = [
            piece
            for expert in chosen
            for source in sources[expert * each : (expert + 1) * each]
            for piece in self._pieces(program, name, source, wide)
        ]
        return torch.cat(parts).reshape(len(chosen), *shape[1:])

    def drop(self, sources: Collection[str] | None = None) -> None:
        """Forgets what is kept of these checkpoint tensors; None: of all."""
        for key in [key for key in self.held if sources is None or key[0] in sources]:
            self.room += self.held.pop(key).nbytes

    def is_small(self, program: Program, name: str) -> bool:
        return program.tensor(name).numel() <= self.block

    def _pieces(self, program: Program, name: str, source: str, wide: bool) -> Iterator[Tensor]:
        """What one checkpoint tensor gives to a weight."""
        weight, dtype = program.weights[name], program.tensor(name).dtype
        key = (source, weight.int4.part if weight.int4 else dtype, wide)
        if key in self.held:
            yield self.held[key]
        elif weight.int4 is not None:
            whole = self._quantised(program, name, source)
            for part in ("scales", "zeros", "qweight"):  # the small ones are kept first
                tensor = getattr(whole, part)
                if tensor is not None:
                    tensor = tensor.float() if wide and tensor.is_floating_point() else tensor
                    self._keep((source, part, wide), tensor)
                    if part == weight.int4.part:
                        found = tensor
            yield found
        else:
            stored = self.read(source)
            rows = max(1, self.block * len(stored) // stored.numel()) if stored.dim() > 1 else 0
            if 0 < rows < len(stored):
                for start in range(0, len(stored), rows):
                    yield _cast(stored[start : start + rows], dtype, wide)
            else:
                piece = _cast(stored, dtype, wide)
                self._keep(key, piece)
                yield piece

    def _quantised(self, program: Program, name: str, source: str) -> Int4:
        """A checkpoint tensor's INT4 form, with scales in the dtype in which the graph has them."""
        weight = program.weights[name]
        assert weight.int4 is not None
        size, symmetric = weight.int4.group_size, weight.int4.symmetric
        dtype = next(
            program.tensor(other).dtype
            for other, made in program.weights.items()
            if made.sources == weight.sources and made.int4 and made.int4.part == "scales"
        )
        if self.int4 is None:
            return quantise(self.read(source).to(dtype), size, symmetric)
        return self.int4(source, size, symmetric, dtype)

    def _keep(self, key: tuple[object, ...], tensor: Tensor) -> None:
        if key not in self.held and tensor.nbytes <= self.room:
            self.room -= tensor.nbytes
            self.held[key] = tensor


def _cast(tensor: Tensor, dtype: torch.dtype, wide: bool) -> Tensor:
    """wide: floating-point values stay as exact as they are stored."""
    if wide and dtype.is_floating_point:
        return tensor.float()
    return tensor.to(dtype)
