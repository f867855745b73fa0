"""The launches around latent attention compiled for Hopper, which needs no GPU (compiled.py has
Gluon's)."""

from __future__ import annotations

from typing import Any

from seekforge.kernels.mla_append import mla_append_kernel
from seekforge.kernels.mla_heads import head_product_kernel, merged_product_kernel

ODD = ("tokens", "splits", "eps")  # of the arguments all others are multiples of 16


def compiled(function: Any, flags: dict[str, Any], types: dict[str, str], warps: int) -> str:
    """PTX; flags: constexpr arguments, types: of the others, i32 where not given."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = function.arg_names
    source = ASTSource(
        function,
        {n: "constexpr" if n in flags else types.get(n, "i32") for n in names},
        {(names.index(name),): value for name, value in flags.items()},
        {(names.index(n),): [["tt.divisibility", 16]] for n in names if n not in {*flags, *ODD}},
    )
    return str(triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": warps}).asm["ptx"])


def append(dtype: str, tokens: int) -> str:
    """DeepSeek-V2-Lite's; 0 tokens: without the product."""
    flags = {"HEADS": 16, "GROUP": 16, "NOPE": 128, "NOPE_PAD": 128, "RANK": 512, "RANK_PAD": 512}
    flags |= {"ROPE": 64, "PAIRS": 32, "BLOCK_SIZE": 64, "BLOCK_N": 64, "BLOCK_T": tokens}
    flags |= {"INTERLEAVED": True, "OVERLAP": True}
    types = {"cos": "*fp32", "sin": "*fp32", "positions": "*i64", "slot_mapping": "*i64"}
    names = "q_nope q_rope latent k_rope weight pool kv_b turned q_latent"
    types |= dict.fromkeys(names.split(), f"*{dtype}") | {"eps": "fp32"}
    return compiled(mla_append_kernel, flags, types, 4)


def product(dtype: str, tokens: int) -> str:
    """W_UV of DeepSeek-V2-Lite."""
    flags = {"K": 512, "N": 128, "K_PAD": 512, "BLOCK_N": 16, "BLOCK_T": tokens, "OVERLAP": True}
    types = dict.fromkeys(("x", "w", "y"), f"*{dtype}")
    return compiled(head_product_kernel, flags | {"w_k": 1}, types, 4)


def merged(dtype: str, splits: int) -> str:
    """The same of the parts of a context; splits: a power of two."""
    flags = {"K": 512, "N": 128, "K_PAD": 512, "BLOCK_N": 32, "SPLITS": splits, "OVERLAP": True}
    types = {"parts": "*fp32", "logs": "*fp32", "w": f"*{dtype}", "y": f"*{dtype}"}
    return compiled(merged_product_kernel, flags | {"STEP": min(16, splits), "w_k": 1}, types, 8)
