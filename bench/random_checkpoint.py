"""Writes a checkpoint of a published model's shapes with random bf16 weights: for measuring memory
and speed, where values don't matter but zeros would flatter.

    python bench/random_checkpoint.py OUT --like qwen2-7b [--layers N] [--tokenizer CHECKPOINT]

One shard a layer, so memory stays at a few layers' weights. Linear weights are normal with standard
deviation 1 / sqrt(in_features), so that activations stay of order 1 through any number of layers.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerFast

from seekforge.models.module import build_module

WRITERS = 4  # shards that are written while the next is drawn
LLAMA = {"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "max_position_embeddings": 32768}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2-7b": LLAMA
    | {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "vocab_size": 152064, "rope_theta": 1e6,
    },
    "llama-8b": LLAMA
    | {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 128256, "rope_theta": 5e5,
    },
    "deepseek-v2-lite": LLAMA
    | {
        "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "num_hidden_layers": 27, "first_k_dense_replace": 1,
        "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1,
        "topk_group": 1, "topk_method": "greedy", "norm_topk_prob": False,
        "routed_scaling_factor": 1.0, "scoring_func": "softmax", "vocab_size": 102400,
    },
}  # fmt: skip


def stored(name: str, shape: torch.Size) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes that published checkpoints store for a parameter: experts one by one."""
    found = re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)", name)
    if not found:
        yield name, tuple(shape)
        return
    for e in range(shape[0]):
        if found[2] == "down_proj":
            yield f"{found[1]}.{e}.down_proj.weight", tuple(shape[1:])
            continue
        for leaf in ("gate_proj", "up_proj"):
            yield f"{found[1]}.{e}.{leaf}.weight", (shape[1] // 2, shape[2])


def draw(name: str, shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    """On the generator's device, then to the CPU: a GPU draws 15 GB in a second, a core in a
    minute."""
    values = torch.randn(shape, generator=random, device=random.device)
    if len(shape) == 1:
        values = values * 0.1 + (0.0 if name.endswith("bias") else 1.0)
    elif "embed_tokens" not in name:
        values /= math.sqrt(shape[-1])
    return values.bfloat16().cpu()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, and an end of text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: index for index, text in enumerate(["<end>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>"
    )


def write(out: Path, like: str, layers: int | None, tokenizer: Path | None) -> int:
    """Writes the checkpoint; returns its bytes. layers: None for the published number; tokenizer:
    a checkpoint whose own to copy, None for one of bytes."""
    settings = dict(SHAPES[like])
    if layers:
        settings["num_hidden_layers"] = layers
    config = AutoConfig.for_model(**settings)
    config.dtype = torch.bfloat16
    out.mkdir(parents=True)
    config.architectures = [type(build_module(config, torch.bfloat16)).__name__]
    config.save_pretrained(out)
    random = torch.Generator("cuda" if torch.cuda.is_available() else "cpu").manual_seed(0)
    shards: dict[str, dict[str, tuple[int, ...]]] = {}
    for parameter, tensor in build_module(config, torch.bfloat16).state_dict().items():
        layer = re.search(r"layers\.(\d+)\.", parameter)
        for name, shape in stored(parameter, tensor.shape):
            shards.setdefault(layer[1] if layer else parameter, {})[name] = shape
    files, total = {}, 0
    with ThreadPoolExecutor(WRITERS) as pool:
        writing: deque[Future[None]] = deque()
        for i, tensors in enumerate(shards.values(), 1):
            file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
            values = {name: draw(name, shape, random) for name, shape in tensors.items()}
            total += sum(value.nbytes for value in values.values())
            files |= dict.fromkeys(values, file)
            writing.append(pool.submit(save_file, values, out / file, {"format": "pt"}))
            if len(writing) > WRITERS:
                writing.popleft().result()
        for rest in writing:
            rest.result()
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    if tokenizer is None:
        byte_tokenizer().save_pretrained(out)
    for file in tokenizer.glob("tokenizer*") if tokenizer else ():
        shutil.copy(file, out)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--like", choices=SHAPES, default="qwen2-7b")
    parser.add_argument("--layers", type=int, help="default: as published")
    parser.add_argument("--tokenizer", type=Path, help="whose to copy (default: bytes)")
    args = parser.parse_args()
    if args.out.exists():
        print(f"error: {args.out} exists; give a new folder", file=sys.stderr)
        return 2
    total = write(args.out, args.like, args.layers, args.tokenizer)
    print(f"{args.out}: {args.like}, {total / 1e9:.2f} GB of random bf16 weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
