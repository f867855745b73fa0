"""Products with each head's own matrix, of rows and of the parts of a split context."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from compiled_mla import append, merged, product
from torch import Tensor

from seekforge.kernels import mla_heads
from seekforge.kernels.mla_heads import (
    FEW,
    columns,
    few,
    head_product,
    merged_product_triton,
    merges_inside,
    product_of_parts,
)
from seekforge.kernels.split_merge import split_merge_triton
from seekforge.kernels.tolerance import assert_close

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    random = torch.Generator().manual_seed(sum(shape))
    return (0.5 * torch.randn(shape, generator=random)).to(device, dtype)


def matrix(heads: int, k: int, n: int, kind: str, dtype: torch.dtype, device: str) -> Tensor:
    """[heads, k, n], as W_UK or W_UV lies in kv_b."""
    if kind == "w_uk":
        return draw(heads, k + 5, n, dtype=dtype, device=device)[:, :k]
    return draw(heads, n + 5, k, dtype=dtype, device=device)[:, 5:].transpose(1, 2)


def right(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("thk,hkn->thn", x.double(), w.double()).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3, 9, 40])
@pytest.mark.parametrize(
    ("heads", "k", "n", "kind"), [(16, 8, 16, "w_uk"), (3, 40, 300, "w_uk"), (5, 48, 12, "w_uv")]
)
def test_product(
    kernel_device: str, poisoned: None, monkeypatch: pytest.MonkeyPatch, tokens: int, heads: int,
    k: int, n: int, kind: str, dtype: torch.dtype,
) -> None:  # fmt: skip
    """x a slice of a projection; a new y, and a given one in any order of dimensions."""
    monkeypatch.setattr(mla_heads, "TILE", 4096)  # several programs for 300 columns
    x = draw(tokens, heads, k + 8, dtype=dtype, device=kernel_device)[..., :k]
    w = matrix(heads, k, n, kind, dtype, kernel_device)
    expected, what = right(x, w), f"{tokens=} {heads=} {k=} {n=} {kind} {dtype}"
    assert few(x) == (tokens <= (1 if dtype == torch.float32 else FEW))
    assert_close(head_product(x, w), expected, what)
    y = x.new_empty(heads, tokens, n).transpose(0, 1)
    head_product(x, w, y)
    assert_close(y, expected, what)


def parts_of(
    tokens: int, heads: int, splits: int, dim: int, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Parts, logs and query_start; of each row other parts are empty and hold NaN."""
    parts = draw(tokens, heads, splits, dim, dtype=torch.float32, device=device)
    logs = 20 * draw(tokens, heads, splits, dtype=torch.float32, device=device)
    row = torch.arange(tokens * heads, device=device).view(tokens, heads, 1)
    split = torch.arange(splits, device=device)
    empty = (split > row % splits) | (split % 7 == 3)
    empty[..., 0] = False
    logs[empty] = -torch.inf
    parts[empty] = torch.nan
    return parts, logs, torch.arange(tokens + 1, device=device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 3, 17, 33, 64])
@pytest.mark.parametrize(
    ("tokens", "heads", "dim", "n"), [(1, 4, 16, 12), (3, 2, 48, 40), (2, 1, 512, 80)]
)
def test_merged_product(
    kernel_device: str, poisoned: None, tokens: int, heads: int, dim: int, n: int, splits: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    parts, logs, starts = parts_of(tokens, heads, splits, dim, kernel_device)
    w = matrix(heads, dim, n, "w_uv", dtype, kernel_device)
    by = (logs.double() - logs.double().amax(-1, keepdim=True)).exp2()
    mixed = (parts.double().nan_to_num() * by[..., None]).sum(2) / by.sum(-1)[..., None]
    expected, what = right(mixed.to(dtype), w), f"{splits=} {tokens=} {heads=} {dim=} {n=} {dtype}"
    y = w.new_empty(tokens, heads, n)
    merged_product_triton(parts, logs, w, y)
    assert_close(y, expected, what)
    merged_rows = w.new_empty(tokens, heads, dim)
    split_merge_triton(parts, logs, merged_rows, starts, by_row=True)
    assert_close(merged_rows, mixed.to(dtype), what)


@pytest.mark.parametrize("most", [0, 1 << 30])
@pytest.mark.parametrize("splits", [0, 5])
def test_both_ways(
    kernel_device: str, poisoned: None, monkeypatch: pytest.MonkeyPatch, splits: int, most: int
) -> None:
    monkeypatch.setattr(mla_heads, "MERGED_BYTES", most)
    parts, logs, starts = parts_of(3, 4, max(1, splits), 32, kernel_device)
    w = matrix(4, 32, 20, "w_uv", torch.float16, kernel_device)
    by = logs.softmax(-1) if splits == 0 else torch.softmax(logs * 0.6931471805599453, -1)
    right_mixed = (parts.nan_to_num() * by[..., None]).sum(2).half()
    mixed = torch.full_like(right_mixed, torch.nan) if splits else right_mixed
    y = w.new_empty(3, 4, 20)
    product_of_parts(parts[:, :, :splits], logs[..., :splits], mixed, w, y, starts)
    assert_close(y, right(right_mixed, w), f"{splits=} {most=}")


def test_choices() -> None:
    """DeepSeek-V2-Lite with one token merges inside; V3's heads, or several tokens, do not."""
    assert merges_inside(1, 16, 64, 512, 128)
    assert not merges_inside(1, 128, 64, 512, 128) and not merges_inside(4, 16, 33, 512, 128)
    assert (columns(128, 512), columns(512, 128), columns(512, 12), columns(4096, 64)) == (
        64, 16, 16, 16,
    )  # fmt: skip


def test_compiled_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in loads of 16 bytes, before the wait for the launch before."""
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # the interpreter replaces the language
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        kinds = ((product, 1), (product, 16), (merged, 64), (append, 0), (append, 1), (append, 16))
        done = {
            f"{kind.__name__} {count}": process.submit(kind, "bf16", count) for kind, count in kinds
        }
    for name, future in done.items():
        code = future.result()
        assert ("mma.sync" in code) == (name in ("product 16", "append 16")), name
        *_, before, _ = code.split("griddepcontrol.wait")  # the append waits in each of its kinds
        assert before.count("ld.global.v4.b32") >= (1 if name == "append 0" else 8), name
