"""Gluon kernels compiled for Hopper, which needs no GPU: what the tests read their PTX from.

Run in a process of its own, by its name: where the tests run, Triton's interpreter replaces the
language.
"""

from __future__ import annotations

from typing import Any

from seekforge.kernels.int4_gemv import few_tokens_kernel
from seekforge.kernels.moe_int4_few import down_few_kernel, gate_up_few_kernel


def compiled(function: Any, flags: dict[str, Any], types: dict[str, str], warps: int) -> str:
    """PTX; flags: constexpr arguments, types: of the others, i32 where not given."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    names = function.arg_names
    source = GluonASTSource(
        function,
        {n: "constexpr" if n in flags else types.get(n, "i32") for n in names},
        {(names.index(name),): value for name, value in flags.items()},
        {(names.index(n),): [["tt.divisibility", 16]] for n in names if n not in flags},
    )
    return str(triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": warps}).asm["ptx"])


def few_tokens(dtype: str, group_size: int) -> str:
    """INT4 linear, one token."""
    flags = {"GROUP": group_size, "BLOCK_M": 1, "BLOCK_N": 16, "ROW_WARPS": 1, "K_WARPS": 8}
    flags |= {"UNROLL": 1, "PREFETCH": False, "ZEROS": True, "BIAS": True, "EVEN": True}
    flags |= {"SPLIT": False}
    types = {"x": "*i64", "qweight": "*i16", "zeros": "*u8", "parts": "*fp32"}
    types |= dict.fromkeys(("scales", "bias", "y"), f"*{dtype}")
    return compiled(few_tokens_kernel, flags, types, 8)


def few_experts(second: bool, half: str, tiles: bool, slices: int = 0) -> str:
    """INT4 experts, the first or the second product, by tiles or pair by pair; slices: of shared
    experts."""
    function: Any = down_few_kernel if second else gate_up_few_kernel
    flags: dict[str, Any] = {"HIDDEN": 512, "INTERMEDIATE": 384, "GROUP": 128, "TOP_K": 2}
    flags |= {"ZEROS": False, "BF16": half == "bf16", "SORTED": tiles, "BLOCK_M": 8 if tiles else 1}
    flags |= {"BLOCK_N": 16, "ROW_WARPS": 1, "K_WARPS": 4, "UNROLL": 1}
    flags |= {"SLICES": slices} | ({"SHARED_GROUP": 384} if second else {})
    types = {"x": "*i64", "qweight": "*i16", "scales": f"*{half}", "zeros": "*u8"}
    types |= {"shared_q": "*i16", "shared_s": f"*{half}", "shared_z": "*u8"}
    types |= {"inner": "*i64" if second else "*bf16", "weights": "*fp32", "indices": "*i64"}
    types |= {"pairs": "*i32", "tiles": "*i32", "y": "*fp32" if tiles else f"*{half}"}
    return compiled(function, flags, types, 4)
