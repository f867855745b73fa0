"""The kernels of the mixture of experts: routing, tiles, products, INT4 and not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_kernel_moe_experts import in_fp64
from torch import Tensor

from seekforge.kernels.int4 import Int4, dequantise, quantise
from seekforge.kernels.int4_moe_experts import int4_moe_experts_triton
from seekforge.kernels.moe_config import Config, GemmConfig, GemvConfig
from seekforge.kernels.moe_experts import moe_experts_triton
from seekforge.kernels.moe_route import moe_route_reference, moe_route_triton
from seekforge.kernels.moe_tiles import moe_tiles_triton
from seekforge.kernels.tolerance import assert_close

E, K = 7, 3
run: Any = moe_experts_triton  # called with tuples of tensors
GEMV = GemvConfig(16, 16, 1, 16, 32, 2)
SMALL = GemmConfig(16, 16, 16, 4, 2, 16, 32, 4, 2)


def draw(
    tokens: int, hidden: int, intermediate: int, dtype: torch.dtype, device: str, experts: int = E
) -> tuple[Tensor, ...]:
    """x, weights, indices (of the first `experts`), gate_up, down."""
    random = torch.Generator().manual_seed(tokens + hidden)
    x = torch.randn(tokens, hidden, generator=random)
    weights = torch.rand(tokens, K, generator=random)
    indices = torch.rand(tokens, experts, generator=random).argsort(-1)[..., :K]
    gate_up = 0.3 * torch.randn(E, 2 * intermediate, hidden, generator=random)
    down = 0.3 * torch.randn(E, hidden, intermediate, generator=random)
    made = x.to(dtype), weights, indices, gate_up.to(dtype), down.to(dtype)
    return tuple(t.to(device) for t in made)


def exact(x: Tensor, weights: Tensor, indices: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    given = (t.cpu() for t in (x, weights, indices, gate_up, down))
    return in_fp64(*given).to(x.device, x.dtype)


# experts, groups, groups kept, experts chosen
@pytest.mark.parametrize(
    "experts, groups, kept, top_k",
    [(64, 1, 1, 6), (9, 1, 1, 3), (12, 3, 1, 4), (10, 5, 4, 3), (8, 8, 3, 2), (256, 8, 4, 8),
     (512, 1, 1, 10)],
)  # fmt: skip
@pytest.mark.parametrize("v3", [True, False])
def test_routes_as_the_reference(
    kernel_device: str, poisoned: None, experts: int, groups: int, kept: int, top_k: int, v3: bool
) -> None:
    random = torch.Generator().manual_seed(experts)
    logits = torch.randn(3, 2, experts, generator=random).to(kernel_device)
    bias = torch.randn(experts, generator=random).sub(1).to(kernel_device) if v3 else None
    how: Any = ("softmax", groups, kept, "max", False, 1.0)
    if v3:
        how = ("sigmoid", groups, kept, "top2", True, 2.5)
    right = moe_route_reference(logits, bias, top_k, *how)
    weights, indices = moe_route_triton(logits, bias, top_k, *how)
    order, right_order = indices.argsort(-1), right[1].argsort(-1)
    assert torch.equal(indices.gather(-1, order), right[1].gather(-1, right_order))
    assert_close(weights.gather(-1, order), right[0].gather(-1, right_order), f"{experts=}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_routes_any_layout_and_dtype(
    kernel_device: str, layout: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    logits = layout(torch.randn(4, 11, generator=torch.Generator().manual_seed(0)).to(dtype))
    how: Any = (None, 3, "softmax", 1, 1, "max", True, 1.0)
    right = moe_route_reference(logits.float(), *how)
    weights, indices = moe_route_triton(logits.to(kernel_device), *how)
    assert torch.equal(indices.sort(-1).values.cpu(), right[1].sort(-1).values)
    assert_close(weights.sort(-1).values.cpu(), right[0].sort(-1).values, f"{logits.stride()=}")


def test_of_equal_scores_the_lower_expert(kernel_device: str) -> None:
    """NaN counts as the largest, as in torch.topk, and never leads outside of the experts."""
    logits = torch.tensor([[1.0, 2, 2, 1, 2, 2], [0, 0, math.nan, 0, 0, 1]], device=kernel_device)
    _, indices = moe_route_triton(logits, None, 3, "sigmoid", 1, 1, "max", False, 1.0)
    assert indices.tolist() == [[1, 2, 4], [2, 5, 0]]
    _, indices = moe_route_triton(logits, None, 2, "sigmoid", 3, 1, "top2", False, 1.0)
    assert indices[0].tolist() == [4, 5]
    equal = torch.zeros(1, 6, device=kernel_device)
    _, indices = moe_route_triton(equal, None, 2, "softmax", 3, 2, "max", False, 1.0)
    assert indices.tolist() == [[0, 1]]


@pytest.mark.parametrize("tokens, tile", [(1, 16), (40, 16), (700, 64), (700, 2)])
@pytest.mark.parametrize("same", [True, False])
def test_tiles_hold_every_pair_once(
    kernel_device: str, poisoned: None, tokens: int, tile: int, same: bool
) -> None:
    """Evenly drawn experts, or nearly all pairs with expert 5; several blocks of pairs."""
    random = torch.Generator().manual_seed(tokens)
    indices = torch.randint(0, E - 1, (tokens, K), generator=random)
    if same:
        indices[torch.rand(tokens, K, generator=random) < 0.9] = 5
    pairs, tiles = moe_tiles_triton(indices.to(kernel_device), E, tile)
    assert tiles.shape[0] <= min(tokens * K, E) + tokens * K // tile
    order = indices.flatten().argsort(stable=True)
    assert torch.equal(pairs.cpu().long(), order)
    found: list[int] = []
    done = False
    for expert, first, count, _ in tiles.tolist():
        assert 0 <= count <= tile and not (done and count), "tiles in use come first"
        done = count == 0
        if count:
            assert first == len(found), "tiles follow each other"
            found += pairs[first : first + count].tolist()
            assert (indices.flatten()[found[first:]] == expert).all()
    assert sorted(found) == list(range(tokens * K))


CASES = [(3, GEMV), (41, SMALL)]  # most experts have two tiles, one of them with few pairs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens, config", CASES)
@pytest.mark.parametrize("hidden, intermediate", [(32, 48), (40, 24)])
def test_experts(
    kernel_device: str, poisoned: None, dtype: torch.dtype, tokens: int, config: Config,
    hidden: int, intermediate: int,
) -> None:  # fmt: skip
    """Sizes that divide into blocks, and sizes that do not."""
    given = draw(tokens, hidden, intermediate, dtype, kernel_device)
    y = run(*given, config)
    assert_close(y, exact(*given), f"{tokens=} {config}")


@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_chosen_configurations(kernel_device: str, poisoned: None, tokens: int) -> None:
    """The file's rows, odd sizes, and leading dimensions."""
    x, *given = draw(tokens, 21, 11, torch.float32, kernel_device)
    leading = [t.view(1, tokens, -1) for t in (x, *given[:2])]
    y = run(*leading, *given[2:])
    assert_close(y[0], exact(x, *given), f"{tokens=}")
    assert run(x[:0], *(t[:0] for t in given[:2]), *given[2:]).shape == (
        0,
        21,
    )


@pytest.mark.parametrize("tokens, config", [(1, GEMV), (9, SMALL)])
def test_other_experts_are_not_read(kernel_device: str, tokens: int, config: Config) -> None:
    given = draw(tokens, 32, 16, torch.float32, kernel_device, experts=K)
    right = exact(*given)
    given[3][K:] = given[4][K:] = math.nan
    assert_close(run(*given, config), right, f"{tokens=}")


@pytest.mark.parametrize("tokens, config", [(1, GEMV), (2, SMALL)])
def test_fp16_products_beyond_65504(kernel_device: str, tokens: int, config: Config) -> None:
    """silu(400) * 400 = 160,000 in fp16, which `down` makes small again."""
    half: dict[str, Any] = {"dtype": torch.float16, "device": kernel_device}
    x = torch.ones(tokens, 16, **half)
    gate_up, down = torch.full((4, 32, 16), 25.0, **half), torch.full((4, 16, 16), 2**-9, **half)
    weights = torch.full((tokens, 2), 0.5, device=kernel_device)
    indices = torch.tensor([[3, 1]], device=kernel_device).expand(tokens, 2)
    y = moe_experts_triton(x, weights, indices, gate_up, down, config)
    assert (y == 5000).all(), f"{y=}"


def test_experts_any_strides(kernel_device: str, layout: Callable[[Tensor], Tensor]) -> None:
    x, *given = draw(5, 24, 16, torch.float32, kernel_device)
    laid = [layout(t) for t in (x, *given[:2])]
    right = exact(*(t.contiguous() for t in laid), *given[2:])
    assert_close(run(*laid, *given[2:]), right, f"{laid[0].stride()=}")


def packed(given: tuple[Tensor, ...], group: int, symmetric: bool) -> tuple[Int4, Int4]:
    """gate_up and down; a group that does not divide `down` gives it one group a row."""
    gate_up, down = given[3:]
    wide = down.shape[-1]
    return (
        quantise(gate_up, group, symmetric),
        quantise(down, group if wide % group == 0 else wide, symmetric),
    )


def run_int4(
    given: tuple[Tensor, ...], gate_up: Int4, down: Int4, group: int, config: Config
) -> Tensor:
    """Of x, weights, indices, ...; the rest of `given` is not used."""
    arguments: list[Any] = [*given[:3]]
    for w in (gate_up, down):
        arguments += w.qweight, w.scales, w.zeros
    run: Any = int4_moe_experts_triton
    y: Tensor = run(*arguments, group, config)
    return y


INT4_GEMV = GemvConfig(64, 8, 1, 64, 16, 1)
INT4_TILES = GemmConfig(16, 64, 16, 4, 2, 64, 32, 4, 2)
INT4_CASES = [  # tokens, hidden, intermediate, group, config
    (2, 192, 64, 64, INT4_GEMV),
    (1, 64, 80, 16, INT4_GEMV),  # a block in two experts, two words a group
    (21, 128, 192, 64, INT4_TILES),
    (3, 128, 128, 128, INT4_TILES),
    (1, 64, 64, 64, SMALL),
    (5, 32, 10, 16, SMALL),  # one group of 10: the plain form
    (1, 32, 10, 16, GEMV),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("tokens, hidden, intermediate, group, config", INT4_CASES)
def test_int4_experts(
    kernel_device: str, poisoned: None, dtype: torch.dtype, symmetric: bool, tokens: int,
    hidden: int, intermediate: int, group: int, config: Config,
) -> None:  # fmt: skip
    given = draw(tokens, hidden, intermediate, dtype, kernel_device)
    gate_up, down = packed(given, group, symmetric)
    wide = [dequantise(w, torch.float32) for w in (gate_up, down)]
    if dtype is torch.bfloat16:  # decoded weights may be rounded, or not
        wide = [w.to(dtype) for w in wide]
    right = exact(*given[:3], *wide)
    y = run_int4(given, gate_up, down, group, config)
    assert_close(y, right, f"{tokens=} {group=}")


@pytest.mark.parametrize("tokens, config", [(1, GEMV), (9, SMALL)])
def test_other_int4_experts_are_not_read(kernel_device: str, tokens: int, config: Config) -> None:
    given = draw(tokens, 64, 64, torch.bfloat16, kernel_device, experts=K)
    gate_up, down = packed(given, 64, True)
    right = run_int4(given, gate_up, down, 64, config)
    gate_up.scales[K:] = down.scales[K:] = math.nan
    y = run_int4(given, gate_up, down, 64, config)
    assert torch.equal(y, right) and y.isfinite().all()


@pytest.mark.parametrize("tokens, config", [(1, GEMV), (2, SMALL)])
def test_int4_fp16_products_beyond_65504(kernel_device: str, tokens: int, config: Config) -> None:
    half: dict[str, Any] = {"dtype": torch.float16, "device": kernel_device}
    x = torch.ones(tokens, 64, **half)
    weight = Int4(
        torch.full((4, 128, 32), 0xFF, dtype=torch.uint8, device=kernel_device),  # 7
        torch.ones(4, 128, 1, **half),
    )
    down = Int4(weight.qweight[:, :64].contiguous(), torch.full((4, 64, 1), 2**-14, **half))
    weights = torch.full((tokens, 2), 0.5, device=kernel_device)
    indices = torch.tensor([[3, 1]], device=kernel_device).expand(tokens, 2)
    y = run_int4((x, weights, indices), weight, down, 64, config)
    right = torch.full_like(y, (7 * 64) ** 2 * 64 * 7 * 2**-14)
    assert_close(y, right, f"{tokens=}")
