"""The CUDA C++ attention kernels: how one is chosen and built, and on a Hopper GPU its results."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from seekforge.kernels import hopper, paged_mla_decode, paged_prefill
from seekforge.kernels.paged_mla_hopper import aligned, box_tokens, paged_mla_hopper, split_count
from seekforge.kernels.paged_prefill_hopper import paged_prefill_hopper
from seekforge.kernels.tuning import Config

Make = Callable[..., SimpleNamespace]
Patch = pytest.MonkeyPatch
HALF = [torch.bfloat16, torch.float16]


@pytest.fixture
def hopper_gpu() -> str:
    if not torch.cuda.is_available() or not hopper.is_hopper(torch.device("cuda", 0)):
        pytest.skip("no Hopper GPU")
    if hopper.compiler() is None:
        pytest.skip("no nvcc")
    assert hopper.prepare(torch.device("cuda", 0)), "a kernel was not built"
    return "cuda"


def spoil(pool: torch.Tensor, case: SimpleNamespace) -> None:
    """NaN in every slot without a token."""
    size = pool.shape[1]
    used = torch.zeros(pool.shape[:2], dtype=torch.bool, device=pool.device)
    for table, length in zip(case.block_tables, case.context_lens.tolist(), strict=True):
        at = torch.arange(length, device=pool.device)
        used[table[at // size], at % size] = True
    pool[~used] = torch.nan


def relative(y: torch.Tensor, exact: torch.Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm())


PREFILLS = [  # (past, new) of each sequence, block size, heads, KV heads, dtype
    ([(0, 1)], 64, 4, 4, torch.bfloat16),
    ([(0, 300)], 64, 32, 8, torch.bfloat16),
    ([(130, 77), (5, 2), (0, 40), (300, 9)], 64, 14, 2, torch.bfloat16),
    ([(513, 200), (0, 31)], 128, 8, 1, torch.float16),
    ([(100, 1500), (0, 0), (64, 64)], 128, 24, 8, torch.float16),
    ([(100, 1500), (0, 0), (64, 64)], 256, 24, 8, torch.float16),
    ([(100, 500)], 16, 4, 4, torch.bfloat16),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("chunks", "block_size", "heads", "kv_heads", "dtype"), PREFILLS)
def test_prefill(
    cached_sequences: Make, hopper_gpu: str, chunks: list[tuple[int, int]],
    block_size: int, heads: int, kv_heads: int, dtype: torch.dtype,
) -> None:  # fmt: skip
    case = cached_sequences(
        chunks, block_size=block_size, heads=heads, kv_heads=kv_heads, qk_dim=128, v_dim=128,
        dtype=dtype, device=hopper_gpu,
    )  # fmt: skip
    for pool, new in ((case.k_pool, case.k), (case.v_pool, case.v)):
        pool.flatten(0, 1)[case.slot_mapping] = new
        spoil(pool, case)
    q = torch.nn.functional.pad(case.q, (8, 16))[..., 8:-16]
    y = torch.full_like(case.q, torch.nan)
    assert paged_prefill_hopper(
        q, case.k_pool, case.v_pool, case.block_tables, case.context_lens, case.query_start,
        case.scale, y, 1,
    )  # fmt: skip
    assert relative(y, case.expected.double()) < (8e-3 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.gpu
def test_prefill_leaves_short_chunks_alone(cached_sequences: Make, hopper_gpu: str) -> None:
    case = cached_sequences(
        [(5, 1), (9, 70), (64, 1)], block_size=64, heads=8, qk_dim=128, v_dim=128,
        dtype=torch.bfloat16, device=hopper_gpu,
    )  # fmt: skip
    for pool, new in ((case.k_pool, case.k), (case.v_pool, case.v)):
        pool.flatten(0, 1)[case.slot_mapping] = new
    y = torch.full_like(case.q, torch.nan)
    index = case.block_tables, case.context_lens, case.query_start
    assert paged_prefill_hopper(case.q, case.k_pool, case.v_pool, *index, case.scale, y, 2)
    assert y[0].isnan().all() and y[-1].isnan().all()
    assert relative(y[1:-1], case.expected[1:-1].double()) < 8e-3


LATENTS = [  # (past, new) of each sequence, block size, heads, splits
    ([(0, 1), (63, 1), (64, 1), (127, 1), (191, 1), (255, 1), (700, 1)], 64, 128, 1),
    ([(0, 1), (16, 1), (70, 1), (1999, 1)], 128, 64, 2),
    ([(99, 1), (300, 1), (1999, 1)], 16, 192, 3),
    ([(33, 3), (0, 5), (70, 1), (500, 2)], 32, 128, None),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("chunks", "block_size", "heads", "splits"), LATENTS)
def test_latent_decode(
    cached_sequences: Make, hopper_gpu: str, chunks: list[tuple[int, int]], block_size: int,
    heads: int, splits: int | None, dtype: torch.dtype,
) -> None:  # fmt: skip
    case = cached_sequences(
        chunks, block_size=block_size, heads=heads, kv_heads=1, qk_dim=576, dtype=dtype,
        device=hopper_gpu,
    )  # fmt: skip
    pool = case.k_pool[:, :, 0]
    pool.flatten(0, 1)[case.slot_mapping] = case.k[:, 0]
    spoil(pool, case)
    exact = torch.empty(*case.q.shape[:2], 512, dtype=torch.float64, device=hopper_gpu)
    starts = case.query_start.tolist()
    for i, (past, new) in enumerate(chunks):
        cached = pool[case.block_tables[i]].flatten(0, 1).double()
        for t in range(new):
            seen, q = cached[: past + t + 1], case.q[starts[i] + t].double()
            exact[starts[i] + t] = torch.softmax(q @ seen.T * case.scale, -1) @ seen[:, :512]
    y = torch.full((heads, len(case.q), 512), torch.nan, dtype=dtype, device=hopper_gpu)
    y = y.transpose(0, 1)
    parts = case.q[..., :512], case.q[..., 512:]
    index = case.block_tables, case.context_lens, case.query_start
    assert paged_mla_hopper(*parts, pool, *index, case.scale, y, splits)
    assert relative(y, exact) < (8e-3 if dtype == torch.bfloat16 else 1e-3)


def test_boxes_divide_blocks_and_what_is_read_at_a_time() -> None:
    assert [box_tokens(size, 64) for size in (8, 16, 64, 128, 192)] == [8, 16, 64, 64, 64]
    assert [box_tokens(size, 64) for size in (4, 12, 24, 48, 96)] == [None] * 5
    assert box_tokens(64, 128) == 64 and box_tokens(192, 128) is None


def test_splits_fill_the_gpu_and_no_more() -> None:
    assert split_count(64, 128, 132) == 2  # 32 sequences of 8,192 tokens, 128 heads
    assert split_count(256, 64, 132) == 1
    assert split_count(2, 512, 132) > 32
    assert split_count(2, 1, 132) == 1 and split_count(1, 0, 132) == 1


def test_alignment_is_that_of_bulk_copies() -> None:
    x = torch.empty(4, 6, 24, dtype=torch.bfloat16)
    assert aligned(x) and aligned(x[:, 1:]) and aligned(x[..., 8:])
    assert not aligned(x[..., 4:]) and not aligned(torch.empty(4, 20, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("tokens", "block_size", "serves", "tuned", "expected"),
    [
        (1024, 64, True, False, []),
        (4096, 16, True, False, []),
        (1023, 64, True, False, ["triton"]),
        (4096, 8, True, False, ["triton"]),
        (4096, 256, True, False, ["triton"]),
        (4096, 64, False, False, ["triton"]),
        (4096, 64, True, True, ["triton"]),
    ],
)
def test_prefill_choice(
    monkeypatch: Patch, tokens: int, block_size: int, serves: bool, tuned: bool,
    expected: list[str],
) -> None:  # fmt: skip
    taken: list[str] = []
    monkeypatch.setattr(paged_prefill, "paged_prefill_hopper", lambda *_: serves)
    monkeypatch.setattr(paged_prefill, "paged_prefill_triton", lambda *_: taken.append("triton"))
    pool, index = torch.empty(2, block_size, 1, 128), torch.empty(1)
    config = Config(64, 64, 1, 4, 3) if tuned else None
    q = torch.empty(tokens, 1, 128)
    paged_prefill.paged_prefill(q, pool, pool, index, index, index, 1.0, index, 1, config)
    assert taken == expected


@pytest.mark.parametrize("serves", [True, False])
def test_latent_choice(monkeypatch: Patch, serves: bool) -> None:
    taken: list[str] = []
    x = torch.empty(1)
    monkeypatch.setattr(paged_mla_decode, "paged_mla_hopper", lambda *_: serves)
    monkeypatch.setattr(
        paged_mla_decode, "paged_mla_decode_triton", lambda *_: taken.append("triton")
    )
    paged_mla_decode.paged_mla_decode(x, x, x, x, x, x, 1.0, x)
    assert taken == ([] if serves else ["triton"])


def test_other_devices_and_shapes_are_refused() -> None:
    assert hopper.library("paged_mla_hopper", torch.device("cpu")) is None
    index = torch.zeros(1, 1, dtype=torch.long), torch.ones(1).long(), torch.tensor([0, 1])
    q = torch.zeros(1, 64, 576, dtype=torch.bfloat16)
    pool, y = torch.zeros(2, 64, 576, dtype=torch.bfloat16), q[..., :512]
    for heads, rank in ((64, 512), (48, 512), (64, 256)):
        parts = q[:, :heads, :rank], q[:, :heads, rank:]
        assert not paged_mla_hopper(*parts, pool, *index, 1.0, y[:, :heads])
    for dim in (128, 64):
        q = torch.zeros(1, 2, dim)
        assert not paged_prefill_hopper(q, q[None], q[None], *index, 1.0, q, 1)


@pytest.fixture
def fake_nvcc(tmp_path: Path, monkeypatch: Patch) -> Path:
    """An nvcc that writes what it is told to, and notes each compilation in `calls`."""
    pytest.importorskip("triton", reason="Triton is not installed")
    script = tmp_path / "nvcc"
    script.write_text(
        f"#!{sys.executable}\nimport pathlib, sys\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "if '--version' in sys.argv: print('release 0'); sys.exit()\n"
        "open(folder / 'calls', 'a').write('x')\n"
        "if (folder / 'broken').exists(): sys.exit('no such architecture')\n"
        "pathlib.Path(sys.argv[sys.argv.index('-o') + 1]).write_text('library')\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(hopper, "compiler", lambda: str(script))
    return tmp_path


def test_is_built_once(fake_nvcc: Path) -> None:
    paths = {hopper.build("paged_mla_hopper", str(fake_nvcc / "nvcc")) for _ in range(3)}
    assert (fake_nvcc / "calls").read_text() == "x"
    assert Path(paths.pop()).read_text() == "library" and not paths
    hopper.build("paged_prefill_hopper", str(fake_nvcc / "nvcc"))
    assert (fake_nvcc / "calls").read_text() == "xx"


def test_processes_may_build_at_the_same_time(fake_nvcc: Path) -> None:
    code = f"from seekforge.kernels.hopper import build; print(build('paged_mla_hopper', {str(fake_nvcc / 'nvcc')!r}))"  # noqa: E501
    given = {"stdout": subprocess.PIPE, "text": True}
    running = [subprocess.Popen([sys.executable, "-c", code], **given) for _ in range(2)]  # type: ignore[call-overload]
    paths = {process.communicate()[0].strip() for process in running}
    assert len(paths) == 1 and Path(paths.pop()).read_text() == "library"


def test_what_cannot_be_built_is_said_once(
    fake_nvcc: Path, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    libraries = hopper.Libraries()
    (fake_nvcc / "broken").touch()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for _ in range(3):
        assert libraries.get("paged_mla_hopper") is None
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "no such architecture" in caplog.text
    caplog.clear()
    monkeypatch.setattr(hopper, "compiler", lambda: None)
    with caplog.at_level(logging.DEBUG, logger=hopper.__name__):
        for _ in range(3):
            assert libraries.get("paged_prefill_hopper") is None
    assert [r.levelno for r in caplog.records] == [logging.DEBUG]


def test_nothing_is_built_in_a_capture(monkeypatch: Patch) -> None:
    libraries = hopper.Libraries()
    asked: list[str] = []

    def load(name: str) -> SimpleNamespace:
        asked.append(name)
        return SimpleNamespace()

    monkeypatch.setattr(hopper, "load", load)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert libraries.get("paged_mla_hopper") is None and not asked
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert libraries.get("paged_mla_hopper") is not None and asked == ["paged_mla_hopper"]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert libraries.get("paged_mla_hopper") is not None and asked == ["paged_mla_hopper"]
