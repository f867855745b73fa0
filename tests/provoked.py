"""Failures provoked with the real libraries, and the message a user sees for each.

`python tests/provoked.py > docs/errors.md` writes the table; tests/test_failures.py keeps it true.
The situations are in provoked_tensorrt.py, provoked_onnx.py and provoked_torch.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import resource
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import TensorProto, numpy_helper
from rich.console import Console

from seekforge.compile.failures import explained
from seekforge.compile.steps import Steps
from seekforge.kernels.errors import SeekforgeError

Provoke = Callable[[Path], Any]
PROVOKED: dict[str, Provoke] = {}  # the situation, in words -> what provokes it in a folder
STACK = 'File "modeling_toy.py", line 41, in forward\n  {}'


def provoked(situation: str) -> Callable[[Provoke], Provoke]:
    def note(function: Provoke) -> Provoke:
        PROVOKED[situation] = function
        return function

    return note


def situations() -> list[str]:
    """All of those whose libraries are installed."""
    for module in ("torch", "onnx", "tensorrt"):
        if module != "tensorrt" or importlib.util.find_spec("tensorrt_rtx") is not None:
            importlib.import_module(f"provoked_{module}")
    return list(PROVOKED)


def message(situation: str, folder: Path) -> str:
    """What a user sees; the folder's name is left out of it."""
    try:
        PROVOKED[situation](folder)
    except SeekforgeError as error:
        return explained(error).replace(str(folder), "OUT")
    raise AssertionError(f"{situation}: nothing was refused")


def model_of(text: str, **tensors: np.ndarray | TensorProto) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 23]>\n{text}')
    for name, value in tensors.items():
        tensor = value if isinstance(value, TensorProto) else numpy_helper.from_array(value, name)
        model.graph.initializer.append(tensor)
    for node in model.graph.node:
        line = STACK.format(f"made {node.op_type}")
        node.metadata_props.add(key="pkg.torch.onnx.stack_trace", value=line)
        node.metadata_props.add(key="pkg.torch.onnx.fx_node", value=f"{node.name}_0")
    return model


def outside(name: str, location: str) -> TensorProto:
    tensor = TensorProto(
        name=name, data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL
    )
    for key, value in (("location", location), ("offset", "0"), ("length", "16")):
        tensor.external_data.add(key=key, value=value)
    return tensor


def quiet() -> Steps:
    return Steps("provoked", Console(file=open(os.devnull, "w")))  # noqa: PTH123


def address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


@contextmanager
def limited(kind: int, soft: int) -> Iterator[None]:
    """soft: bytes; -1 for no limit."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (before[0] if soft < 0 else soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def row(situation: str, text: str) -> str:
    """The situation, and of its message what does not depend on a library's version."""
    title, *lines = text.split("\n")
    title = re.sub(r"(cannot be loaded: ).*", r"\1…", title)
    parts = {key: value for key, _, value in (line.strip().partition(": ") for line in lines)}
    shown = [title, *(f"{key}: {parts[key]}" for key in ("at", "cause", "do") if key in parts)]
    shown = [re.sub(r"(compile/\w+|tests/\w+)\.py:\d+", r"\1.py:…", line) for line in shown]
    cells = "<br>".join(line.replace("|", "\\|") for line in shown)
    return f"| {situation} | {cells} |"


def table(rows: Sequence[str]) -> str:
    return "\n".join(["| provoked by | what the user sees |", "|---|---|", *rows])


HEAD = """# Errors

Every failure of a build has one form, whatever it comes from:

    tensorrt-rtx refused node 'model.layers.1.self_attn.Attention' (Attention)
      at: modeling_llama.py:294 in forward: … -> FX node … -> ONNX node … -> layer …
      cause: TensorRT's attention has no logit soft cap
      do: build this model for onnxruntime or inductor
      tensorrt-rtx says: …
      log: engines/tensorrt-rtx.log

The first line says what failed; `at` leads from the model's source line to the backend's layer, as
far as it is known; the library's own words come last, and all of them are in the log. What they
mean is data, `compile/failures_known.py`: a row for each kind of message. What is wrong with the
input (an option, a checkpoint) is refused before anything heavy, in one line and with exit code 2.

Each of these is provoked with the real library by `tests/provoked.py`, which also writes this page
(`python tests/provoked.py > docs/errors.md`); the lines with the library's words and the log are
left out.

"""


def main() -> None:
    # By its name: as a script, this file is another module than the one that the others import.
    shown = importlib.import_module("provoked")
    rows = []
    for situation in shown.situations():
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row(situation, shown.message(situation, Path(folder))))
    print(HEAD + table(rows))


if __name__ == "__main__":
    main()
