"""A Triton kernel compiled to PTX for a GPU that need not be here, as TensorRT's plugins take it.

In: a `@jit` function, its arguments' types and constants, a compute capability. Out: PTX whose
entry has exactly the function's arguments. Triton adds two pointers behind them, to scratch memory
that only its own launcher allots; a caller that knows of the arguments alone would leave them
undefined, so they are taken off again, which is refused for a kernel that uses them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from seekforge.kernels.errors import BuildError

WARP = 32
# Of CUDA 12.8, which TensorRT 10.9 comes with: Triton would write the newest that it knows, and an
# older driver refuses that when the engine is loaded.
PTX_VERSION = 87
_ENTRY = re.compile(r"\.visible \.entry (?P<name>\w+)\((?P<body>[^)]*)\)")
_TYPE = re.compile(r"\.param \.(\w+)")
# Triton's types of arguments -> PTX's.
PTX_TYPES = {"*": ("u64", "b64"), "i32": ("u32", "b32")}


@dataclass(frozen=True, slots=True)
class PtxKernel:
    """name: of the entry. shared: bytes of dynamic shared memory. threads: of a block."""

    name: str
    ptx: str
    shared: int
    threads: int


def compile_kernel(
    function: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    target: int,
    *,
    warps: int,
    stages: int,
    ptx_version: int = PTX_VERSION,
) -> PtxKernel:
    """types: Triton's, of the arguments that are not constants ("*fp16", "i32"), all pointers being
    multiples of 16. target: 90 for sm_90. Raises BuildError for a kernel that such a caller cannot
    launch."""
    import triton
    from triton.backends.compiler import GPUTarget

    names = function.arg_names
    pointers = [n for n in names if n not in constants and types[n].startswith("*")]
    source = triton.compiler.ASTSource(
        function,
        {n: "constexpr" if n in constants else types[n] for n in names},
        {(names.index(n),): value for n, value in constants.items()},
        {(names.index(n),): [["tt.divisibility", 16]] for n in pointers},
    )
    options = {
        "num_warps": warps, "num_stages": stages, "ptx_version": ptx_version,
        "enable_fp_fusion": True,
    }  # fmt: skip
    compiled = triton.compile(source, GPUTarget("cuda", target, WARP), options)
    metadata = compiled.metadata
    expected = [types[n] for n in names if n not in constants]
    ptx = without_scratch(compiled.asm["ptx"], metadata.name, expected)
    return PtxKernel(metadata.name, ptx, metadata.shared, metadata.num_warps * WARP)


def parameters(ptx: str, name: str) -> list[str]:
    """PTX types of the entry's parameters, in order."""
    entry = next((m for m in _ENTRY.finditer(ptx) if m["name"] == name), None)
    if entry is None:
        raise BuildError(f"the PTX has no entry {name!r}; Triton's output has changed: report it")
    return _TYPE.findall(entry["body"])


def without_scratch(ptx: str, name: str, types: list[str]) -> str:
    """The PTX with the parameters of `types` (Triton's) alone."""
    found = parameters(ptx, name)
    count = len(types)
    if count > len(found) or any(
        given not in PTX_TYPES[wanted[0] if wanted[0] == "*" else wanted]
        for wanted, given in zip(types, found, strict=False)
    ):
        raise BuildError(
            f"entry {name} takes {', '.join(found)}; {', '.join(types)} were expected: Triton "
            "passes arguments in another way, report it"
        )
    dropped = range(count, len(found))
    used = [f"{name}_param_{i}" for i in dropped if f"[{name}_param_{i}]" in ptx]
    if used:
        raise BuildError(
            f"kernel {name} uses scratch memory ({', '.join(used)}): plugins have none"
        )
    if not dropped:
        return ptx
    entry = next(m for m in _ENTRY.finditer(ptx) if m["name"] == name)
    kept = entry["body"].split(",")[:count]
    return ptx.replace(entry[0], f".visible .entry {name}({','.join(kept).rstrip()}\n)", 1)
