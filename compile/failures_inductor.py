"""AOTInductor's failures in the user's terms: which node, which source line.

It compiles in a process of its own, on a graph without metadata; names of nodes are the same, so
the program still tells where a node that the log names comes from.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

from torch import fx

from seekforge.compile.failures import failure
from seekforge.kernels.errors import BuildError
from seekforge.passes.program import Program, source_line

_EXECUTING = re.compile(r"While executing %(\w+)")
_TARGET = re.compile(r"^\s*target: (\S+)", re.M)
_ERROR = re.compile(r"^[\w.]*(Error|Exception|InvalidCxxCompiler)\b.*", re.M)


def inductor_failure(
    program: Program, package: str, device: str, code: int, text: str, log: Path
) -> BuildError:
    """Keeps the compiling process' output `text` as `log`. code: what it ended with; -9 where a
    signal 9 ended it."""
    what = f"could not compile {package} for {device}"
    if code < 0:
        said = f"the compiling process was ended by signal {-code} ({signal.Signals(-code).name})"
        log.write_text(f"{text}\n{said}\n", encoding="utf-8")
        return failure("inductor", what, said, log)
    log.write_text(text, encoding="utf-8")
    lines = [match[0] for match in _ERROR.finditer(text)]
    said = lines[-1] if lines else " ".join(text.splitlines()[-3:]) or "nothing"
    return failure("inductor", what, said, log, _places(program, text))


def _places(program: Program, text: str) -> list[str]:
    executing, target = _EXECUTING.search(text), _TARGET.search(text)
    nodes: list[fx.Node] = []
    if executing:
        nodes = [node for node in program.graph.nodes if node.name == executing[1]]
    elif target:
        nodes = [node for node in program.graph.nodes if str(node.target) == target[1]]
    if not nodes:
        return [f"FX node {executing[1]}"] if executing else []
    first, others = nodes[0], len(nodes) - 1
    alike = f" and {others} like it" if others else ""
    return [source_line(first), f"FX node {first.name} ({first.target}){alike}"]
