"""The linear operator: torch's for several tokens, a kernel of its own for one on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import seekforge.kernels as kernels
from seekforge.compile.inductor_code import choose_code
from seekforge.kernels.linear import linear, linear_triton
from seekforge.kernels.linear_few import FewRows, few_config, few_rows
from seekforge.kernels.linear_one import One, one_row
from seekforge.kernels.tolerance import assert_close
from seekforge.kernels.tuning import rows as rows_of
from seekforge.kernels.tuning import smallest

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(*shape: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (0.5 * torch.randn(shape, generator=generator)).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
# Out of 8 values a tile: one row left over, fewer than a tile; in: a part of a tile, several steps.
@pytest.mark.parametrize(("in_features", "out_features"), [(72, 17), (1040, 3), (2048, 8)])
@pytest.mark.parametrize("config", [One(8, 256, 1, 1), One(2, 512, 2, 4), One(1, 256, 4, 2)])
def test_one_row(
    kernel_device: str, poisoned: None, dtype: torch.dtype, with_bias: bool, in_features: int,
    out_features: int, config: One,
) -> None:  # fmt: skip
    x = draw(in_features, dtype=dtype, device=kernel_device)
    weight = draw(out_features, in_features, dtype=dtype, device=kernel_device)
    bias = draw(out_features, dtype=dtype, device=kernel_device) if with_bias else None
    y = x.new_empty(out_features)
    one_row(x, weight, bias, y, config)
    assert_close(y, F.linear(x, weight, bias), f"{config}, bias {with_bias}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [2, 7, 32])
@pytest.mark.parametrize("splits", [1, 3, 64])  # 64: fewer tiles than programs
def test_few_rows(
    kernel_device: str, poisoned: None, dtype: torch.dtype, rows: int, splits: int
) -> None:
    x = draw(rows, 328, dtype=dtype, device=kernel_device)
    weight = draw(70, 328, dtype=dtype, device=kernel_device)
    for bias in (None, draw(70, dtype=dtype, device=kernel_device)):
        y = x.new_empty(rows, 70)
        few_rows(x, weight, bias, y, FewRows(32, 64, 3, 4, splits))
        assert_close(y, F.linear(x, weight, bias), f"{bias is None}")


def test_few_rows_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the smallest layer of the file that is not smaller; without a tile cuBLAS serves."""
    tile = {"block_n": 16, "block_k": 32, "stages": 2, "warps": 2, "splits": 2}
    table = [
        {"rows": 32, "in_features": 64, "out_features": 64, **tile},
        {"rows": 32, "in_features": 64, "out_features": 32, "block_n": 0},
        {"rows": 8, "in_features": 64, "out_features": 64, "block_n": 0},
    ]
    monkeypatch.setattr("seekforge.kernels.tuning.rows", lambda op: table)
    choose = few_config.__wrapped__  # not what was found in the real table
    assert choose(8, 64, 64) is None and choose(9, 64, 65) is None
    assert choose(33, 64, 64) is None and choose(9, 64, 30) is None
    assert choose(9, 64, 64) == FewRows(16, 32, 2, 2, 2)


def test_few_rows_only_where_their_tiles_fit(
    kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file's tiles are of two-byte values in Hopper's shared memory: the largest take 123 kB,
    twice that in fp32, which no GPU has."""
    for found in rows_of("linear_few"):
        tile = 2 * found["stages"] * found["block_k"] * (found["block_n"] + 32)
        assert tile <= 227 << 10, f"{found}"
    called: list[torch.dtype] = []
    monkeypatch.setattr(kernels.linear, "few_rows", lambda x, *rest: called.append(x.dtype))
    monkeypatch.setattr(kernels.linear, "is_hopper", lambda device: True)
    for dtype in DTYPES:
        x = draw(24, 5000, dtype=dtype, device=kernel_device)
        linear_triton(x, draw(16, 5000, dtype=dtype, device=kernel_device), None)
    assert called == [torch.bfloat16, torch.float16]
    monkeypatch.setattr(kernels.linear, "is_hopper", lambda device: False)
    linear_triton(x, draw(16, 5000, dtype=x.dtype, device=kernel_device), None)
    assert len(called) == 2


def test_rows_of_the_file_are_found() -> None:
    for op in ("linear_one", "linear_few"):
        for found in rows_of(op):
            limits = ("rows", "in_features", "out_features")
            sizes = {name: found[name] for name in limits if name in found}
            assert smallest(op, **sizes) is found, f"{op} {sizes}"


def test_rows_of_any_number(kernel_device: str, poisoned: None) -> None:
    weight = draw(24, 40, dtype=torch.bfloat16, device=kernel_device)
    for shape in ((1, 40), (1, 1, 40), (40,), (3, 40), (2, 2, 40), (0, 40)):
        x = draw(*shape, dtype=torch.bfloat16, device=kernel_device)
        y = linear_triton(x, weight, None)
        assert y.shape == (*shape[:-1], 24)
        assert_close(y, F.linear(x, weight), f"{shape}")


def test_strides_are_left_to_torch(kernel_device: str) -> None:
    x = draw(1, 80, dtype=torch.float32, device=kernel_device)[:, ::2]
    weight = draw(40, 24, dtype=torch.float32, device=kernel_device).T
    assert_close(linear_triton(x, weight, None), F.linear(x, weight), "strides")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_router_in_fp32(kernel_device: str, dtype: torch.dtype, tokens: int) -> None:
    """Its input is widened inside, which is exact: equal to a cast and a product in fp32."""
    x = draw(tokens, 64, dtype=dtype, device=kernel_device)
    weight = draw(10, 64, dtype=torch.float32, device=kernel_device)
    y = linear_triton(x, weight, None)
    assert y.dtype == torch.float32
    assert_close(y, F.linear(x.float(), weight), f"{tokens} tokens")


class Two(nn.Module):
    """A router's cast, which goes, and a cast to a lower dtype, which stays."""

    def forward(self, x: Tensor, wide: Tensor, narrow: Tensor) -> tuple[Tensor, Tensor]:
        router = F.linear(x.to(torch.float32), wide)
        return router, F.linear(router.to(torch.bfloat16), narrow)


def test_operator_in_packages() -> None:
    given = (
        draw(3, 16, dtype=torch.bfloat16), draw(8, 16, dtype=torch.float32),
        draw(4, 8, dtype=torch.bfloat16),
    )  # fmt: skip
    graph = torch.export.export(Two(), given).module()
    expected = graph(*given)
    choose_code(graph, "cuda", one_token=False)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    kinds = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert kinds.count(linear) == 2 and kinds.count(torch.ops.aten.to.dtype) == 1
    assert all(map(torch.equal, graph(*given), expected))
