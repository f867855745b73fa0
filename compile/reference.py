"""The dequantised reference: transformers' eager model with the weights an INT4 engine stands for.

What an INT4 engine must equal is not the checkpoint but what its quantised weights decode to. In: a
checkpoint, the source of its (smoothed) tensors, the manifest's account. Out: an fp32 module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from seekforge.compile.weights import Source
from seekforge.kernels.int4 import dequantise
from seekforge.models.checkpoint import Checkpoint, tensors_for_parameter
from seekforge.models.module import build_module


def load_dequantised(
    checkpoint: Checkpoint, source: Source, quantization: Mapping[str, Any], dtype: torch.dtype
) -> nn.Module:
    """transformers' eager module in fp32. quantization: as in the manifest; dtype: the engine's,
    in which its scales are stored."""
    sizes: Mapping[str, int] = quantization["tensors"]

    def value(name: str) -> Tensor:
        if name not in sizes:
            return source.read(name).float()
        packed = source.int4(name, sizes[name], quantization["symmetric"], dtype)
        return dequantise(packed, dtype).float()

    module: Any = build_module(checkpoint.config, torch.float32)
    weights = {}
    for fqn, parameter in module.state_dict().items():
        parts = [value(name) for name in tensors_for_parameter(checkpoint, fqn)]
        weights[fqn] = torch.cat(parts).view(parameter.shape) if len(parts) > 1 else parts[0]
    module.load_state_dict(weights, assign=True)
    module.set_attn_implementation("eager")
    return module  # type: ignore[no-any-return]
