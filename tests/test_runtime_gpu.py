"""A CUDA engine of a tiny model: graphs, memory and weights where they really are."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from test_runtime_graphs import assert_same, serve

from seekforge.compile.build import Options, build
from seekforge.runtime import weights
from seekforge.runtime.inductor import WEIGHTS_NAME
from seekforge.runtime.llm import LLM
from seekforge.runtime.session import Chunk

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]


@pytest.fixture(scope="module", params=["qwen2", "deepseek_v3"])
def engine(
    request: pytest.FixtureRequest,
    tiny_checkpoint: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    out = tmp_path_factory.mktemp("cuda")
    options = Options(
        backends=("inductor",), dtype="float32", device="cuda", max_batch=9, max_len=96,
        max_chunk=32, block_size=16,
    )  # fmt: skip
    return build(tiny_checkpoint(request.param), out, options)[0]


def test_mixed_steps_with_graphs_equal_those_without(engine: Path) -> None:
    """B65: 130 steps; before each, the inputs' memory and what is free hold garbage. Of 10 blocks
    this schedule takes more than there are some ten times."""
    llm = LLM(engine, num_blocks=10)
    session: Any = llm.session
    graphs, session.graphs = session.graphs, None
    plain = serve(llm, 130)
    session.graphs = graphs

    def spoil() -> None:
        session.inputs._index.fill_(1 << 40)
        torch.full((1 << 22,), torch.nan, device="cuda")

    fresh = LLM(engine, session=session, tokenizer=llm.tokenizer, num_blocks=10)
    assert_same(serve(fresh, 130, spoil), plain)
    captured = session.graphs._captured
    assert len(captured) >= 3 and None not in captured.values()
    assert fresh.scheduler.num_preemptions > 0


@pytest.mark.parametrize("live", [1, 3, 5, 9])
def test_rows_without_a_sequence_touch_nothing(engine: Path, live: int) -> None:
    """B63: no byte outside the live slots changes, in any block, the spare one included."""
    session: Any = LLM(engine, num_blocks=20).session
    for pool in session.pools:
        pool[:-1].normal_()
    chunks = [Chunk([20 + i], 17 + i, [2 * i, 2 * i + 1], [0]) for i in range(live)]
    slots = [chunk.block_table[1] * 16 + 1 + i for i, chunk in enumerate(chunks)]
    for _ in range(2):  # captured and replayed, then replayed only
        before = [pool.clone() for pool in session.pools]
        logits = session.step(chunks)
        assert logits.isfinite().all()
        for old, pool in zip(before, session.pools, strict=True):
            changed = (old != pool).flatten(2).any(-1).flatten().nonzero().flatten().tolist()
            assert set(changed) <= set(slots) and not pool[-1].any()
        for pool in session.pools:
            pool.view(-1, *pool.shape[2:])[slots] += 1


def test_all_sizes_are_captured_ahead(engine: Path) -> None:
    session: Any = LLM(engine, num_blocks=20).session
    before = [pool.clone() for pool in session.pools]
    seen: list[int] = []
    session.capture_all(lambda sizes: (seen.append(size) or size for size in sizes))
    assert seen == [9, 8, 4, 2, 1] and None not in session.graphs._captured.values()
    assert all(torch.equal(a, b) for a, b in zip(before, session.pools, strict=True))


def test_the_default_pool_leaves_room(engine: Path) -> None:
    """After the dry run the pools are what one batch needs, and nothing else has grown."""
    llm = LLM(engine)
    assert llm.blocks.num_blocks == 9 * 96 // 16
    assert llm.session.pool_bytes(9, 32, 16) > 1 << 30  # a tiny model on a large GPU


def test_weights_are_the_files(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "PIECE", 1 << 12)  # tensors of several pieces, and of one
    found = weights.load_weights(engine / WEIGHTS_NAME, torch.device("cuda"))
    with safe_open(engine / WEIGHTS_NAME, framework="pt") as file:
        assert found.keys() == set(file.keys())
        for name, tensor in found.items():
            assert torch.equal(tensor.cpu(), file.get_tensor(name)), name
    assert (engine / WEIGHTS_NAME).stat().st_size > 1 << 14


FRESH = """
import sys
from pathlib import Path
from triton import knobs
from seekforge.runtime.llm import LLM
from seekforge.runtime.sampling import SamplingParams
engine = Path(sys.argv[1])
llm = LLM(engine, num_blocks=60)
llm.session.capture_all()
params = [
    SamplingParams(max_tokens=6, ignore_eos=True),
    SamplingParams(max_tokens=9, ignore_eos=True, temperature=0.8, top_k=9, top_p=0.9),
    SamplingParams(max_tokens=4, ignore_eos=True, temperature=1.0, repetition_penalty=1.2),
]
for count in (1, 5):
    prompts = [[20 + i] * (3 + 13 * i) for i in range(count)]
    for each in params:
        llm.generate(prompts, each)
shipped = {folder.name for folder in (engine / "kernels").iterdir()}
cache = Path(knobs.cache.dir)
cubins = {path.parent.name: path.name for path in cache.glob("*/*.cubin")}
print(len(cubins), *sorted(f"{name}" for key, name in cubins.items() if key not in shipped))
"""


def test_a_fresh_process_compiles_nothing(engine: Path, tmp_path: Path) -> None:
    """With an empty cache of Triton's, all kernels are the engine's own."""
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", FRESH, str(engine)], capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr[-2000:]
    count, *compiled = done.stdout.split()
    assert int(count) > 10 and not compiled, compiled
