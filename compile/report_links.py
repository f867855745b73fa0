"""Which node became which: the lines that the report draws between two graphs.

In: the nodes of the graph before and after a pass. Out: pairs of names. A node that is gone is
linked to what its readers read in its place; one whose readers are gone too, to what the nearest of
them became (not the farther ones: a chain of residual sums runs through all layers).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from seekforge.compile.report_nodes import ShownNode


def links(before: Sequence[ShownNode], after: Sequence[ShownNode]) -> list[tuple[str, str]]:
    """(name before, name after) for the nodes of `before` that are gone, in their order."""
    old, new = ({node.name: node for node in side} for side in (before, after))
    gone = [node.name for node in before if node.name not in new]
    became: dict[str, set[str]] = defaultdict(set)
    for name in old.keys() & new.keys():
        for was, now in _replaced(old[name].refs, new[name].refs):
            if now in new:
                became[was].add(now)
    readers: dict[str, list[str]] = defaultdict(list)
    for node in before:
        for ref in node.refs:
            readers[ref].append(node.name)
    steps = dict.fromkeys(became, 0)  # to the nearest reader that stayed
    for name in reversed(gone):
        if name in became:
            continue
        near = [(steps[reader], reader) for reader in readers[name] if reader in steps]
        if near:
            steps[name] = min(near)[0] + 1
            for distance, reader in near:
                if distance < steps[name]:
                    became[name] |= became[reader]
    order = {node.name: at for at, node in enumerate(after)}
    return [
        (name, now) for name in gone for now in sorted(became.get(name, ()), key=order.__getitem__)
    ]


def _replaced(before: Sequence[str], after: Sequence[str]) -> list[tuple[str, str]]:
    """What a node reads now in the place of what it read before."""
    if len(before) == len(after):
        return [(was, now) for was, now in zip(before, after, strict=True) if was != now]
    came = [name for name in after if name not in before]
    return [(was, now) for was in before if was not in after for now in came]
