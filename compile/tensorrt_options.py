"""What is asked of a TensorRT engine beside its graph: target GPUs, where its weights are.

In: what the user wrote (`sm_86,8.9`). Out: `TensorRTOptions`, and which compute capabilities the
installed library builds for. Knows nothing of networks and engines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from seekforge.kernels.errors import InputError

_TARGET = re.compile(r"(?:sm_?)?(\d{1,2})\.?(\d)")
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class TensorRTOptions:
    """targets: compute capabilities ("8.9"), for tensorrt-rtx alone.

    strip: the engine is built without its weights, which lie beside it and are put in when it is
    loaded. streaming_bytes: weights that stay on the GPU, the others being fetched from the host's
    memory in every step; None: all stay.
    """

    targets: tuple[str, ...] = ("8.9",)
    strip: bool = False
    streaming_bytes: int | None = None


def parse_targets(text: str) -> tuple[str, ...]:
    """`sm_86,8.9` -> ("8.6", "8.9"): the lowest first, each once. Raises InputError."""
    words = text.replace(" ", ",").split(",")
    found = [(word, _TARGET.fullmatch(word.strip())) for word in words if word.strip()]
    wrong = ", ".join(word for word, match in found if match is None)
    if wrong or not found:
        raise InputError(
            f"--target {wrong or repr(text)}: compute capabilities such as sm_89 or 8.9 were "
            "expected, several with commas: --target sm_86,sm_89"
        )
    return tuple(sorted({f"{match[1]}.{match[2]}" for _, match in found if match}, key=float))


def parse_streaming(gib: float | None) -> int | None:
    """GiB of weights that stay on the GPU -> bytes. Raises InputError for a negative number."""
    if gib is not None and not 0 <= gib < 1 << 20:
        raise InputError(
            f"--weight-streaming {gib}: give the GiB of weights that stay on the GPU, 0 or more"
        )
    return None if gib is None else int(gib * GIB)


def known_targets(trt: Any) -> dict[str, Any]:
    """The compute capabilities that the library builds for -> its own values."""
    members = trt.ComputeCapability.__members__.items()
    return {f"{name[2:-1]}.{name[-1]}": value for name, value in members if name.startswith("SM")}


def unknown_targets(trt: Any, targets: Sequence[str]) -> str | None:
    """What keeps tensorrt-rtx from building for these, by name, with the list of what it knows."""
    known = known_targets(trt)
    unknown = [target for target in targets if target not in known]
    if not unknown and targets:
        return None
    return (
        f"compute capability {', '.join(unknown) or '(none given)'}: tensorrt-rtx builds for "
        f"{', '.join(known)}"
    )
