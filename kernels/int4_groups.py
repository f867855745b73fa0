"""How many weights of a row share an INT4 scale. Plain numbers: needs no torch."""

from __future__ import annotations

MIN_GROUP = 16  # smaller groups would store a scale for every few weights


def group_size_of(in_features: int, wanted: int) -> int | None:
    """The group size used for rows of `in_features` weights where `wanted` was asked for.

    `wanted` itself if it divides; else the whole row if it is shorter than `wanted`; else the
    largest power of two from 32 on that divides; else the largest even divisor from 16 on; else
    None: such a weight stays as it is (also every odd in_features). 320 at 128 -> 64,
    10944 -> 64, 72 at 128 -> 72, 72 at 64 -> 36, 16 -> 16, 193 -> None.
    """
    if in_features % 2:
        return None
    if in_features % wanted == 0:
        return wanted
    if in_features < wanted:
        return in_features
    even = [g for g in range(MIN_GROUP, wanted, 2) if in_features % g == 0]
    powers = [g for g in even if g >= 32 and g & (g - 1) == 0]
    return max(powers or even, default=None)
