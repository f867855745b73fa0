"""The eager model that an engine is judged by, in the engine's dtype and in float32.

For an INT4 engine the weights are those that its own decode to; the checkpoint as it is is the
reference of the export alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from seekforge.compile.reference import load_dequantised
from seekforge.compile.weights import Source
from seekforge.models.checkpoint import Checkpoint
from seekforge.models.module import load_eager


@dataclass(frozen=True, slots=True)
class Reference:
    """source: of the engine's weights. quantization: as in the manifest. dtype: the engine's."""

    checkpoint: Checkpoint
    source: Source
    quantization: Mapping[str, Any] | None
    dtype: torch.dtype

    @property
    def routed(self) -> bool:
        """Whether the model has experts."""
        return bool(self.checkpoint.spec.num_experts)

    def module(self, dtype: torch.dtype, rounded: bool) -> nn.Module:
        """transformers' eager model. rounded: with the weights that an INT4 engine stands for."""
        if self.quantization is None or (self.checkpoint.quant is None and not rounded):
            return load_eager(self.checkpoint.path, dtype)
        module = load_dequantised(self.checkpoint, self.source, self.quantization, self.dtype)
        for parameter in module.parameters():  # not module.to: rotary frequencies stay float32
            parameter.data = parameter.data.to(dtype)
        return module

    def logits(self, batches: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Of batches [sequences, length] those in the engine's dtype, and in float32. One model is
        in memory at a time."""
        found = []
        for dtype in dict.fromkeys((self.dtype, torch.float32)):
            module: Any = self.module(dtype, rounded=True)
            with torch.inference_mode():
                found.append([module(ids, use_cache=False).logits.float() for ids in batches])
            del module
        return found[0], found[-1]
