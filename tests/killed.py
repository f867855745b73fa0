"""Builds that are killed: a process that has everything imported and forks one build for each line.

In, a line of JSON: {"checkpoint", "out", "options", "step"}. Out: "pid N", then "reached" when the
build is in the middle of `step`, where it stays until it is killed, then "ended". Nothing is
computed before the fork: a thread pool would not survive it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from seekforge.compile import build, calibration, lower, weights


def stop(*_: object, **__: object) -> None:
    print("reached", flush=True)
    time.sleep(600)


def stop_in_weights() -> None:
    """After the first weights are written."""
    read = weights.read_pieces

    def pieces(*args: Any) -> Iterator[Any]:
        yield from read(*args)
        stop()

    weights.read_pieces = pieces


def stop_in_calibration() -> None:
    """After the first layer."""
    save, seen = calibration.save_layer, []

    def save_layer(*args: Any) -> None:
        if seen:
            stop()
        seen.append(None)
        save(*args)

    calibration.save_layer = save_layer


def plant(step: str) -> None:
    if step == "weights":
        return stop_in_weights()
    if step == "calibration":
        return stop_in_calibration()
    if step == "compile":
        return setattr(subprocess.Popen, "wait", stop)  # the compilations run
    place = {
        "lower": (lower.onnx, "write_onnx"),
        "checksums": (build, "file_entries"),
        "verify": (build._Job, "_verify"),
    }[step]
    return setattr(*place, stop)


def main() -> None:
    for line in sys.stdin:
        case = json.loads(line)
        child = os.fork()
        if child == 0:
            os.environ["XDG_CACHE_HOME"] = case["cache"]
            plant(case["step"])
            given = case["options"]
            given["backends"] = tuple(given["backends"])
            given["calib"] = given["calib"] and Path(given["calib"])
            options = build.Options(**given)
            build.build(Path(case["checkpoint"]), Path(case["out"]), options)
            os._exit(0)
        print(f"pid {child}", flush=True)
        os.waitpid(child, 0)
        print("ended", flush=True)


if __name__ == "__main__":
    main()
