"""Every failure of a build in the user's terms: where, the cause, what to do, and the log's path.

In: what a backend said, or whatever exception came out of it. Out: a `BuildError` of one form:

    tensorrt-rtx refused node 'model.layers.1.self_attn.Attention' (Attention)
      at: modeling_llama.py:294 in forward: … -> FX node … -> ONNX node … -> layer …
      cause: TensorRT's attention has no logit soft cap
      do: build this model for onnxruntime or inductor
      tensorrt-rtx says: …
      log: engines/tensorrt-rtx.log

Knows backends only by name; what their messages mean is data (failures_known.py).
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch

from seekforge.compile.failures_known import known
from seekforge.compile.onnx_nodes import OnnxNodes
from seekforge.compile.steps import Steps
from seekforge.kernels.errors import BuildError, EngineError, SeekforgeError

ROOT = Path(__file__).resolve().parent.parent
OURS = {ROOT / name for name in ("kernels", "models", "passes", "compile", "runtime")}
TORCH = Path(torch.__file__).parent
SAID = 600  # letters of a backend's message that are shown; the log has all
UNKNOWN = (
    "not known: the message is the library's own",
    "read the log; if nothing there is about your model or machine, report it with the log",
)
BUG = (
    "a fault of seekforge itself",
    "report it with the log; another backend may build meanwhile",
)


def failure(
    backend: str, what: str, said: str, log: Path | None = None, at: Sequence[str] = ()
) -> BuildError:
    """The error for what `backend` said. what: the first line, without the backend's name. at: the
    places from the model's source line to the backend's layer; unknown ones are left out."""
    row = known(backend, said)
    cause, advice = (row.cause, row.advice) if row else UNKNOWN
    return worded(f"{backend} {what}", cause, advice, at, f"{backend} says: {said}", log)


def worded(
    title: str,
    cause: str,
    advice: str,
    at: Sequence[str] = (),
    said: str = "",
    log: Path | None = None,
) -> BuildError:
    """The one form of a failure. said: who said what, in the library's own words."""
    said = " ".join(said.split())
    lines = [title]
    if at:
        lines.append(f"  at: {' -> '.join(at)}")
    lines += [f"  cause: {cause}", f"  do: {advice}"]
    if said:
        lines.append(f"  {said[:SAID]}{' …' if len(said) > SAID else ''}")
    if log is not None:
        lines.append(f"  log: {log}")
    return BuildError("\n".join(lines))


@contextmanager
def caught(backend: str, log: Path, steps: Steps, nodes: Path) -> Iterator[None]:
    """Turns whatever a build raises that is not worded yet into a BuildError that names the step,
    and adds its traceback to `log`. nodes: the ONNX file, if there is one by then, whose nodes the
    text may name."""
    log.unlink(missing_ok=True)  # of an earlier build
    try:
        yield
    except EngineError as error:  # an engine that was just built does not open
        _append(log, error)
        raise _reworded(backend, error, log, steps.running, nodes) from error
    except SeekforgeError:
        raise
    except Exception as error:
        _append(log, error)
        raise _reworded(backend, error, log, steps.running, nodes) from error


def _reworded(backend: str, error: Exception, log: Path, step: str, nodes: Path) -> BuildError:
    said = " ".join(f"{type(error).__name__}: {error}".split())
    at, what = list[str](), f"failed in step {step!r}"
    if nodes.is_file():
        model = OnnxNodes(nodes)
        named = model.mentioned(said)
        if named:
            at = model.chain(named[0])
    if known(backend, said) is None and not at:
        at = [line for line in [innermost(error.__traceback__)] if line]
    if known(backend, said) is None and isinstance(error, (AssertionError, KeyError, TypeError)):
        return worded(f"{backend} {what}", *BUG, at, said, log)
    return failure(backend, what, said, log, at)


def export_failure(module: str, error: Exception) -> BuildError:
    """torch.export refused the model: the line of the model's code, the cause, what to do."""
    said = " ".join(str(error).split())
    row = known("export", f"{type(error).__name__} {said}")
    cause, advice = (row.cause, row.advice) if row else UNKNOWN
    line = innermost(error.__traceback__, ours=False)
    at = [line] if line else []
    return worded(f"torch.export of {module} failed", cause, advice, at, f"torch says: {said}")


def explained(error: SeekforgeError) -> str:
    """An engine that cannot be opened, with cause and advice where the library's text is known."""
    row = known("tensorrt", str(error)) if isinstance(error, EngineError) else None
    if row is None:
        return str(error)
    return f"{error}\n  cause: {row.cause}\n  do: {row.advice}"


def innermost(trace: TracebackType | None, ours: bool = True) -> str | None:
    """`file.py:12 in forward: code` of the innermost line that is neither torch's nor ours; ours
    where there is no other, if that is wanted."""
    lines = [f for f in traceback.extract_tb(trace) if not Path(f.filename).is_relative_to(TORCH)]
    lines = [frame for frame in lines if not frame.filename.startswith("<")]
    theirs = [frame for frame in lines if Path(frame.filename).resolve().parent not in OURS]
    for frame in (theirs or lines if ours else theirs)[-1:]:
        name = "/".join(Path(frame.filename).parts[-2:])
        return f"{name}:{frame.lineno} in {frame.name}: {frame.line}"
    return None


def _append(log: Path, error: Exception) -> None:
    try:
        with log.open("a", encoding="utf-8") as file:
            file.writelines(traceback.format_exception(error))
    except OSError:
        return  # the disk may be what failed
