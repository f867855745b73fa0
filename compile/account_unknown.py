"""The account of a model that no family describes: `seekforge inspect CKPT --graph` of any causal
language model of transformers. `build` goes on refusing it.

In: a configuration. Out: plain data: how far the pipeline came and what stopped it, what each pass
found (nothing is expected), and the operators that no backend has a form for. Reads no weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import fx, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from seekforge.compile.account import (
    DTYPE,
    LENGTH,
    account_passes,
    operator_name,
    operators_by_layer,
    weight_bytes,
)
from seekforge.compile.export import export_module
from seekforge.compile.onnx_translations import TRANSLATIONS
from seekforge.compile.steps import Steps
from seekforge.kernels.errors import BuildError, CheckpointError
from seekforge.kernels.gathered_attention import gathered_attention
from seekforge.models.config import read_json
from seekforge.models.families import FAMILIES, MISSING
from seekforge.passes.kv_cache import KINDS, insert_kv_cache
from seekforge.passes.pipeline import run_fusions
from seekforge.passes.program import Program, source_line
from seekforge.passes.rule import PassResult

Uncovered = Callable[[fx.Node], str | None]


def unknown_config(file: Path) -> PreTrainedConfig | None:
    """The configuration in `file` where its model_type is no family's; None for one that is, or
    whose missing parts are known. Raises CheckpointError where transformers can't read it."""
    kind = read_json(file).get("model_type")
    if kind is None or kind in FAMILIES or kind in MISSING:
        return None
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            file, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises many kinds, its strict validation others
        raise CheckpointError(f"{file}: transformers refuses it: {error}") from error
    return config


def account_unknown(config: PreTrainedConfig, steps: Steps | None = None) -> dict[str, Any]:
    """Keys: model_type, refused (why `build` does not take it), architecture, parameters,
    weight_bytes, passes and layers (as `account` has them, in padded form), uncovered ({backend:
    {operator: {"count", "source", "reason"}}}), steps, and stopped: None, or {"step", "message"} of
    what failed; what comes after it is missing, and `layers` and `uncovered` are of the graph
    before it (empty: nothing was exported).
    """
    steps = steps or Steps(f"inspect {config.model_type}")
    found: dict[str, Any] = {
        "model_type": config.model_type,
        "refused": f"model_type {config.model_type!r} is none of {', '.join(FAMILIES)}",
        "architecture": None, "parameters": None, "weight_bytes": {}, "nodes_exported": 0,
        "nodes": 0, "passes": [], "layers": [], "uncovered": {}, "stopped": None,
        "steps": steps.done,
    }  # fmt: skip
    at = "export"
    try:
        with steps.step("export"):
            module = _module(config)
            found["architecture"] = type(module).__name__
            found["parameters"] = sum(p.numel() for p in module.parameters())
            names: dict[int, str] = {}  # a tied tensor has two names and is stored once
            stored = module.state_dict(keep_vars=True).items()
            sources = {name: (names.setdefault(id(tensor), name),) for name, tensor in stored}
            length = min(LENGTH, getattr(config, "max_position_embeddings", None) or LENGTH)
            program = export_module(module, sources, length)
        found["nodes_exported"] = len(program.graph.nodes)
        results: list[PassResult] = []

        def observe(name: str, _: Program) -> None:
            nonlocal at
            at = name
            _look(found, program, config)

        with steps.step("passes"):
            results = run_fusions(program, length, observe)
            found["passes"] = account_passes(results, {})
            at = "kv_cache"
            results += insert_kv_cache(program, "padded")[0]
        found["passes"] = account_passes(results, {})
        _look(found, program, config)
    except (BuildError, CheckpointError) as error:
        found["stopped"] = {"step": at, "message": str(error)}
    except Exception as error:
        # Modules that nobody tried fail in any way; the name of the failure is all there is to say.
        found["stopped"] = {"step": at, "message": f"{type(error).__name__}: {error}"}
    return found


def _module(config: PreTrainedConfig) -> nn.Module:
    """transformers' module: parameters and stored buffers on the meta device, computed buffers real
    (`build_module` knows how those of the families are computed)."""
    with init_empty_weights(include_buffers=False):
        module: nn.Module = AutoModelForCausalLM.from_config(config, dtype=DTYPE)  # type: ignore[no-untyped-call]
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                part._buffers[name] = buffer.to("meta")
    return module.eval().requires_grad_(False)


def _look(found: dict[str, Any], program: Program, config: PreTrainedConfig) -> None:
    layers = int(getattr(config, "num_hidden_layers", 0))
    found["nodes"] = len(program.graph.nodes)
    found["weight_bytes"] = weight_bytes(program)
    found["layers"] = operators_by_layer(program, layers)
    found["uncovered"] = uncovered(program)


def uncovered(program: Program) -> dict[str, dict[str, dict[str, Any]]]:
    """The operators of a padded graph that a backend has no form for, with the source line of the
    first call and why."""
    backends: Mapping[str, Uncovered] = {
        "inductor": _by_inductor, "onnxruntime": _by_onnx, "tensorrt": _by_tensorrt,
    }  # fmt: skip
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for backend, lacks in backends.items():
        missing = found[backend] = {}
        for node in program.graph.nodes:
            reason = lacks(node) if node.op == "call_function" else None
            if reason is None:
                continue
            first = {"count": 0, "source": source_line(node), "reason": reason}
            missing.setdefault(operator_name(node), first)["count"] += 1
    return found


def _placeholder(node: fx.Node) -> str | None:
    return "the KV cache was not inserted" if node.target in KINDS else None


def _by_inductor(node: fx.Node) -> str | None:
    """Inductor takes whatever torch can run: it writes a loop, or calls the operator's kernel."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None  # arithmetic on sizes
    name = node.target.name()  # type: ignore[no-untyped-call]
    keys = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    runs = any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys)
    return _placeholder(node) or (None if runs else "torch has no CPU kernel for it")


def _by_onnx(node: fx.Node) -> str | None:
    if node.target in TRANSLATIONS:
        return None
    return _placeholder(node) or "no ONNX translation"


def _by_tensorrt(node: fx.Node) -> str | None:
    """Its network is parsed from ONNX; fused attention exists for some widths of a head."""
    if node.target is gathered_attention:
        width = int(node.args[0].meta["val"].shape[-1])  # type: ignore[union-attr]
        if width % 16 or width > 256:
            return f"head_dim {width}: fused attention exists for multiples of 16 up to 256"
    return _by_onnx(node)
