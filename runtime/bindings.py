"""Tensors made fit to be bound to an engine's inputs by address. Pure.

A backend that reads an address knows nothing of the tensor behind it: another dtype or other
strides would be read as garbage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from seekforge.kernels.errors import EngineError
from seekforge.runtime.manifest import TensorSpec


def bindings(
    specs: Sequence[TensorSpec], given: Mapping[str, Tensor], device: torch.device
) -> dict[str, Tensor]:
    """The engine's inputs in its order, in its dtypes, contiguous, on the device.

    Raises `EngineError` for a missing or unknown input, a dimension
    that contradicts the spec or another input, and an index that its dtype cannot hold.
    """
    if given.keys() != {spec.name for spec in specs}:
        odd = sorted(given.keys() ^ {spec.name for spec in specs})
        raise EngineError(f"the step's inputs and the engine's differ in {', '.join(odd)}")
    sizes: dict[str, int] = {}
    bound = {}
    for spec in specs:
        tensor = given[spec.name]
        wanted = [sizes.get(d, d) if isinstance(d, str) else d for d in spec.shape]
        if tensor.ndim != len(wanted) or any(
            isinstance(d, int) and d != size for d, size in zip(wanted, tensor.shape, strict=True)
        ):
            raise EngineError(
                f"input {spec.name!r} has shape {list(tensor.shape)}; {wanted} was expected"
            )
        sizes |= {d: n for d, n in zip(spec.shape, tensor.shape, strict=True) if isinstance(d, str)}
        bound[spec.name] = _cast(spec, tensor).to(device).contiguous()
    return bound


def _cast(spec: TensorSpec, tensor: Tensor) -> Tensor:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if tensor.dtype == dtype:
        return tensor
    if tensor.is_floating_point() or dtype.is_floating_point:
        raise EngineError(
            f"input {spec.name!r} is {str(tensor.dtype)[6:]}; {spec.dtype} was expected"
        )
    limits = torch.iinfo(dtype)
    if tensor.numel() and not limits.min <= int(tensor.min()) <= int(tensor.max()) <= limits.max:
        raise EngineError(
            f"input {spec.name!r} holds values from {int(tensor.min())} to {int(tensor.max())}, "
            f"which the engine's {spec.dtype} cannot hold"
        )
    return tensor.to(dtype)
