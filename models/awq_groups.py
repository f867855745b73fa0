"""Which weights share the smoothing of one input, by model family: literals.

AWQ divides a linear layer's input channels by s and multiplies the weight's columns by s, which
changes nothing before rounding. The division is done by the weight that makes the input: a norm's
gain, or rows of the linear layer before. Names are those of parameters, relative to a decoder layer
of transformers' module. Knows nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

# How the producer's rows (elements of a norm) lie over the input channels of the readers:
# all: one for one. kv_heads: each KV head's rows serve several query heads, in repeat-each order.
# values: of each head's rows of kv_b the values, after the keys. up: the second half of gate_up,
# whose products with silu(gate) are the input.
Rows = Literal["all", "kv_heads", "values", "up"]


@dataclass(frozen=True, slots=True)
class ScaleGroup:
    """One smoothing: `producer` makes the input that `linears` (quantised) and `others` (not
    quantised, their columns follow) read."""

    producer: str
    linears: tuple[str, ...]
    others: tuple[str, ...] = ()
    rows: Rows = "all"

    @property
    def readers(self) -> tuple[str, ...]:
        return self.linears + self.others


ATTENTION = (
    ScaleGroup(
        "input_layernorm.weight",
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    ),
    ScaleGroup("self_attn.v_proj.weight", ("self_attn.o_proj.weight",), rows="kv_heads"),
)
MLA = (
    ScaleGroup(
        "input_layernorm.weight",
        (
            "self_attn.q_a_proj.weight",  # or, without a query rank,
            "self_attn.q_proj.weight",
            "self_attn.kv_a_proj_with_mqa.weight",
        ),
    ),
    ScaleGroup("self_attn.q_a_layernorm.weight", ("self_attn.q_b_proj.weight",)),
    ScaleGroup("self_attn.kv_a_layernorm.weight", ("self_attn.kv_b_proj.weight",)),
    ScaleGroup("self_attn.kv_b_proj.weight", ("self_attn.o_proj.weight",), rows="values"),
)
DENSE = (
    ScaleGroup("post_attention_layernorm.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    ScaleGroup("mlp.up_proj.weight", ("mlp.down_proj.weight",)),
)
EXPERTS = (
    ScaleGroup(
        "post_attention_layernorm.weight",
        (
            "mlp.experts.gate_up_proj",
            "mlp.shared_experts.gate_proj.weight",
            "mlp.shared_experts.up_proj.weight",
        ),
        others=("mlp.gate.weight",),  # the router
    ),
    ScaleGroup("mlp.experts.gate_up_proj", ("mlp.experts.down_proj",), rows="up"),
    ScaleGroup("mlp.shared_experts.up_proj.weight", ("mlp.shared_experts.down_proj.weight",)),
)
# Queries and keys meet in a product: clipping them for their own sakes hurts it (AutoAWQ, too).
UNCLIPPED = frozenset(
    f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "q_a_proj", "q_b_proj")
)
GROUPS: Mapping[str, tuple[ScaleGroup, ...]] = {
    "llama": ATTENTION + DENSE,
    "qwen2": ATTENTION + DENSE,
    "qwen3": ATTENTION + DENSE,
    "qwen3_moe": ATTENTION + DENSE + EXPERTS,
    "deepseek_v2": MLA + DENSE + EXPERTS,
    "deepseek_v3": MLA + DENSE + EXPERTS,
}


def scale_groups(
    model_type: str, parameters: Collection[str], kept: Collection[str] = ()
) -> list[ScaleGroup]:
    """The groups of a decoder layer that has `parameters`, of which `kept` stay unquantised.

    A dense layer has no experts, a model may have no query rank and no shared experts: what the
    layer lacks is left out. A group whose readers are all kept is dropped.
    """
    found = []
    for group in GROUPS[model_type]:
        present = [name for name in group.readers if name in parameters]
        linears = tuple(name for name in present if name in group.linears and name not in kept)
        others = tuple(name for name in present if name not in linears)
        if linears and group.producer in parameters:
            found.append(replace(group, linears=linears, others=others))
    return found
