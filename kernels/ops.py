"""Registration of seekforge's operators with torch: one call per operator.

An operator has a schema, an implementation for the CPU (the torch reference), one for CUDA (the
Triton launcher, else the reference), and a fake that gives shapes and dtypes. Registered below
autograd with plain `torch.library` calls: they cost less per call than `torch.library.custom_op`,
which matters at batch 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library: Any = torch.library.Library("seekforge", "DEF")  # type: ignore[no-untyped-call]


def register(
    schema: str,
    *,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    cuda: Callable[..., Any] | None = None,
) -> torch._ops.OpOverload:
    """Defines `seekforge::<schema>` and returns its overload.

    reference: implementation for CPU tensors, and for CUDA where `cuda` is None.
    fake: same signature, returns tensors of the right shape, dtype and device without data.
    """
    name = schema.split("(")[0]
    _library.define(schema)
    _library.impl(name, reference, "CPU")
    _library.impl(name, cuda or reference, "CUDA")
    _library._register_fake(name, fake)
    overload = getattr(torch.ops.seekforge, name).default
    assert isinstance(overload, torch._ops.OpOverload)
    return overload
