"""Numbers as the report writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def size_text(size: float) -> str:
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= step:
            return f"{size / step:,.1f} {unit}"
    return f"{size:,.0f} bytes"


def amount_text(count: float) -> str:
    for unit, step in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= step:
            return f"{count / step:,.1f}{unit}"
    return f"{count:,.0f}"


def cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        if value == 0:
            return "0"
        return f"{value:.2e}" if abs(value) < 1e-2 or abs(value) >= 1e5 else f"{value:.4f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {cell(inner)}" for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(cell, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
