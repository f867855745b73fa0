"""Compiled kernels travel with the engine: out of one cache of Triton's, into another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from seekforge.compile import kernel_cache
from seekforge.compile.kernel_cache import (
    collect,
    lengths,
    record_used,
    share,
    ship_kernels,
    stand_ins,
    steps,
)
from seekforge.kernels.errors import BuildError
from seekforge.runtime.kernel_cache import FOLDER, install_kernels
from seekforge.runtime.manifest import Limits

cache = pytest.importorskip("triton.runtime.cache", reason="Triton is not installed")
knobs = pytest.importorskip("triton.knobs", reason="Triton is not installed")


def put_kernel(key: str, name: str) -> None:
    """As Triton's compiler leaves a kernel."""
    manager = cache.get_cache_manager(key)
    group = {
        f"{name}.{kind}": manager.put(f"{key} {kind}".encode(), f"{name}.{kind}")
        for kind in ("ttir", "cubin", "json")
    }
    manager.put_group(f"{name}.json", group)


def test_kernels_are_found_in_another_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ["aa" * 32, "bb" * 32]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "build"))
    put_kernel("dd" * 32, "kernel_of_another_program")
    put_kernel(keys[0], "norm_kernel")  # compiled earlier
    monkeypatch.setattr(knobs.cache, "manager_class", None)
    used = record_used()
    assert cache.get_cache_manager(keys[0]).get_group("norm_kernel.json")
    put_kernel(keys[1], "norm_kernel")
    cache.get_cache_manager("cc" * 32).put(b"launcher", "stub.so")
    collect(used, tmp_path / "engine" / FOLDER)
    files = {path.name for path in (tmp_path / "engine").rglob("*") if path.is_file()}
    assert files == {"norm_kernel.cubin", "norm_kernel.json", "__grp__norm_kernel.json", "stub.so"}

    (tmp_path / "build").rename(tmp_path / "gone")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "user"))
    put_kernel(keys[1], "norm_kernel")
    mine = Path(cache.get_cache_manager(keys[1]).get_group("norm_kernel.json")["norm_kernel.cubin"])
    mine.write_bytes(b"compiled here")
    assert install_kernels(tmp_path / "engine") == 2, "the kernel and the launcher"
    assert mine.read_bytes() == b"compiled here", "what was there stays"
    group = cache.get_cache_manager(keys[0]).get_group("norm_kernel.json")
    assert group.keys() == {"norm_kernel.cubin", "norm_kernel.json"}
    for name, path in group.items():
        assert Path(path).parent.parent == tmp_path / "user" and Path(path).exists(), name
    assert install_kernels(tmp_path / "engine") == 0
    assert install_kernels(tmp_path) == 0, "an engine without kernels"


def test_every_kind_of_step_is_run() -> None:
    """All residues that Triton tells apart, on both sides of every power of two."""
    found = list(lengths(100))
    assert found[0] == 2 and found[-1] == 100 and {17, 64, 65, 96, 99} <= set(found)
    assert list(lengths(2)) == [2] and list(lengths(1)) == []
    found_steps = list(steps(Limits(100, 4, 40), 16, blocks=4))
    shapes = [[len(chunk.token_ids) for chunk in chunks] for chunks in found_steps]
    assert [40] in shapes and [1, 33] in shapes and all(sum(shape) <= 41 for shape in shapes)
    chunks = [chunk for each in found_steps for chunk in each]
    assert all(max(chunk.block_table) < 4 for chunk in chunks), "the pool's blocks, repeated"
    assert all(len(c.block_table) * 16 >= c.start + len(c.token_ids) for c in chunks)
    assert {1, 4, 7} <= {len(c.block_table) for c in chunks if len(c.token_ids) == 1}
    assert {1, 7} <= {len(c.block_table) for c in chunks if len(c.token_ids) == 9}
    assert all(len(each) == 1 for each in steps(Limits(100, 1, 40), 16, blocks=4))


def test_weights_that_stand_in(tmp_path: Path) -> None:
    """Like the file's, one for each shape and dtype, and finite."""
    file = tmp_path / "weights.safetensors"
    tensors = {
        "a": torch.full((3, 4), torch.nan, dtype=torch.bfloat16),
        "b": torch.full((3, 4), torch.nan, dtype=torch.bfloat16),
        "c": torch.full((3, 4), torch.nan),
        "d": torch.full((2,), 7, dtype=torch.uint8),
        "e": torch.full((2,), 7, dtype=torch.int64),
    }
    save_file(tensors, file)
    found = stand_ins(file, torch.device("cpu"))
    assert found.keys() == tensors.keys()
    for name, tensor in found.items():
        assert tensor.shape == tensors[name].shape and tensor.dtype == tensors[name].dtype
        assert tensor.isfinite().all() and tensor.is_contiguous()
    assert found["a"] is found["b"] and found["a"].any() and not found["d"].any()
    assert len({tensor.data_ptr() for tensor in found.values()}) == 4


def test_steps_that_fail_end_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once more in one process first: a GPU may have no room for several."""
    counts, run = [], kernel_cache.run_steps

    def counted(engine: Path, count: int) -> None:
        counts.append(count)
        run(engine, count)

    monkeypatch.setattr(kernel_cache, "run_steps", counted)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(4))
    python = tmp_path / "python"  # one that starts at once
    python.write_text("#!/bin/sh\necho $4: no manifest\nexit 7\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    with pytest.raises(BuildError, match=r"could not be run \(exit code 7\):\n0: no manifest"):
        ship_kernels(tmp_path / "none")
    assert counts == [2, 1] and not (tmp_path / "none").exists()


def test_steps_are_shared_out() -> None:
    """Each to one process, neighbours together."""
    items = list(range(11))
    for count in (1, 3, 11, 14):
        parts = [share(items, index, count) for index in range(count)]
        assert [item for part in parts for item in part] == items, f"{count=}"
        assert max(map(len, parts)) - min(map(len, parts)) <= 1, f"{count=}"
