"""What a step of an engine must at least read and compute, from its manifest and weights' header.

Bytes of a decode step: every weight once, but the rows of the embedding that are looked up, and of
the experts those that `batch` tokens are expected to choose (each `top_k` of them, independently);
the cached keys and values of `context` tokens of each sequence. What is written is not counted.
Operations of a prefill: two for each weight of a matrix product and token, the head's for one row;
scores and sums of causal attention.
"""

from __future__ import annotations

from pathlib import Path

from seekforge.runtime.manifest import Manifest
from seekforge.runtime.weights import read_header

EMBEDDING, EXPERTS, HEAD = "embed_tokens", ".experts.", "lm_head"


def decode_bytes(manifest: Manifest, weights: Path, batch: int, context: int) -> float:
    """weights: the engine's safetensors file."""
    header, _ = read_header(weights)
    untied = any(HEAD in name for name in header)
    model, total = manifest.model, 0.0
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        share = 1.0
        if EMBEDDING in name and untied:
            share = min(1.0, batch / entry["shape"][0])
        elif EXPERTS in name:
            share = chosen_share(model["num_experts"], model["experts_per_token"], batch)
        total += share * (end - begin)
    return total + batch * context * manifest.kv.token_bytes


def chosen_share(experts: int, top_k: int, tokens: int) -> float:
    """Expected share of experts that at least one of `tokens` tokens chooses."""
    return 1.0 - (1.0 - top_k / experts) ** tokens


def prefill_flops(manifest: Manifest, tokens: int) -> float:
    """Of one sequence of `tokens` tokens with nothing cached, logits of the last one. Latent
    attention is counted in its decompressed form."""
    model = manifest.model
    embedding = model["vocab_size"] * model["hidden_size"]
    linear = model["parameters"] - embedding * (1 if model["tie_word_embeddings"] else 2)
    if experts := model["num_experts"]:
        inner = 3 * model["hidden_size"] * model["moe_intermediate_size"]
        linear -= model["num_moe_layers"] * (experts - model["experts_per_token"]) * inner
    heads, pairs = model["num_heads"], tokens * (tokens + 1) / 2
    widths = model["head_dim"] + model["v_head_dim"]
    attention = 2 * pairs * heads * widths * model["num_layers"]
    total: float = 2 * tokens * linear + 2 * embedding + attention
    return total


def kind(manifest: Manifest) -> str:
    """int4, or the dtype's short name: the word in a row's name."""
    if manifest.quantization:
        return "int4"
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[manifest.dtype]


def name(manifest: Manifest) -> str:
    """The model in a row's name: type, billions of parameters."""
    return f"{manifest.model['model_type']} {manifest.model['parameters'] / 1e9:.1f}B"
