"""Routed and shared experts in one operator, against float64; INT4 on a Hopper GPU or compiled."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from compiled import few_experts
from test_kernel_moe_few import APART, TILES, WIDE, hopper
from test_kernel_moe_triton import GEMV, INT4_GEMV, SMALL, draw, exact, packed
from torch import Tensor
from torch.nn import functional as F

from seekforge.kernels.int4 import Int4, dequantise, quantise
from seekforge.kernels.moe_config import Config, FewConfig, GemvConfig
from seekforge.kernels.shared_experts import (
    int4_moe_shared_experts,
    int4_moe_shared_experts_triton,
    moe_shared_experts,
    moe_shared_experts_triton,
)
from seekforge.kernels.tolerance import assert_close

__all__ = ["hopper"]
run: Any = moe_shared_experts_triton  # called with tuples of tensors
run_int4: Any = int4_moe_shared_experts_triton
Given = tuple[Tensor, ...]


def with_shared(given: Given, width: int) -> Given:
    """What `draw` gives, and gate_up and down of shared experts."""
    x = given[0]
    random = torch.Generator().manual_seed(width)
    hidden, kind = x.shape[-1], {"dtype": x.dtype, "device": x.device}
    gate_up = 0.3 * torch.randn(2 * width, hidden, generator=random)
    down = 0.3 * torch.randn(hidden, width, generator=random)
    return (*given, gate_up.to(**kind), down.to(**kind))


def right(*given: Tensor) -> Tensor:
    kind = {"dtype": given[0].dtype, "device": given[0].device}
    given = tuple(t.cpu() for t in given)
    x, gate_up, down = (t.double() for t in (given[0], *given[5:]))
    gate, up = F.linear(x, gate_up).chunk(2, -1)
    shared = F.linear(F.silu(gate) * up, down)
    x64, *routed = given[:5]
    return (exact(x64.double(), *routed) + shared).to(**kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens, config", [(1, GEMV), (3, GEMV), (21, SMALL)])
@pytest.mark.parametrize("hidden, intermediate, width", [(32, 48, 48), (40, 24, 72), (32, 16, 24)])
def test_experts(
    kernel_device: str, poisoned: None, dtype: torch.dtype, tokens: int, config: Config,
    hidden: int, intermediate: int, width: int,
) -> None:  # fmt: skip
    """One shared expert, several, and a width that is no multiple."""
    given = with_shared(draw(tokens, hidden, intermediate, dtype, kernel_device), width)
    assert_close(run(*given, config), right(*given), f"{tokens=} {config}")


@pytest.mark.parametrize("k", [16, 32, 64])
def test_steps_of_any_size(kernel_device: str, poisoned: None, k: int) -> None:
    """The shared experts' columns are read through in steps of their own: 3 x 24 by 16 to 64."""
    given = with_shared(draw(1, 40, 24, torch.float32, kernel_device), 72)
    assert_close(run(*given, GemvConfig(4, 32, 1, 8, k, 1)), right(*given), f"{k=}")


@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_chosen_configurations(kernel_device: str, poisoned: None, tokens: int) -> None:
    """The file's rows, odd sizes, and leading dimensions."""
    x, *given = with_shared(draw(tokens, 21, 11, torch.float32, kernel_device), 22)
    leading = [t.view(1, tokens, -1) for t in (x, *given[:2])]
    y = run(*leading, *given[2:])
    assert_close(y[0], right(x, *given), f"{tokens=}")
    assert run(x[:0], *(t[:0] for t in given[:2]), *given[2:]).shape == (0, 21)


@pytest.mark.parametrize("tokens, config", [(1, GEMV), (9, SMALL)])
def test_other_experts_are_not_read(kernel_device: str, tokens: int, config: Config) -> None:
    given = with_shared(draw(tokens, 32, 16, torch.float32, kernel_device, experts=3), 32)
    expected = right(*given)
    given[3][3:] = given[4][3:] = math.nan
    assert_close(run(*given, config), expected, f"{tokens=}")


def test_fp16_products_beyond_65504(kernel_device: str) -> None:
    """silu(400) * 400 = 160,000 in fp16, which `down` makes small again: for one token only."""
    half: dict[str, Any] = {"dtype": torch.float16, "device": kernel_device}
    x = torch.ones(1, 16, **half)
    gate_up, down = torch.full((4, 32, 16), 25.0, **half), torch.full((4, 16, 16), 2**-9, **half)
    weights = torch.full((1, 2), 0.5, device=kernel_device)
    indices = torch.tensor([[3, 1]], device=kernel_device)
    shared = gate_up[:2].reshape(64, 16), torch.full((16, 32), 2**-10, **half)
    y = run(x, weights, indices, gate_up, down, *shared, GEMV)
    assert (y == 10000).all(), f"{y=}"


@pytest.mark.parametrize("tokens", [1, 5])
def test_any_strides(kernel_device: str, layout: Callable[[Tensor], Tensor], tokens: int) -> None:
    x, *given = with_shared(draw(tokens, 24, 16, torch.float32, kernel_device), 32)
    laid = [layout(t) for t in (x, *given[:2])]
    expected = right(*(t.contiguous() for t in laid), *given[2:])
    assert_close(run(*laid, *given[2:]), expected, f"{laid[0].stride()=}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 6])
def test_reference(poisoned: None, dtype: torch.dtype, tokens: int) -> None:
    given = with_shared(draw(tokens, 32, 16, dtype, "cpu"), 32)
    assert_close(moe_shared_experts(*given), right(*given), f"{tokens=}")


def int4_arguments(given: Given, group: int, symmetric: bool) -> tuple[list[Any], Given]:
    """What the INT4 operator takes, and `given` with the decoded weights. The shared experts'
    `down` has groups of its own size: half of its width."""
    weights = *packed(given[:5], group, symmetric), *packed_shared(given, group, symmetric)
    parts = [[w.qweight, w.scales, w.zeros] for w in weights]
    arguments = [*given[:3], *parts[0], *parts[1], group, *parts[2], *parts[3]]
    return arguments, (*given[:3], *(dequantise(w, torch.float32) for w in weights))


def packed_shared(given: Given, group: int, symmetric: bool) -> tuple[Int4, Int4]:
    gate_up, down = given[5:]
    return quantise(gate_up, group, symmetric), quantise(down, down.shape[-1] // 2, symmetric)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    "tokens, config",
    [(2, INT4_GEMV), pytest.param(1, APART, marks=pytest.mark.slow), (5, SMALL), (3, None)],
)
def test_int4_elsewhere(
    kernel_device: str, poisoned: None, dtype: torch.dtype, symmetric: bool, tokens: int,
    config: Config | None,
) -> None:  # fmt: skip
    """Where the kernels for few tokens don't serve (groups of 64): separate launches."""
    given = with_shared(draw(tokens, 128, 64, dtype, kernel_device), 128)
    arguments, wide = int4_arguments(given, 64, symmetric)
    expected = right(*wide).to(dtype)
    assert_close(run_int4(*arguments, config), expected, f"{tokens=} {config}")
    cpu = [a.cpu() if isinstance(a, Tensor) else a for a in arguments]
    assert_close(int4_moe_shared_experts(*cpu), expected.cpu(), f"{tokens=} reference")


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("hidden, intermediate, width", [(384, 640, 1280), (768, 256, 768)])
@pytest.mark.parametrize("tokens, config", [(1, APART), (2, WIDE), (3, WIDE), (9, TILES)])
def test_int4_few_tokens(
    poisoned: None, dtype: torch.dtype, symmetric: bool, hidden: int, intermediate: int,
    width: int, tokens: int, config: FewConfig,
) -> None:  # fmt: skip
    """Warps' units that lie in an expert and in the shared ones; groups of 128, and 640 or 384."""
    given = with_shared(draw(tokens, hidden, intermediate, dtype, "cuda"), width)
    arguments, wide = int4_arguments(given, 128, symmetric)
    y = run_int4(*arguments, config)
    assert_close(y, right(*wide).to(dtype), f"{tokens=} {config}")
    assert torch.equal(y, run_int4(*arguments, config)), "two runs differ"


def test_compiled_without_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shared experts' weights are loaded by 16 bytes, too."""
    pytest.importorskip("triton.experimental.gluon", reason="Triton without Gluon")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # the interpreter replaces the language
    cases = [(False, "bf16", False, 2), (True, "bf16", False, 2)]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        first, second = process.map(few_experts, *zip(*cases, strict=True))
    for code, loads in ((first, 2), (second, 3)):
        assert code.count("ld.global.v4.b32") >= loads and "ldmatrix" not in code
