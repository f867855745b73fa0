"""Small plots as SVG text: lines over layers on a logarithmic axis, and a map of counts.

Colours come from the page's style sheet; every plot has a title for those who don't see it. The
numbers are in the tables beside them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from seekforge.compile.report_html import Html, tag

WIDTH, LEFT, RIGHT = 300, 46, 6
CELLS = 4096  # beyond, a map shows ranges instead of single experts


def lines(
    title: str,
    x: Sequence[int],
    series: Sequence[Sequence[float]],
    names: Sequence[str],
    decades: tuple[int, int],
    height: int,
) -> Html:
    """Values over layers, one line each. decades: powers of ten at the axis' ends; what lies below,
    as zero does, is drawn at its foot."""
    low, high = decades
    top, bottom = 6, height - 18

    def y(value: float) -> float:
        share = (math.log10(value) - low) / (high - low) if value > 0 else 0.0
        return round(bottom - max(0.0, share) * (bottom - top), 1)

    marks = [
        tag("text", f"1e{power}", x=LEFT - 5, y=y(10.0**power) + 3.5, text_anchor="end")
        for power in range(low, high + 1)
    ]
    grid = [tag("path", d=f"M{LEFT} {y(10.0**p)}H{WIDTH - RIGHT}", class_="axis")
            for p in range(low, high + 1)]  # fmt: skip
    drawn = []
    for name, line in zip(("one", "two"), series, strict=False):
        points = [(_x(at, x), y(value)) for at, value in zip(x, line, strict=True)]
        drawn.append(tag("path", d="M" + "L".join(f"{a} {b}" for a, b in points), class_=name))
        if len(points) == 1:
            drawn.append(tag("circle", cx=points[0][0], cy=points[0][1], r=3, class_=f"dot-{name}"))
    ends = (f"{name} {min(line):.1e} to {max(line):.1e}"
            for name, line in zip(names, series, strict=True))  # fmt: skip
    label = f"{title}, by layer: {'; '.join(ends)}"
    return _svg(label, height, *grid, *marks, *drawn, *_layer_axis(x, height))


def decades(values: Iterable[float]) -> tuple[int, int]:
    """Powers of ten around the positive ones of the values."""
    logs = [math.log10(value) for value in values if value > 0] or [0.0]
    low = math.floor(min(logs))
    return low, max(math.ceil(max(logs)), low + 1)


def shares(
    title: str, x: Sequence[int], values: Sequence[float], height: int, name: str, top_mark: str
) -> Html:
    """Values from 0 to 1 over layers, as bars. top_mark: how 1 is written."""
    top, bottom = 4, height - 16
    most = max(1, len(x))
    width = min(12.0, max(1.0, (WIDTH - LEFT - RIGHT) / most * 0.72))
    bars = [
        tag(
            "rect", x=round(_x(at, x) - width / 2, 1), width=round(width, 1),
            y=round(bottom - value * (bottom - top), 1),
            height=round(max(0.5, value * (bottom - top)), 1), class_=f"dot-{name}",
        )
        for at, value in zip(x, values, strict=True)
    ]  # fmt: skip
    axis = tag(
        "path", d=f"M{LEFT} {top}H{WIDTH - RIGHT}M{LEFT} {bottom}H{WIDTH - RIGHT}", class_="axis"
    )
    marks = [tag("text", top_mark, x=LEFT - 5, y=top + 6, text_anchor="end"),
             tag("text", "0", x=LEFT - 5, y=bottom + 2, text_anchor="end")]  # fmt: skip
    label = f"{title}, by layer: {min(values):.2f} to {max(values):.2f}"
    return _svg(label, height, axis, *marks, *bars, *_layer_axis(x, height))


def counts(title: str, rows: Mapping[int, Sequence[int]]) -> Html:
    """A cell for each layer (down) and expert (across), stronger for more; empty ones stand out."""
    most = max((max(row) for row in rows.values()), default=0) or 1
    wide = max((len(row) for row in rows.values()), default=0)
    if wide * len(rows) > CELLS:
        return Html("")
    cell = (WIDTH - LEFT - RIGHT) / wide
    tall = min(cell, 18.0)
    parts = []
    for line, (layer, row) in enumerate(rows.items()):
        y = round(4 + line * tall, 1)
        parts.append(tag("text", str(layer), x=LEFT - 6, y=round(y + tall / 2 + 3.5, 1),
                         text_anchor="end"))  # fmt: skip
        for expert, count in enumerate(row):
            parts.append(tag(
                "rect", tag("title", f"layer {layer}, expert {expert}: {count:,} tokens"),
                x=round(LEFT + expert * cell, 2), y=y, width=round(cell - 0.6, 2),
                height=round(tall - 0.6, 2), class_="cell" if count else "cell silent",
                fill_opacity=round(0.08 + 0.92 * count / most, 3) if count else None,
            ))  # fmt: skip
    height = int(4 + tall * len(rows) + 18)
    axis = tag("text", f"experts 0 to {wide - 1}; strongest: {most:,} tokens", x=LEFT, y=height - 4)
    return _svg(title, height, *parts, axis)


def _svg(label: str, height: int, *parts: Html) -> Html:
    return tag("svg", *parts, viewBox=f"0 0 {WIDTH} {height}", class_="plot", role="img",
               aria_label=label)  # fmt: skip


def _x(layer: int, x: Sequence[int]) -> float:
    first, last = x[0], max(x[-1], x[0] + 1)
    inner = WIDTH - LEFT - RIGHT - 12
    return round(LEFT + 6 + inner * (layer - first) / (last - first), 1)


def _layer_axis(x: Sequence[int], height: int) -> list[Html]:
    ends = dict.fromkeys((x[0], x[len(x) // 2], x[-1]))
    return [tag("text", str(at), x=_x(at, x), y=height - 4, text_anchor="middle") for at in ends]
