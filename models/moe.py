"""What a configuration says about its mixture of experts, and what is refused by it.

In: a `PreTrainedConfig`. Out: an `Experts`, all zeros for a dense model. Knows nothing about files
or graphs.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedConfig

from seekforge.kernels.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts and chosen experts a token, shared experts, inner size of one expert, and the indices
    of the layers that have them."""

    num_experts: int = 0
    experts_per_token: int = 0
    num_shared_experts: int = 0
    moe_intermediate_size: int = 0
    layers: tuple[int, ...] = ()


def read_experts(config: PreTrainedConfig) -> Experts:
    """The experts of a configuration; raises `CheckpointError` naming a key that cannot be right.

    Layers as transformers places them: DeepSeek from first_k_dense_replace on, Qwen3-MoE every
    decoder_sparse_step-th that mlp_only_layers does not name.
    """
    indices = range(config.num_hidden_layers)
    shared = 0
    if config.model_type == "qwen3_moe":
        experts, step = config.num_experts, config.decoder_sparse_step
        layers = [i for i in indices if i not in config.mlp_only_layers and (i + 1) % step == 0]
        layers = layers if experts > 0 else []
    elif config.model_type in ("deepseek_v2", "deepseek_v3"):
        experts, shared = config.n_routed_experts, config.n_shared_experts
        layers = [i for i in indices if i >= (config.first_k_dense_replace or 0)]
    else:
        layers = []
    if not layers:
        return Experts()
    chosen = config.num_experts_per_tok or 0
    if not 1 <= chosen <= experts:
        raise CheckpointError(
            f"config.json: num_experts_per_tok {chosen} is outside 1..{experts}, the number of "
            "experts. Correct config.json."
        )
    if config.model_type != "qwen3_moe":
        if shared < 1:
            raise CheckpointError(
                f"config.json: n_shared_experts {shared} is not supported: transformers builds a "
                f"shared expert of size 0 for it; {config.model_type} models have 1 or more."
            )
        _check_groups(config, experts, chosen)
    return Experts(experts, chosen, shared, config.moe_intermediate_size, tuple(layers))


def _check_groups(config: PreTrainedConfig, experts: int, chosen: int) -> None:
    """Groups must divide the experts and leave enough of them to choose from."""
    if config.model_type == "deepseek_v2" and config.topk_method == "greedy":
        return  # chooses among all experts; n_group and topk_group may be null
    groups, kept = config.n_group, config.topk_group
    if not groups or not kept or experts % groups or kept > groups:
        raise CheckpointError(
            f"config.json: n_group {groups} and topk_group {kept} do not fit {experts} experts: "
            "n_group must divide n_routed_experts, and topk_group must be 1 to n_group. For "
            "routing without groups set both to 1."
        )
    size = experts // groups
    if config.model_type == "deepseek_v3" and size < 2:
        raise CheckpointError(
            f"config.json: n_group {groups} leaves one expert a group; {config.model_type} scores "
            "a group by the sum of its two best experts. Correct config.json."
        )
    if chosen > kept * size:
        raise CheckpointError(
            f"config.json: num_experts_per_tok {chosen} is more than the {kept * size} experts "
            f"in topk_group {kept} groups of {size}. Correct config.json."
        )
