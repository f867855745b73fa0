"""The KV cache's size, ahead of time and after a dry run: one sum."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from test_runtime_llm import manifest_for

from seekforge.compile.inspect import _format_engine
from seekforge.compile.liveness import OWN, peak_bytes, step_bytes
from seekforge.kernels.int4_linear import int4_linear
from seekforge.kernels.shared_experts import int4_moe_shared_experts, moe_shared_experts
from seekforge.passes.pipeline import run_pipeline
from seekforge.runtime.graphs import ladder
from seekforge.runtime.manifest import FileEntry, Limits
from seekforge.runtime.memory import CONTEXT, GRAPH_BYTES, SLACK, Budget

GIB = 1 << 30


def test_the_sum() -> None:
    budget = Budget(total=80 * GIB, taken=16 * GIB, chunk=2 * GIB, decode=GIB // 4, sizes=7)
    assert budget.workspace == 2 * GIB
    assert budget.graphs == 7 * GRAPH_BYTES + GIB // 2
    assert budget.slack == int(SLACK * 80 * GIB)
    parts = budget.taken + budget.workspace + budget.graphs + budget.slack + budget.kv
    assert parts == budget.total
    ahead = Budget.expected(80 * GIB, 15 * GIB, {"chunk": 5, "decode": 7}, max_batch=32)
    assert ahead == Budget(80 * GIB, CONTEXT + 15 * GIB, 5, 7, len(ladder(32)))
    assert Budget(GIB, 2 * GIB, 0, 0, 0).kv < 0, "too large already"


def test_a_step_takes_what_lives_at_once(exported: Callable[..., Any]) -> None:
    """llama of the fixtures: hidden 32, intermediate 56, 4 heads and 2 KV heads of 8."""
    program, _ = exported("llama")
    _, inputs = run_pipeline(program, "ragged", 64, None, device="cuda")
    sizes = {"tokens": 1000, "sequences": 1, "sequences_plus_1": 2, "rows": 1}
    sizes |= {"max_blocks": 8, "blocks": 8, "block_size": 16}
    # gate_up, what SwiGLU makes of it, the residual stream: nothing else of 1000 rows lives then.
    assert peak_bytes(program, inputs, sizes) == 4 * 1000 * (2 * 56 + 56 + 32)
    both = step_bytes(program, inputs, Limits(max_len=64, max_batch=9, max_chunk=48))
    assert both["chunk"] > both["decode"] > 0
    sizes |= {"tokens": 48, "rows": 9}
    assert both["chunk"] == peak_bytes(program, inputs, sizes)


def test_a_weight_that_is_decoded_whole_counts() -> None:
    """Where so many rows are multiplied by it that way: 641.8 MB a step instead of 494.9 measured
    with Qwen2-7B's shapes (docs/gpu.md)."""
    weight = torch.empty(512, 128, dtype=torch.uint8, device="meta")
    for rows, expected in ((4096, 512 * 256 * 2), (1, 0), (32, 0)):
        x = torch.empty(rows, 256, dtype=torch.bfloat16, device="meta")
        assert OWN[int4_linear](x, weight) == expected, f"{rows=}"


def test_what_shared_experts_take() -> None:
    """The larger of the shared experts' gate_up and activation, and of the routed ones' values with
    the shared result and a sum beside them; INT4 the same."""
    empty = partial(torch.empty, dtype=torch.bfloat16, device="meta")
    x, chosen = empty(10, 32), torch.empty(10, 2, dtype=torch.int64, device="meta")
    for width, expected in ((24, 480 + 20 * (16 + 32) * 2 + 640), (2000, 3 * 40_000)):
        plain = empty(4, 32, 32), empty(4, 32, 16), empty(2 * width, 32), empty(32, width)
        assert OWN[moe_shared_experts](x, None, chosen, *plain) == expected
        first, second, third, fourth = ((w[..., ::2], None, None) for w in plain)
        packed = (*first, *second, 32, *third, *fourth)
        assert OWN[int4_moe_shared_experts](x, None, chosen, *packed) == expected


def test_inspect_prints_it() -> None:
    manifest = manifest_for(
        128, memory={"chunk": GIB, "decode": GIB // 8}, device="cuda",
        files=(FileEntry("weights.safetensors", "00", 10 * GIB),),
        model={
            "vocab_size": 128, "model_type": "llama", "num_layers": 1, "hidden_size": 8,
            "num_heads": 1, "num_kv_heads": 1,
        },
    )  # fmt: skip
    engine = dataclasses.asdict(manifest) | {"size": 10 * GIB, "runs_here": True, "reason": None}
    engine["kv"]["token_bytes"] = manifest.kv.token_bytes
    text = _format_engine("inductor", engine)
    (line,) = [line for line in text.splitlines() if line.startswith("    of 80.0")]
    plan = Budget.expected(80 * GIB, 10 * GIB, {"chunk": GIB, "decode": GIB // 8}, 8)
    numbers = [float(word) for word in line.split()[2:7]]
    parts = (plan.taken, plan.workspace, plan.graphs, plan.slack, plan.kv)
    assert numbers == [round(part / GIB, 2) for part in parts]
    assert f"{plan.kv // manifest.kv.token_bytes:,} tokens" in line
    assert torch.tensor(numbers).sum().sub(80).abs() < 0.05
