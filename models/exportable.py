"""Makes transformers' own modules exportable, through transformers' extension points alone.

Every attention layer becomes one `seekforge::attention` node and no mask is built; nothing of the
model's code is copied or patched. Tried with transformers 5.17 to 5.24.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

import seekforge.kernels.attention
from seekforge.kernels.errors import BuildError

IMPLEMENTATION = "seekforge"


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [batch, heads, seq, head_dim], key and value alike.

    Returns [batch, seq, heads, head_dim]. A sliding window is ignored here because `check_max_len`
    has refused every length at which it would matter.
    """
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if softcap is not None:
        raise BuildError(f"layer {layer}: attention with a soft cap ({softcap}) is not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    attend = seekforge.kernels.attention.attention
    y = attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scale, layer)
    return y, None


def make_exportable(module: nn.Module) -> nn.Module:
    """Switches a transformers model to the `seekforge::attention` operator; returns the same
    module."""
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, lambda *args, **kwargs: None)
    module.config._attn_implementation = IMPLEMENTATION  # type: ignore[union-attr]
    return module
