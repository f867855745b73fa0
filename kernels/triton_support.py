"""Triton where it is installed, and a clear refusal where it is not.

Kernel files decorate with `jit` and read `tl` from here, so that importing them never needs Triton
(the CPU wheels of torch come without it). Nothing is compiled or probed at import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from seekforge.kernels.errors import SeekforgeError

__all__ = ["jit", "next_power_of_2", "tl"]

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
