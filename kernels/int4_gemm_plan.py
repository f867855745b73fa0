"""Which kernel, with which configuration, multiplies so many rows by an INT4 weight on the GPU.

The rows of `int4_linear` in h200.json are of a shape class (`rows`: at most so many rows of x,
null: any; `out_features`, `in_features`) and of one kernel: `few` (int4_gemv), `many`
(int4_gemm_hopper) or `dense` (int4_gemm_dense). Among the classes with the fewest rows that
suffice, the nearest shape is taken.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

from seekforge.kernels.int4_gemm_hopper import Many
from seekforge.kernels.int4_gemv import Few
from seekforge.kernels.tuning import rows as rows_of

Plan = Few | Many | None
KINDS: dict[str, type[Few] | type[Many]] = {"few": Few, "many": Many}
# Rows of x up to which each serves, where the file has no row: about where the times cross.
DEFAULT: list[tuple[float, Plan]] = [
    (1, Few(16, 1, 8, 2, False)),
    (16, Few(64, 2, 4, 1, False)),
    (32, Many(128, 32, 8)),
    (64, Many(128, 64, 6)),
    (128, Many(128, 128, 4)),
    (512, Many(128, 256, 3)),
    (math.inf, None),
]


def as_plan(row: Mapping[str, Any]) -> Plan:
    """A row's configuration; None: dense."""
    kind = KINDS.get(row["kernel"])
    return kind(**{k: row[k] for k in kind.__dataclass_fields__ if k in row}) if kind else None


@functools.cache
def plan(rows: int, out_features: int, in_features: int) -> Plan:
    """The configuration for x [rows, in_features] and a weight [out_features, in_features]."""
    found = [row for row in rows_of("int4_linear") if rows <= (row["rows"] or math.inf)]
    if not found:
        return next(config for most, config in DEFAULT if rows <= most)

    def distance(row: Mapping[str, Any]) -> tuple[float, float]:
        away = abs(math.log(out_features / row["out_features"]))
        return (row["rows"] or math.inf), away + abs(math.log(in_features / row["in_features"]))

    return as_plan(min(found, key=distance))
