"""The GPU kernels behind int4_linear: each against the decoded weight, and the choice among them.

The Gluon kernels run on a GPU only; here they are compiled for one.
"""

from __future__ import annotations

import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from compiled import few_tokens
from torch import Tensor

from seekforge.kernels import int4_gemm_plan, int4_layout
from seekforge.kernels.int4 import Int4, dequantise, quantise
from seekforge.kernels.int4_gemm_dense import decode_weight
from seekforge.kernels.int4_gemm_hopper import Many
from seekforge.kernels.int4_gemm_merge import merge_parts
from seekforge.kernels.int4_gemm_plan import DEFAULT, Plan, as_plan, plan
from seekforge.kernels.int4_gemv import Few
from seekforge.kernels.int4_layout import readable, supports
from seekforge.kernels.int4_linear import int4_linear_planned, int4_linear_triton
from seekforge.kernels.tolerance import assert_close
from seekforge.kernels.tuning import rows as rows_of

FEW = [Few(16, 1, 8, 2, False), Few(32, 1, 4, 1, True), Few(64, 2, 4, 1, False, 3)]
MANY = [
    Many(64, 64, 4),
    Many(128, 128, 4),
    Many(128, 32, 4, 3),
    Many(64, 16, 3),
    Many(128, 256, 3),
]
# rows, out_features, in_features, group_size; units that are not full, rows of a block that are not
CASES = [
    (1, 300, 1024, 128),
    (7, 136, 2048, 64),
    (16, 520, 1152, 128),
    (3, 96, 1056, 32),
    (33, 257, 1088, 64),
    (130, 384, 1536, 256),
]


def draw(
    rows: int, n: int, k: int, group_size: int, dtype: torch.dtype, symmetric: bool
) -> tuple[Tensor, Int4, Tensor]:
    random = torch.Generator().manual_seed(rows + n + k)
    x = torch.randn(rows, k, generator=random).to(dtype)
    weight = quantise(torch.randn(n, k, generator=random).to(dtype), group_size, symmetric)
    return x, weight, torch.randn(n, generator=random).to(dtype)


@pytest.fixture
def hopper() -> None:
    """A GPU for which the Gluon kernels are."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    if not supports(torch.empty(1, 128, device="cuda", dtype=torch.bfloat16), 128):
        pytest.skip("no Hopper GPU, or Triton without Gluon")


def test_merge_parts(kernel_device: str, poisoned: None) -> None:
    for splits, rows, n in ((2, 3, 700), (5, 1, 33)):
        parts = torch.randn(splits, rows, n, device=kernel_device)
        bias = torch.randn(n, device=kernel_device).bfloat16()
        for b in (bias, None):
            y = torch.empty(rows, n, device=kernel_device, dtype=torch.bfloat16)
            merge_parts(parts, b, y)
            right = parts.sum(0) + (0 if b is None else b.float())
            assert_close(y, right.bfloat16(), f"{splits=} {rows=} {n=}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k", "group_size"), [(65, 320, 64), (24, 72, 36), (3, 1088, 32)])
def test_decoded_weight(
    kernel_device: str, poisoned: None, dtype: torch.dtype, n: int, k: int, group_size: int
) -> None:
    for symmetric in (True, False):
        x, w, _ = draw(1, n, k, group_size, dtype, symmetric)
        zeros = None if w.zeros is None else w.zeros.to(kernel_device)
        given = Int4(w.qweight.to(kernel_device), w.scales.to(kernel_device), zeros)
        decoded = decode_weight(given, x.to(kernel_device))
        assert torch.equal(decoded.cpu(), dequantise(w)), f"{symmetric=}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "n", "k", "group_size"), CASES)
def test_hopper_kernels(
    hopper: None, poisoned: None, dtype: torch.dtype, rows: int, n: int, k: int, group_size: int
) -> None:
    configs: list[Plan] = [*(FEW if rows <= 33 else []), *(MANY if rows > 3 else []), None]
    for i, config in enumerate(configs):
        symmetric, with_bias = i % 2 == 0, i % 3 != 1
        x, w, bias = draw(rows, n, k, group_size, dtype, symmetric)
        right = x.float() @ dequantise(w, torch.float32).T + (bias.float() if with_bias else 0)
        args = (x, w.qweight, w.scales, w.zeros, bias if with_bias else None)
        on_gpu: list[Any] = [None if t is None else t.cuda() for t in args]
        given, q, s, z, b = on_gpu
        y = int4_linear_planned(given, q, s, z, b, config)
        assert_close(y.cpu(), right.to(dtype), f"{config=} {symmetric=} {with_bias=}")
        again = int4_linear_planned(given, q, s, z, b, config)
        assert torch.equal(y, again), f"{config=}: two runs differ"


@pytest.mark.gpu
def test_strided_and_misaligned(hopper: None, poisoned: None) -> None:
    """x with rows apart, with columns apart, and from an odd address."""
    _, w, bias = draw(5, 100, 256, 64, torch.bfloat16, False)
    assert w.zeros is not None
    q, s, z, b = (t.cuda() for t in (w.qweight, w.scales, w.zeros, bias))
    wide = torch.randn(5, 600, device="cuda").bfloat16()
    for x in (wide[:, :256], wide[:, 1:257], wide[:, ::2][:, :256], wide.T[:256].T):
        right = x.float() @ dequantise(w, torch.float32).cuda().T + b.float()
        y = int4_linear_triton(x, q, s, z, b, 64)
        assert_close(y, right.bfloat16(), f"{x.stride()=} {x.storage_offset()=}")


@pytest.mark.gpu
def test_in_a_cuda_graph(hopper: None) -> None:
    x, w, _ = draw(1, 512, 512, 128, torch.bfloat16, True)
    x, q, s = x.cuda(), w.qweight.cuda(), w.scales.cuda()
    int4_linear_triton(x, q, s, None, None, 128)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):  # each reads what the launch before it writes
            y = int4_linear_triton(x, q, s, None, None, 128)
            x = y / 64
    graph.replay()
    torch.cuda.synchronize()
    right = draw(1, 512, 512, 128, torch.bfloat16, True)[0].cuda()
    for _ in range(3):
        eager = int4_linear_triton(right, q, s, None, None, 128)
        right = eager / 64
    assert torch.equal(y, eager)


def test_readable_copies_only_what_it_must() -> None:
    wide = torch.randn(4, 64).bfloat16()
    for x, same in ((wide, True), (wide[:, :32], True), (wide[:, 4:36], True)):
        assert (readable(x).data_ptr() == x.data_ptr()) is same
    for x in (wide[:, 1:33], wide[:, ::2], wide.T):
        y = readable(x)
        assert torch.equal(x, y) and y.stride(1) == 1
        assert y.view(torch.int64).shape == (x.shape[0], x.shape[1] // 4)


def test_supports(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    x = torch.empty(2, 256, dtype=torch.bfloat16)
    assert not supports(x, 128)  # a CPU
    monkeypatch.setattr(int4_layout, "overlaps_launches", lambda device: True)
    assert supports(x, 128) and supports(x, 64) and supports(x[:, :96], 32) and supports(x, 256)
    assert not supports(x, 16) and not supports(x[:, :72], 36) and not supports(x[:, :48], 16)
    assert not supports(x.float(), 128)


def test_plan_takes_the_nearest_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {"kernel": "few", "row_warps": 1, "k_warps": 8, "unroll": 1, "prefetch": False}
    many = {"kernel": "many", "block_n": 64, "block_m": 64, "stages": 4}
    rows = [
        {"rows": 1, "out_features": 4096, "in_features": 4096, **few, "block_n": 16},
        {"rows": 1, "out_features": 30000, "in_features": 4096, **few, "block_n": 32},
        {"rows": 64, "out_features": 4096, "in_features": 4096, **many},
        {"rows": None, "out_features": 4096, "in_features": 4096, "kernel": "dense"},
    ]
    monkeypatch.setattr(int4_gemm_plan, "rows_of", lambda op: rows)
    plan.cache_clear()
    assert plan(1, 5000, 4096) == Few(16, 1, 8, 1, False)
    assert plan(1, 20000, 3584) == Few(32, 1, 8, 1, False)
    assert plan(2, 20000, 3584) == Many(64, 64, 4)
    assert plan(65, 4096, 4096) is None
    monkeypatch.setattr(int4_gemm_plan, "rows_of", lambda op: [])
    plan.cache_clear()
    assert plan(1, 4096, 4096) == DEFAULT[0][1]
    plan.cache_clear()


def test_rows_of_the_file_are_plans() -> None:
    rows = rows_of("int4_linear")
    configs = [as_plan(row) for row in rows] + [config for _, config in DEFAULT]
    for config in configs:
        if isinstance(config, Few):
            assert config.block_n >= 16 * config.row_warps, config
            assert config.k_warps * config.row_warps <= 32, config
        if isinstance(config, Many):
            shared = config.stages * (64 * config.block_n + 256 * config.block_m)
            assert config.stages >= 3 and shared <= 226 * 1024, config
            assert config.block_n in (64, 128), config
    assert not rows or math.inf in [row["rows"] or math.inf for row in rows], "no row for many rows"


def test_compiled_without_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads of 16 bytes; weights take no way through shared memory between load and product."""
    pytest.importorskip("triton.experimental.gluon", reason="Triton without Gluon")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # the interpreter replaces the language
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        done = list(process.map(few_tokens, ("bf16", "fp16"), (128, 64)))
    for code in done:
        assert code.count("mma.sync") == 8
        assert "ld.global.v4.b32" in code and "ldmatrix" not in code
