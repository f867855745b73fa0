"""The door to TensorRT's two products, which share one API: `tensorrt` and `tensorrt-rtx`.

Both are imported here and nowhere else, when first needed. TensorRT keeps **one logger for each
process** while any of its objects lives and ignores every later one; so there is one here too, and
whoever wants to hear it taps it with `capture`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from seekforge.kernels.errors import EngineError
from seekforge.runtime.manifest import BACKENDS

PRODUCTS = ("tensorrt-rtx", "tensorrt")
_ERRORS = ("INTERNAL_ERROR", "ERROR")


def import_tensorrt(product: str) -> ModuleType:
    """The product's module. Raises `EngineError` that names the package to install."""
    assert product in PRODUCTS, product
    module, extra = BACKENDS[product]
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:  # OSError: a shared library it needs is missing
        package = f"'seekforge[{extra}]'" if extra else product
        raise EngineError(
            f"backend {product!r} needs the Python package {module!r}, which cannot be imported "
            f"({error}); pip install {package}"
        ) from None


@dataclass(slots=True)
class Log:
    """What TensorRT said while tapped: (severity, text) pairs, and all of it in a file."""

    messages: list[tuple[str, str]] = field(default_factory=list)
    file: TextIO | None = None

    def add(self, severity: str, text: str) -> None:
        self.messages.append((severity, text))
        if self.file is not None:
            self.file.write(f"[{severity}] {text}\n")

    @property
    def errors(self) -> list[str]:
        return [text for severity, text in self.messages if severity in _ERRORS]

    @property
    def warnings(self) -> list[str]:
        return [text for severity, text in self.messages if severity == "WARNING"]


@cache
def process_logger(product: str) -> Any:
    """The process's one `ILogger` of a product; its `taps` receive every message."""
    trt = import_tensorrt(product)

    class TapLogger(trt.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.taps: list[Log] = []

        def log(self, severity: Any, text: str) -> None:
            for tap in self.taps:
                tap.add(severity.name, text)

    return TapLogger()


@contextmanager
def capture(product: str, path: Path | None = None) -> Iterator[Log]:
    """Collects the product's messages within the `with` block, and writes them to `path`."""
    logger = process_logger(product)
    log = Log(file=path.open("w", encoding="utf-8") if path is not None else None)
    logger.taps.append(log)
    try:
        yield log
    finally:
        logger.taps.remove(log)
        if log.file is not None:
            log.file.close()
