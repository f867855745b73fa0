"""Triton where it is installed, and a clear refusal where it is not.

Kernel files decorate with `jit` and read `tl` from here, so that importing them never needs Triton
(the CPU wheels of torch come without it). Nothing is compiled or probed at import.

Kernels that name the registers their values lie in are written in Gluon, Triton's lower level:
`gluon_jit` and `gl`. Triton's interpreter does not run them; each has a plain form beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from seekforge.kernels.errors import SeekforgeError

__all__ = ["async_load", "constexpr_function", "gl", "gluon_jit", "jit", "next_power_of_2", "tl"]

try:
    import triton
    import triton.language as tl

    jit: Callable[..., Any] = triton.jit
    next_power_of_2: Callable[[int], int] = triton.next_power_of_2
except ImportError:
    triton = tl = None

    class _Missing:
        def __init__(self, kernel: Callable[..., Any]) -> None:
            self.name = kernel.__name__

        def __getitem__(self, grid: object) -> Callable[..., Any]:
            raise SeekforgeError(
                f"kernel {self.name} needs Triton, which is not installed: "
                "pip install 'seekforge[gpu]' (or pass CPU tensors, which use the torch reference)"
            )

    jit = _Missing

    def next_power_of_2(n: int) -> int:
        return 1 << (n - 1).bit_length()


try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl

    gluon_jit: Callable[..., Any] = gluon.jit
    constexpr_function: Callable[..., Any] = gluon.constexpr_function
    _async_copy = gl.nvidia.ampere.async_copy
    # global memory -> shared memory, in the background; the name changed after Triton 3.6
    async_load: Any = getattr(_async_copy, "async_load", None)
    async_load = async_load or _async_copy.async_copy_global_to_shared
except ImportError:
    gl = async_load = None
    gluon_jit = _Missing if triton is None else jit

    def constexpr_function(f: Callable[..., Any]) -> Callable[..., Any]:
        return f
