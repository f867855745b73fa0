"""Makes transformers' own modules exportable, through transformers' extension points alone.

Every attention layer becomes one `seekforge::attention` node, the experts of every MoE layer one
`seekforge::moe_experts` node, and no mask is built; nothing of the model's code is copied or
patched. Tried with transformers 5.17 to 5.24.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.activations import SiLUActivation
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation
from transformers.masking_utils import AttentionMaskInterface

import seekforge.kernels.attention
import seekforge.kernels.moe_experts
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


def _experts(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """transformers' experts function: hidden_states [tokens, hidden], the rest [tokens, top_k]."""
    gate_up, down = module.gate_up_proj, module.down_proj
    run = seekforge.kernels.moe_experts.moe_experts
    y: Tensor = run(hidden_states, top_k_weights, top_k_index, gate_up, down)
    return y


def _refuse_experts(name: str, experts: nn.Module) -> None:
    """Raises BuildError where `moe_experts` does not compute what these experts do."""
    gating = type(experts)._apply_gate.__module__  # type: ignore[attr-defined]
    found = {
        "biases": experts.has_bias,
        "no gate": not experts.has_gate,
        "transposed weights": experts.is_transposed,
        "interleaved gate and up rows": not experts.is_concatenated,
        "a norm behind each expert": getattr(experts, "has_post_expert_norm", False),
        "a gating function of their own": gating != use_experts_implementation.__module__,
    }
    activation = type(getattr(experts, "act_fn", None))
    found[f"activation {activation.__name__}"] = activation not in (nn.SiLU, SiLUActivation)
    unsupported = [what for what, present in found.items() if present]
    if unsupported:
        raise BuildError(
            f"{name} ({type(experts).__name__}): experts with {', '.join(unsupported)} are not "
            "supported; expected down(silu(gate(x)) * up(x)) without biases. This model cannot be "
            "built."
        )


def make_exportable(module: nn.Module) -> nn.Module:
    """Switches a transformers model to the operators `seekforge::attention` and, where it has
    experts, `seekforge::moe_experts`; returns the same module.

    Raises BuildError for experts that the operator cannot compute.
    """
    experts = {name: part for name, part in module.named_modules() if hasattr(part, "_apply_gate")}
    if experts:
        for name, part in experts.items():
            _refuse_experts(name, part)
        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts)
        module.set_experts_implementation(IMPLEMENTATION)  # type: ignore[operator]
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, lambda *args, **kwargs: None)
    module.config._attn_implementation = IMPLEMENTATION  # type: ignore[union-attr]
    return module
