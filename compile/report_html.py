"""HTML from Python values: everything that is not `Html` already is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

VOID = ("meta",)


class Html(str):
    """Text that is HTML; other strings are data."""

    __slots__ = ()


def tag(name: str, /, *children: Any, **attributes: Any) -> Html:
    """An element. Attributes: `class_`, `aria_label` become class and aria-label; None and False
    are left out, True stands alone."""
    parts = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        parts.append(key if value is True else f'{key}="{html.escape(str(value))}"')
    opening = f"<{' '.join(parts)}>"
    return Html(opening if name in VOID else f"{opening}{join(children)}</{name}>")


def join(children: Iterable[Any]) -> Html:
    return Html("".join(escape(child) for child in children if child is not None))


def escape(value: Any) -> Html:
    return value if isinstance(value, Html) else Html(html.escape(str(value)))


def table(
    caption: str, head: Sequence[str], rows: Iterable[Sequence[Any]], left: int = 1, **extra: Any
) -> Html:
    """A table that scrolls by itself where it is too wide. The first column names the row; the
    columns from `left` on are numbers, aligned right."""

    def kind(at: int) -> str | None:
        return "num" if at >= left else None

    top = (tag("th", name, scope="col", class_=kind(at)) for at, name in enumerate(head))
    body = (
        tag(
            "tr",
            *(
                tag("td" if at else "th", cell, scope=None if at else "row", class_=kind(at))
                for at, cell in enumerate(row)
            ),
        )
        for row in rows
    )
    made = tag(
        "table", tag("thead", tag("tr", *top)), tag("tbody", *body), aria_label=caption, **extra
    )
    # Focusable, so that what lies outside the view can be reached with the keyboard. The caption is
    # no part of the table: it would be as wide.
    area = tag("div", made, class_="scroll", tabindex=0, role="region", aria_label=caption)
    return join([tag("p", caption, class_="caption", aria_hidden="true"), area])


def section(name: str, title: str, *children: Any) -> Html:
    heading = tag("h2", title, id=f"{name}-title")
    return tag("section", heading, *children, id=name, aria_labelledby=f"{name}-title")


def pairs(caption: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Html:
    """A table of names and values, no wider than they are."""
    return table(caption, head, rows, left=len(head), class_="pairs")


def meter(share: float) -> Html:
    """A bar of a share of a column's width."""
    bar = tag("span", class_="meter", style=f"width:{100 * min(1.0, max(0.0, share)):.1f}%")
    return tag("span", bar, class_="track", aria_hidden="true")
