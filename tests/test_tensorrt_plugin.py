"""Paged attention as ahead-of-time plugins: PTX for the target, its arguments, shapes and grids
against the launchers', and the results in Triton's interpreter. TensorRT itself is not here."""

from __future__ import annotations

import importlib.util
import multiprocessing
import re
import subprocess
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plugin_tensorrt import BLOCK, DIM, HEADS, KV_HEADS, SCALE, STEPS, calls

from seekforge.compile.tensorrt_plugin import ATTENTION, SHARED_LIMIT, WRITE
from seekforge.compile.tensorrt_ptx import PTX_VERSION, parameters, without_scratch
from seekforge.kernels import kv_write, paged_decode
from seekforge.kernels.errors import BuildError
from seekforge.kernels.tuning import Config

triton = pytest.importorskip("triton", reason="Triton is not installed")

POINTER, INTEGER = "u64", "u32"
TARGETS = {80: "sm_80", 90: "sm_90a", 120: "sm_120a"}
Calls = dict[int, dict[str, dict[str, Any]]]


def in_a_process(monkeypatch: pytest.MonkeyPatch, *jobs: tuple[str, int]) -> list[Any]:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # the interpreter replaces the language
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return list(process.map(calls, *zip(*jobs, strict=True)))


@pytest.fixture(scope="module")
def made() -> Calls:
    """What both plugins say, for each target."""
    with pytest.MonkeyPatch.context() as patch:
        found = in_a_process(patch, *(("", target) for target in TARGETS))
    return dict(zip(TARGETS, found, strict=True))


@pytest.mark.parametrize("target", TARGETS)
def test_ptx_is_for_the_target_and_assembles(made: Calls, target: int, tmp_path: Path) -> None:
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    for name, said in made[target].items():
        assert f".target {TARGETS[target]}\n" in said["ptx"], name
        assert f".version {PTX_VERSION // 10}.{PTX_VERSION % 10}\n" in said["ptx"], name
        (tmp_path / "kernel.ptx").write_text(said["ptx"])
        command = [tools / "ptxas", "-arch", TARGETS[target], "kernel.ptx", "-o", "kernel.cubin"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, f"{name}: {done.stderr}"


def test_arguments_are_inputs_then_integers_then_outputs(made: Calls) -> None:
    for said in made.values():
        write, attention = said[WRITE], said[ATTENTION]
        assert parameters(write["ptx"], write["name"]) == [POINTER] * 7
        expected = [POINTER] * 6 + [INTEGER] * 2 + [POINTER]
        assert parameters(attention["ptx"], attention["name"]) == expected
        # Each is read by the kernel, but the pools that kv_write sees twice.
        for plugin, unread in ((write, {2, 3}), (attention, set())):
            read = set(map(int, re.findall(r"ld\.param\.\w+.*_param_(\d+)\]", plugin["ptx"])))
            assert read == set(range(len(parameters(plugin["ptx"], plugin["name"])))) - unread


def test_threads_and_shared_memory_are_the_kernels_own(made: Calls) -> None:
    for said in made.values():
        for plugin in said.values():
            launch = plugin["steps"][0]["launch"]
            assert f".reqntid {launch['block_x']}\n" in plugin["ptx"]
            assert (launch["block_y"], launch["block_z"]) == (1, 1)
            assert 0 <= launch["shared_mem"] <= SHARED_LIMIT
            assert (launch["shared_mem"] > 0) == ("global_smem" in plugin["ptx"])


def test_outputs_are_the_pools_themselves_and_y(made: Calls) -> None:
    said = made[90]
    assert said[WRITE]["aliases"] == [2, 3] and said[ATTENTION]["aliases"] == [-1]
    for number, step in enumerate(STEPS):
        pool = [step["blocks"], BLOCK, KV_HEADS, DIM]
        assert said[WRITE]["steps"][number]["outputs"] == [pool, pool]
        assert said[ATTENTION]["steps"][number]["outputs"] == [[step["tokens"], HEADS, DIM]]
        extra = said[ATTENTION]["steps"][number]["extra"]
        assert extra == [step["sequences"], step["max_blocks"]]
    assert said[WRITE]["dtypes"] == ["HALF", "HALF"] and said[ATTENTION]["dtypes"] == ["HALF"]


class Recorder:
    """In a kernel's place: keeps the grids it is launched with."""

    def __init__(self) -> None:
        self.grids: list[list[int]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.grids.append([*grid, 1, 1][:3])
        return lambda *_, **__: None


def test_grids_are_those_of_the_launchers(made: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    write, attend = Recorder(), Recorder()
    monkeypatch.setattr(kv_write, "kv_write_kernel", write)
    monkeypatch.setattr(paged_decode, "paged_decode_kernel", attend)
    whole = Config(16, 64, 1, 4, 2)
    for step in STEPS:
        tokens, sequences = step["tokens"], step["sequences"]
        new = torch.zeros(tokens, KV_HEADS, DIM)
        pool = torch.zeros(step["blocks"], BLOCK, KV_HEADS, DIM)
        kv_write.kv_write_triton(new, new, pool, pool, torch.zeros(tokens, dtype=torch.int64))
        q = torch.zeros(tokens, HEADS, DIM)
        tables = torch.zeros(sequences, step["max_blocks"], dtype=torch.int64)
        lens, start = tables[:, 0], torch.zeros(sequences + 1, dtype=torch.int64)
        paged_decode.paged_decode_triton(
            q, pool, pool, tables, lens, start, SCALE, q, True, config=whole
        )
    for name, grids in ((WRITE, write.grids), (ATTENTION, attend.grids)):
        launches = [step["launch"] for step in made[90][name]["steps"]]
        assert [[launch[f"grid_{axis}"] for axis in "xyz"] for launch in launches] == grids


def test_nvidias_own_layer_says_the_same(made: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checks of signatures and results pass, and what it hands to TensorRT is the same."""
    found = importlib.util.find_spec("tensorrt_bindings")
    if found is None or not found.submodule_search_locations:
        pytest.skip("not installed: pip install --no-deps tensorrt-cu13-bindings")
    (folder,) = found.submodule_search_locations
    (said,) = in_a_process(monkeypatch, (folder, 90))
    assert said == made[90]


def test_results_are_those_of_the_reference(
    cached_sequences: Callable[..., SimpleNamespace], kernel_device: str
) -> None:
    """Prefills and decodes in one step, groups of three heads."""
    from seekforge.compile.tensorrt_plugin_kernel import plugin_kv_write, plugin_paged_attention
    from seekforge.kernels.triton_support import next_power_of_2 as power

    block, heads, kv_heads, dim, v_dim = 4, 6, 2, 24, 8
    case = cached_sequences(
        [(5, 1), (0, 4), (9, 3), (2, 1)], block_size=block, heads=heads, kv_heads=kv_heads,
        qk_dim=dim, v_dim=v_dim, device=kernel_device,
    )  # fmt: skip
    plugin_kv_write[(case.k.shape[0],)](
        case.k, case.v, case.k_pool, case.v_pool, case.slot_mapping, case.k_pool, case.v_pool,
        KV_HEADS=kv_heads, HEADS=2, QK_DIM=dim, V_DIM=v_dim, QK=power(dim), V=power(v_dim),
        BLOCK_SIZE=block,
    )  # fmt: skip
    y = torch.full((*case.q.shape[:2], v_dim), float("nan"), device=kernel_device)
    sequences, max_blocks = case.block_tables.shape
    plugin_paged_attention[(kv_heads, 1, case.q.shape[0])](
        case.q, case.k_pool, case.v_pool, case.block_tables, case.context_lens, case.query_start,
        sequences, max_blocks, y,
        SCALE=case.scale * paged_decode.LOG2_E, HEADS=heads, KV_HEADS=kv_heads, ROWS=16,
        QK_DIM=dim, QK=power(dim), V_DIM=v_dim, V=16, BLOCK_SIZE=block, BLOCK_N=16,
        PRECISION="ieee",
    )  # fmt: skip
    assert float((y - case.expected).abs().max()) < 1e-5


def test_ptx_that_a_plugin_cannot_be_called_with_is_refused() -> None:
    entry = """.visible .entry f(
	.param .u64 f_param_0,
	.param .u32 f_param_1,
	.param .u64 f_param_2
)
{ {} }"""
    bare = without_scratch(
        entry.replace("{}", "ld.param.b64 %rd1, [f_param_0];"), "f", ["*fp16", "i32"]
    )
    assert parameters(bare, "f") == [POINTER, INTEGER]
    with pytest.raises(BuildError, match=r"uses scratch memory \(f_param_2\)"):
        without_scratch(
            entry.replace("{}", "ld.param.b64 %rd1, [f_param_2];"), "f", ["*fp16", "i32"]
        )
    with pytest.raises(BuildError, match=r"takes u64, u32, u64; \*fp16, \*fp16 were expected"):
        without_scratch(entry, "f", ["*fp16", "*fp16"])
    with pytest.raises(BuildError, match="no entry 'g'"):
        parameters(entry, "g")
