"""The kernel benchmark's logic without a GPU: floors, a row's object, the table, tuning."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from seekforge.compile.bench_floors import Floor, Floors, bound, met, table
from seekforge.compile.bench_kernels import (
    FAMILIES,
    Candidate,
    Ceilings,
    Row,
    Timed,
    family,
    result,
)
from seekforge.compile.bench_tune import Tuner, as_values, dump, line, put, tune
from seekforge.kernels import tuning
from seekforge.kernels.tuning import Config

FIELDS = {"row", "value", "unit", "floor", "better", "peer", "roof", "error"}
CEILINGS = Ceilings(4e12, 8e14)


def make_row(floor: Floors = None, quoted: Any = None, name: str = "row") -> Row:
    """Of 40 MB: 10 us at the ceiling."""

    def candidates() -> Iterator[Candidate]:
        yield from ()

    return Row(name, torch.ones(1), 4e7, 1.0, floor, quoted, candidates)


def timed(**taken: float) -> Timed:
    return Timed(taken, {"seekforge": 1e-3} if "seekforge" in taken else {}, {})


@pytest.mark.parametrize(
    ("floors", "expected"),
    [
        (None, None),
        (1.25, 16.0),  # the best peer's 20 us / 1.25
        (Floor(0.8, "roof"), 12.5),
        (Floor(0.5, "cublas"), 60.0),
        (Floor(2.0, "row bf16"), 25.0),
        ((Floor(1.25), Floor(0.8, "roof"), Floor(2.0, "row bf16")), 12.5),  # all of them
    ],
)
def test_floors(floors: Floors, expected: float | None) -> None:
    known = {"peer": 20.0, "roof": 10.0, "cublas": 30.0, "row bf16": 50.0}
    assert bound(floors, known) == (expected, {})


def test_a_floor_whose_measure_is_absent_is_said() -> None:
    floors = (Floor(1.2), Floor(2.0, "row bf16"))
    limit, notes = bound(floors, {"peer": 12.0, "row bf16": None})
    assert limit == 10.0
    assert notes == {"floor 2 x row bf16": "not measured here"}
    assert bound(floors, {}) == (None, {**notes, "floor 1.2 x peer": "not measured here"})


def test_object_of_a_row() -> None:
    made = result(make_row(1.0), CEILINGS, timed(seekforge=12.5, a=11.0, b=10.0), {})
    assert made.keys() >= FIELDS
    assert (made["value"], made["peer"], made["peer_name"], made["floor"]) == (12.5, 10, "b", 10)
    assert (made["roof"], made["of_roof"], made["error"]) == (10.0, 80.0, 1e-3)
    assert met(made) is False
    assert met(result(make_row(1.0), CEILINGS, timed(seekforge=10.0, b=10.0), {})) is True
    assert met(result(make_row(), CEILINGS, timed(seekforge=10.0, b=1.0), {})) is None


def test_quoted_figures_serve_where_no_peer_is_present() -> None:
    quoted = {"marlin": 31.8, "humming": 35.9}
    alone = result(make_row(1.0, quoted), CEILINGS, timed(seekforge=30.0), {})
    assert (alone["peer"], alone["peer_name"]) == (31.8, "marlin (quoted)")
    beside = result(make_row(1.0, quoted), CEILINGS, timed(seekforge=30.0, humming=34.0), {})
    assert (beside["peer"], beside["peer_name"]) == (34.0, "humming")
    plain = result(make_row(1.0, 25.1), CEILINGS, timed(seekforge=30.0), {})
    assert (plain["peer"], plain["peer_name"]) == (25.1, "quoted")
    floor = Floor(0.5, "marlin")  # a named peer's measured time goes before its quoted one
    both = result(make_row(floor, quoted), CEILINGS, timed(seekforge=30.0, marlin=30.0), {})
    assert both["floor"] == 60.0
    assert result(make_row(floor, quoted), CEILINGS, timed(seekforge=1.0), {})["floor"] == 63.6


def test_a_row_may_be_held_against_an_earlier_one() -> None:
    floor = Floor(1.75, "row bf16")
    made = result(make_row(floor), CEILINGS, timed(seekforge=100.0), {"row bf16": 175.0})
    assert (made["floor"], made["peer"], met(made)) == (100.0, None, True)
    left_out = result(make_row(floor), CEILINGS, timed(seekforge=100.0), {})
    assert left_out["floor"] is None
    assert "floor 1.75 x row bf16" in left_out["notes"]


def test_a_failed_candidate_is_a_row_without_a_value() -> None:
    made = result(make_row(1.0, 5.0), CEILINGS, timed(a=4.0), {})
    assert made["value"] is None and made["of_roof"] is None and made["error"] is None
    assert met(made) is False
    json.dumps(made, allow_nan=False)


def test_table_says_what_is_met() -> None:
    rows = [
        result(make_row(1.0, name="fast"), CEILINGS, timed(seekforge=9.0, a=10.0), {}),
        result(make_row(1.0, name="slow"), CEILINGS, timed(seekforge=11.0, a=10.0), {}),
        result(make_row(1.0, name="dead"), CEILINGS, timed(a=10.0), {}),
        result(make_row(name="free"), CEILINGS, timed(seekforge=11.0), {}),
    ]
    lines = table(rows).split("\n")[1:]
    assert [("met" in x, " NO " in x) for x in lines] == [
        (True, False), (False, True), (False, True), (False, False),
    ]  # fmt: skip
    assert "1.11" in lines[0] and "0.91" in lines[1]


# --- tuning


def write(path: Path) -> Path:
    path.write_text(dump({"op": [{"k": 1, "block": 16}, {"k": None, "block": 32}]}))
    return path


def tuned(path: Path, taken: Mapping[str, float], key: Mapping[str, Any], only: str = "") -> Any:
    seen: list[Mapping[str, Any]] = []

    def row(configs: Mapping[str, Any]) -> Row:
        seen.append(configs)
        return make_row(name="a row")

    tuner = Tuner("op", key, row, [{"block": 64}, {"block": 128}])
    done = tune([tuner], only, lambda _: None, path, lambda _: Timed(dict(taken), {}, {"1": "bad"}))
    assert [list(configs) for configs in seen] == [["now", "0", "1"]]
    return done


def test_the_fastest_configuration_is_written(tmp_path: Path) -> None:
    path = write(tmp_path / "h.json")
    (done,) = tuned(path, {"now": 10.0, "0": 9.0, "1": 8.0}, {"k": 1})
    assert (done["old"], done["new"], done["config"]) == (10.0, 8.0, {"block": 128})
    assert json.loads(path.read_text())["op"] == [{"k": 1, "block": 128}, {"k": None, "block": 32}]
    assert "10.00 ->     8.00" in line(done)


def test_a_new_shape_class_goes_before_the_default(tmp_path: Path) -> None:
    path = write(tmp_path / "h.json")
    tuned(path, {"now": 10.0, "0": 9.0}, {"k": 3})
    assert json.loads(path.read_text())["op"][0] == {"k": 3, "block": 64}
    assert json.loads(path.read_text())["op"][-1] == {"k": None, "block": 32}


@pytest.mark.parametrize("taken", [{"now": 10.0, "0": 9.95}, {"now": 10.0}, {}])
def test_what_is_no_gain_is_not_written(tmp_path: Path, taken: dict[str, float]) -> None:
    path = write(tmp_path / "h.json")
    before = path.read_text()
    (done,) = tuned(path, taken, {"k": 1})
    assert path.read_text() == before
    assert done["config"] is None and done["old"] == done["new"] == taken.get("now")
    assert done["failed"]["1"] == "bad"
    json.dumps(done, allow_nan=False)


def test_any_right_configuration_replaces_one_that_fails(tmp_path: Path) -> None:
    path = write(tmp_path / "h.json")
    (done,) = tuned(path, {"1": 12.0}, {"k": 1})
    assert (done["old"], done["new"], done["config"]) == (None, 12.0, {"block": 128})


def test_rows_left_out_are_not_timed(tmp_path: Path) -> None:
    assert tuned(write(tmp_path / "h.json"), {"now": 1.0}, {"k": 1}, only="other") == []


def test_put_keeps_what_the_configuration_does_not_name() -> None:
    content = {"op": [{"k": 1, "block": 16, "warps": 4}]}
    put(content, "op", {"k": 1}, {"block": 32})
    put(content, "new", {"k": 2}, as_values(Config(16, 64, 1, 4, 3)))
    assert content["op"] == [{"k": 1, "block": 32, "warps": 4}]
    assert content["new"][0] == {
        "k": 2, "block_m": 16, "block_n": 64, "splits": 1, "warps": 4, "stages": 3,
    }  # fmt: skip


def test_the_file_in_the_repository() -> None:
    """As --tune would write it, so that refreshing it changes only what it must."""
    text = tuning.PATH.read_text()
    assert dump(json.loads(text)) == text
    assert tuning.rows("paged_decode") and tuning.rows("no such operator") == []


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str) -> None:
    """Each gives makers of rows, and tuners whose tables' keys are limits or kinds."""
    made = family(name)
    assert all(map(callable, getattr(made, f"{name}_rows")(None)))
    for tuner in getattr(made, "TUNERS", ()):
        assert tuner.space and not set(tuner.key) & set(as_values(tuner.space[0])), tuner.op
