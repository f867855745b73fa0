"""Optimisation profiles: the shape ranges a TensorRT engine was built for, and the choice of one.

`compile` makes them, the manifest carries them as JSON, `runtime` picks one for each step by the
shapes of its inputs. Pure: it knows nothing of TensorRT.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from seekforge.kernels.errors import EngineError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShapeRange:
    """Smallest, typical and largest shape of one input; raises `EngineError` unless
    `1 <= min <= opt <= max` holds in every dimension."""

    min: Shape
    opt: Shape
    max: Shape

    def __post_init__(self) -> None:
        sizes = list(zip(self.min, self.opt, self.max, strict=False))
        ranks = {len(self.min), len(self.opt), len(self.max)}
        if len(ranks) > 1 or any(not 1 <= low <= opt <= high for low, opt, high in sizes):
            raise EngineError(
                f"shape range min {list(self.min)}, opt {list(self.opt)}, max {list(self.max)}: "
                "1 <= min <= opt <= max was expected in every dimension"
            )

    def admits(self, shape: Sequence[int]) -> bool:
        return len(shape) == len(self.min) and all(
            low <= size <= high for low, size, high in zip(self.min, shape, self.max, strict=True)
        )

    def __str__(self) -> str:
        sizes = zip(self.min, self.max, strict=True)
        return f"[{', '.join(str(a) if a == b else f'{a}..{b}' for a, b in sizes)}]"


Profile = Mapping[str, ShapeRange]  # input name -> its range


def profile_to_json(profile: Profile) -> dict[str, Any]:
    """The manifest's form: name -> {"min": [...], "opt": [...], "max": [...]}."""
    return {
        name: {"min": list(r.min), "opt": list(r.opt), "max": list(r.max)}
        for name, r in profile.items()
    }


def profile_from_json(data: Mapping[str, Any]) -> Profile:
    """Inverse of `profile_to_json`; raises `EngineError` for anything else."""
    try:
        return {
            name: ShapeRange(tuple(r["min"]), tuple(r["opt"]), tuple(r["max"]))
            for name, r in data.items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise EngineError(f"manifest.json: a profile is malformed ({error!r})") from None


def select_profile(profiles: Sequence[Profile], shapes: Mapping[str, Sequence[int]]) -> int:
    """Index of the profile for inputs of these shapes.

    Of several that fit the last one is taken: profiles are listed from general to special (one
    token of one sequence fits the context and the generation profile; the latter is the faster).
    Raises `EngineError` naming the inputs outside the ranges.
    """
    for index in reversed(range(len(profiles))):
        if not _outside(profiles[index], shapes):
            return index
    reasons = "; ".join(
        f"profile {index}: " + ", ".join(_outside(profile, shapes))
        for index, profile in enumerate(profiles)
    )
    raise EngineError(
        f"this step's shapes fit no profile of the engine ({reasons}); "
        "rebuild it with a larger --max-batch or --max-len, or send smaller steps"
    )


def _outside(profile: Profile, shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """What keeps `shapes` out of the profile, as text; empty where it fits."""
    return [
        f"{name} {list(shape)} is outside {profile[name]}"
        if name in profile
        else f"{name} has no range"
        for name, shape in shapes.items()
        if name not in profile or not profile[name].admits(shape)
    ]


def largest(profiles: Iterable[Profile], name: str, dim: int) -> int:
    """The largest size any profile admits in one dimension of one input."""
    return max(profile[name].max[dim] for profile in profiles)
