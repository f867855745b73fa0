"""The ways in which transformers' models spell a rotation of q or k, read into one form.

    halves   x * cos + rotate_half(x) * sin          pairs (i, i + dim / 2), as Llama and Qwen
    pairs    cat(x1 * c - x2 * s, x2 * c + x1 * s)   pairs (2i, 2i + 1) read as even and odd slices,
                                                     as DeepSeek-V3
    complex  view_as_real(view_as_complex(x) * freqs)  pairs (2i, 2i + 1), as DeepSeek-V2

"halves" behind a de-interleaving view, transpose and reshape is DeepSeek-V3's older spelling. Both
of V3's put the even dims of the result first, then the odd ones. Patterns see the graph after
clean-up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from seekforge.passes.cleanup import VIEWS
from seekforge.passes.pattern import Anything, Call, Cast, Literal, Match, Number, Sequence, Var
from seekforge.passes.program import Program, same_size
from seekforge.passes.region import numbered, run_region

aten = torch.ops.aten

_x = Var("x")


def _angle(name: str) -> Call:
    return Call(aten.unsqueeze.default, Var(name), Number("heads_dim"))


_upper = Call(aten.slice.Tensor, _x, Number("dim"), Number("half"), Number("end"))
_lower = Call(aten.slice.Tensor, _x, Number("dim"), Literal(0), Number("half"))
_rotated = Call(aten.cat.default, Sequence((Call(aten.neg.default, _upper), _lower)), Literal(-1))
HALVES = Call(
    aten.add.Tensor,
    Call(aten.mul.Tensor, _x, _angle("cos")),
    Call(aten.mul.Tensor, _rotated, _angle("sin")),
)


def _half_angle(name: str) -> Call:
    part = Call(aten.slice.Tensor, Var(name), Number("angle_dim"), Literal(0), Number("half"))
    return Call(aten.unsqueeze.default, part, Number("heads_dim"))


def _every_second(start: int) -> Call:
    return Call(aten.slice.Tensor, _x, Number("dim"), Literal(start), Number("end"), Literal(2))


def _product(start: int, angle: str) -> Call:
    return Call(aten.mul.Tensor, _every_second(start), _half_angle(angle))


PAIRS = Call(
    aten.cat.default,
    Sequence(
        (
            Call(aten.sub.Tensor, _product(0, "cos"), _product(1, "sin")),
            Call(aten.add.Tensor, _product(1, "cos"), _product(0, "sin")),
        )
    ),
    Literal(-1),
)
_pair_of = Call(aten.reshape.default, Cast(_x, "wide"), Anything())
COMPLEX = Call(
    aten.flatten.using_ints,
    Call(
        aten.view_as_real.default,
        Call(aten.mul.Tensor, Call(aten.view_as_complex.default, _pair_of), _angle("freqs")),
    ),
    Number("first"),
)


@dataclass(frozen=True, slots=True)
class Rotation:
    """One rotation of q or k: x with four dimensions, its last one rotated, becomes `root`.

    interleaved: pairs are (2i, 2i + 1). split: the result has the first of all pairs in front, then
    the second. angles: cos and sin [batch, seq, dim], or complex numbers [batch, seq, dim / 2].
    shape: the sizes to view x with first, or None.
    """

    root: fx.Node
    x: fx.Node
    shape: Any
    angles: tuple[fx.Node, ...]
    heads_dim: int
    interleaved: bool
    split: bool

    def input(self, program: Program) -> fx.Node:
        """x as it is rotated, inserted at the graph's insertion point."""
        if self.shape is None:
            return self.x
        return program.emit(aten.reshape.default, self.x, self.shape, like=self.root)

    def output(self, program: Program, rotated: fx.Node) -> fx.Node:
        """What `root` is, from the operator's result, whose pairs stand as those of x."""
        if not self.split:
            return rotated
        last = rotated.meta["val"].dim() - 1
        parts = [
            program.emit(aten.slice.Tensor, rotated, last, i, torch.iinfo(torch.int64).max, 2,
                         like=self.root)
            for i in (0, 1)
        ]  # fmt: skip
        return program.emit(aten.cat.default, parts, -1, like=self.root)


def read_halves(found: Match) -> Rotation | str:
    shape = found["x"].meta["val"].shape
    refused = _check_last(found, shape)
    if refused:
        return refused
    if 2 * found["half"] != shape[-1]:
        return f"rotates halves of {found['half']} in a head of {shape[-1]}"
    if found["end"] < shape[-1]:
        return f"the upper half ends at {found['end']} of {shape[-1]}"
    refused = _check_angles(found, shape, shape[-1])
    if refused:
        return refused
    root, angles, heads_dim = found.nodes[0], (found["cos"], found["sin"]), found["heads_dim"]
    whole = _before_split(found["x"])
    if whole is not None:
        return Rotation(root, whole, found["x"].args[1], angles, heads_dim, True, True)
    return Rotation(root, found["x"], None, angles, heads_dim, False, False)


def read_pairs(found: Match) -> Rotation | str:
    shape = found["x"].meta["val"].shape
    refused = _check_last(found, shape)
    if refused:
        return refused
    if found["end"] < shape[-1] or shape[-1] % 2:
        return f"the slices of pairs end at {found['end']} of {shape[-1]}"
    if 2 * found["half"] != shape[-1] or found["angle_dim"] % 3 != 2:
        return f"takes {found['half']} angles for {shape[-1]} values"
    refused = _check_angles(found, shape, shape[-1])
    if refused:
        return refused
    angles = (found["cos"], found["sin"])
    return Rotation(found.nodes[0], found["x"], None, angles, found["heads_dim"], True, True)


def read_complex(found: Match) -> Rotation | str:
    root, x, pairs = found.nodes[0], found["x"], found.nodes[4]
    shape, dtype = root.meta["val"].shape, x.meta["val"].dtype
    if len(shape) != 4 or not _same(pairs.meta["val"].shape, (*shape[:-1], shape[-1] // 2, 2)):
        return f"views pairs {tuple(pairs.meta['val'].shape)} as {tuple(shape)}"
    refused = _check_angles(found, shape, shape[-1] // 2)
    if refused:
        return refused
    if dtype != root.meta["val"].dtype:  # the operator rounds to x's dtype
        users = list(root.users)
        cast = len(users) == 1 and users[0].target is aten.to.dtype
        if not cast or users[0].meta["val"].dtype != dtype:
            return f"the rotation of {dtype} is used as {root.meta['val'].dtype}"
        root = users[0]
    viewed = None
    if not _same(x.meta["val"].shape, shape):  # clean-up makes one view of two
        sizes: Any = pairs.args[1]
        viewed = [*sizes[:-2], shape[-1]]
    return Rotation(root, x, viewed, (found["freqs"],), found["heads_dim"], True, False)


SPELLINGS = (
    (aten.cat.default, PAIRS, read_pairs),
    (aten.flatten.using_ints, COMPLEX, read_complex),
    (aten.add.Tensor, HALVES, read_halves),  # last: the sums inside PAIRS resemble it
)
ANCHORS = {
    aten.neg.default: "a negation that is not part of a rotation",
    aten.view_as_complex.default: "complex numbers that are not part of a rotation",
}


def _check_last(found: Match, shape: Any) -> str | None:
    if len(shape) != 4 or found["dim"] % 4 != 3:
        return f"rotates dimension {found['dim']} of {len(shape)}, expected the last of 4"
    return None


def _check_angles(found: Match, shape: Any, width: int) -> str | None:
    heads = found["heads_dim"] % 4
    if heads not in (1, 2):
        return f"cos and sin are the same along dimension {heads}, expected the heads (1 or 2)"
    expected = [*(size for dim, size in enumerate(shape[:-1]) if dim != heads), width]
    for name in sorted({"cos", "sin", "freqs"} & found.bound.keys()):
        angles = found[name].meta["val"].shape
        if len(angles) != 3 or not _same(angles, expected):
            return f"{name} is {tuple(angles)}, expected one row a token: {tuple(expected)}"
    return None


def _before_split(x: fx.Node) -> fx.Node | None:
    """The node whose even dims, then odd dims, x is; None where x is something else."""
    swapped: Any = x.args[0] if x.target in VIEWS else None
    if swapped is None or swapped.target is not aten.transpose.int:
        return None
    viewed: Any = swapped.args[0]
    if viewed.target not in VIEWS:
        return None
    whole: fx.Node = viewed.args[0]
    given = numbered([whole])
    result = run_region([x], given)
    if isinstance(result, str):
        return None
    even_then_odd = given[whole].view(*result[0].shape[:-1], -1, 2).transpose(-1, -2)
    return whole if torch.equal(result[0], even_then_odd.reshape(result[0].shape)) else None


def _same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(map(same_size, a, b))


def angle_tables(angles: list[Tensor]) -> tuple[Tensor, Tensor] | str:
    """fp32 tables of cos and sin [positions, dim / 2], from evaluated angles as in Rotation but
    without batch. Or the reason why they can't be one."""
    if len(angles) == 1:
        return angles[0].real.float().contiguous(), angles[0].imag.float().contiguous()
    halves = []
    for name, full in zip(("cos", "sin"), angles, strict=True):
        first, second = full.chunk(2, -1)
        if not torch.equal(first, second):
            return f"{name} differs between the two halves of the head"
        halves.append(first.float().contiguous())
    return halves[0], halves[1]
