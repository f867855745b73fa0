"""INT4 experts on few tokens by the matrix units; on a Hopper GPU, elsewhere compiled for one."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from compiled import few_experts
from test_kernel_moe_triton import draw, exact, packed, run_int4

from seekforge.kernels.int4 import dequantise
from seekforge.kernels.moe_config import FewConfig
from seekforge.kernels.moe_int4_few import reads
from seekforge.kernels.tolerance import assert_close

APART = FewConfig(0, 16, 1, 4, 2, 16, 1, 8, 3)
WIDE = FewConfig(0, 64, 2, 2, 4, 32, 2, 4, 1)
TILES = FewConfig(8, 16, 1, 2, 8, 64, 4, 1, 11)
LARGE = FewConfig(16, 32, 1, 4, 1, 32, 1, 4, 3)


@pytest.fixture
def hopper() -> None:
    """A GPU for which these kernels are."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    if not reads(torch.empty(1, 128, device="cuda", dtype=torch.bfloat16), 128):
        pytest.skip("no Hopper GPU, or Triton without Gluon")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("hidden, intermediate, group", [(384, 640, 128), (768, 512, 256)])
@pytest.mark.parametrize(
    "tokens, config", [(1, APART), (3, WIDE), (1, TILES), (21, TILES), (29, LARGE)]
)
def test_few_tokens(
    hopper: None, poisoned: None, dtype: torch.dtype, symmetric: bool, hidden: int,
    intermediate: int, group: int, tokens: int, config: FewConfig,
) -> None:  # fmt: skip
    given = draw(tokens, hidden, intermediate, dtype, "cuda")
    gate_up, down = packed(given, group, symmetric)
    wide = [dequantise(w, torch.float32) for w in (gate_up, down)]
    y = run_int4(given, gate_up, down, group, config)
    assert_close(y, exact(*given[:3], *wide), f"{tokens=} {config}")
    assert torch.equal(y, run_int4(given, gate_up, down, group, config)), "two runs differ"


@pytest.mark.parametrize("config", [pytest.param(APART, marks=pytest.mark.slow), TILES])
def test_groups_of_64_are_for_the_others(kernel_device: str, config: FewConfig) -> None:
    given = draw(2, 128, 64, torch.bfloat16, kernel_device)
    gate_up, down = packed(given, 64, True)
    assert not reads(given[0], 64, 64) and not reads(given[0].float(), 128)
    right = exact(*given[:3], *(dequantise(w, torch.float32) for w in (gate_up, down)))
    assert_close(run_int4(given, gate_up, down, 64, config), right, f"{config}")


def test_compiled_without_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads of 16 bytes; weights take no way through shared memory between load and product."""
    pytest.importorskip("triton.experimental.gluon", reason="Triton without Gluon")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # the interpreter replaces the language
    cases = [(False, "bf16", True), (True, "fp16", True), (False, "fp16", False)]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        first, second, apart = process.map(few_experts, *zip(*cases, strict=True))
    assert first.count("mma.sync") == 16 and apart.count("mma.sync") == 16
    assert second.count("mma.sync") == 16  # two planes
    for code in (first, second, apart):
        assert "ld.global.v4.b32" in code and "ldmatrix" not in code
