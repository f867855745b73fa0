"""What a finished engine takes while it runs, and how many tokens its KV cache has room for."""

from __future__ import annotations

from typing import Any

from seekforge.compile.account import kv_token_bytes
from seekforge.compile.check_costs import Plan
from seekforge.compile.check_model import Examined
from seekforge.compile.export import DTYPES
from seekforge.compile.liveness import step_bytes
from seekforge.compile.workspace import padded_workspace
from seekforge.runtime.memory import CONTEXT, Budget
from seekforge.runtime.padded import CPU_POOL_BYTES, GPU_POOL_SHARE


def run_memory(
    examined: Examined,
    plan: Plan,
    block_size: int,
    gpu_bytes: int,
    host_bytes: int,
    activation: int | None,
) -> dict[str, Any]:
    """Bytes: weights, workspace of the largest step, cache of a token; memory_bytes: of the device.
    kv_tokens: room for so many, None where the device's memory is not known; wanted_tokens: of
    max_batch sequences of full length; pool_tokens: what the runtime takes by default."""
    spec, limits = plan.spec, plan.limits
    token = kv_token_bytes(spec, DTYPES[plan.dtype])
    on_gpu = plan.device == "cuda" or plan.backend.startswith("tensorrt")
    total = gpu_bytes if on_gpu else host_bytes
    weights, workspace = examined.facts.weights, 0
    if plan.streaming_bytes is not None:
        weights = min(weights, plan.streaming_bytes)
    if plan.backend == "inductor":
        steps = step_bytes(examined.program, examined.inputs, limits)
        workspace = max(steps.values())
        room = Budget.expected(total, weights, steps, limits.max_batch).kv
    else:
        workspace = activation or padded_workspace(examined.program, limits, plan.backend).bytes
        room = int((total - CONTEXT - weights - workspace) * GPU_POOL_SHARE)
    if not on_gpu:
        room = total - weights - workspace
    per_sequence = -(-limits.max_len // block_size) * block_size
    wanted = limits.max_batch * per_sequence
    most = room if on_gpu else min(room, CPU_POOL_BYTES)
    return {
        "device": "gpu" if on_gpu else "host",
        "memory_bytes": total,
        "weights_bytes": weights,
        "workspace_bytes": workspace,
        "kv_token_bytes": token,
        "kv_tokens": room // token if total else None,
        "wanted_tokens": wanted,
        "pool_tokens": min(wanted, max(0, most) // token) if total else None,
    }
