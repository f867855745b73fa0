"""What the cache of builds holds, as data and as text (`seekforge cache`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from seekforge.compile.build_cache import BOUND, Entry, builds, entries

DAY = 24 * 3600


def account(removed: Sequence[Entry] | None = None) -> dict[str, Any]:
    """{"folder", "bound", "held", "size", "entries"}, sizes in bytes; with `removed`, the entries
    that are gone, after a `prune`.

    size: of all files. held: of those that no engine shares, which is what the cache takes on disk.
    """
    rows = [_row(entry) for entry in entries()]
    report: dict[str, Any] = {
        "folder": str(builds()),
        "bound": BOUND,
        "held": sum(row["held"] for row in rows),
        "size": sum(row["size"] for row in rows),
        "entries": rows,
    }
    if removed is not None:
        report["removed"] = [entry.key for entry in removed]
    return report


def format_account(report: dict[str, Any]) -> str:
    """One line an entry, then the sums."""
    lines = []
    if "removed" in report:
        lines.append(f"removed {len(report['removed'])}")
    if report["entries"]:
        lines.append(
            f"{'key':<14}{'backend':<14}{'size':>10}{'alone':>10}{'saves':>9}  last used, of"
        )
    for row in report["entries"]:
        days = max(0.0, time.time() - row["used"]) / DAY
        lines.append(
            f"{row['key'][:12]:<14}{row['backend']:<14}{_mb(row['size']):>10}{_mb(row['held']):>10}"
            f"{row['seconds']:>7.0f} s  {days:.1f} days ago, {row['model']}"
        )
    lines.append(
        f"{report['folder']}: {len(report['entries'])} kept, {_mb(report['size'])}, of which "
        f"{_mb(report['held'])} are in no engine (at most {report['bound'] / 2**30:.0f} GiB)"
    )
    return "\n".join(lines)


def _row(entry: Entry) -> dict[str, Any]:
    return {
        "key": entry.key,
        "model": entry.model,
        "backend": entry.backend,
        "size": entry.size,
        "held": entry.held(),
        "seconds": entry.seconds,
        "used": entry.used,
    }


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
