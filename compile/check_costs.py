"""What each step of a build takes: seconds and peak memory, engine and disk size, from counts.

In: `Facts` of the model and a `Plan` of one engine. Out: a `Prediction`; the manifest keeps it
beside what then happened (`seekforge check --outcomes`). The constants are fits to some thirty
builds of models with 2 to 30 layers, dense and with experts, on 2 CPU cores, torch 2.13, ONNX
Runtime 1.32, TensorRT-RTX 1.7; how good they are is in docs/check.md. Times are those of
earlier builds where the cache folder remembers any.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from seekforge.compile.check_machine import resident_bytes
from seekforge.compile.check_model import Facts
from seekforge.compile.liveness import peak_bytes
from seekforge.compile.quantise import TOKENS
from seekforge.compile.run_graph_weights import BLOCK as PIECE
from seekforge.compile.run_graph_weights import HELD_BYTES
from seekforge.compile.verify_inputs import LENGTHS
from seekforge.compile.workspace import padded_workspace
from seekforge.models.spec import ModelSpec
from seekforge.passes.kv_cache import GraphInput
from seekforge.passes.program import Program
from seekforge.runtime.manifest import Limits
from seekforge.runtime.memory import CONTEXT

MB = 1_000_000
EXPORT_IMPORTS = 44 * MB  # what torch.export brings in
TENSORRT_IMPORTS = 105 * MB
EXPORTED = 27_000  # bytes a call of the exported graph
BLOCK = 16
ONNX_IMPORTS = 14 * MB


@dataclass(frozen=True, slots=True)
class Plan:
    """One engine to build. int4: a method of quantisation, or None. executed: whether it will be
    run and compared with eager. tokenizer_bytes: of the files that are copied. streaming_bytes: of
    weights that stay on the GPU; None: all. verify: the level (compile/verify_level.py); proven:
    layers that the passes are proven on before the whole model is exported, 0 where they are not.
    """

    backend: str
    device: str
    dtype: str
    limits: Limits
    int4: str | None
    executed: bool
    spec: ModelSpec
    tokenizer_bytes: int
    streaming_bytes: int | None = None
    verify: str = "none"
    proven: int = 0

    @property
    def subject(self) -> str:
        """What durations are remembered for. At level full the passes take longer."""
        full = " full" if self.verify == "full" else ""
        return subject(self.spec, self.backend, self.device, self.dtype, self.int4) + full


@dataclass(frozen=True, slots=True)
class Prediction:
    """steps: {name: {"seconds", "peak_bytes", "device_bytes", "recorded", "settled_bytes"}} in
    order. recorded: the seconds are an earlier build's; device_bytes: on a GPU; settled_bytes: the
    peak of a verification that fp64 has to settle, None for other steps.

    engine_bytes: of the engine directory; disk_bytes: the most that is on the disk meanwhile.
    activation_bytes: a step's temporary tensors, None where the backend does not say."""

    steps: dict[str, dict[str, Any]]
    engine_bytes: int
    disk_bytes: int
    activation_bytes: int | None

    @property
    def peak_bytes(self) -> int:
        most: int = max(step["peak_bytes"] for step in self.steps.values())
        return most

    @property
    def seconds(self) -> float:
        total: float = sum(step["seconds"] for step in self.steps.values())
        return total


def subject(spec: ModelSpec, backend: str, device: str, dtype: str, int4: str | None) -> str:
    return f"{spec.model_type} {spec.num_layers}x{spec.hidden_size} {dtype} {backend} {device}" + (
        f" {int4}" if int4 else ""
    )


def memory_floor(backends: Sequence[str]) -> int:
    """Bytes that this process will hold before it exports anything: what it holds now, and the
    modules that export and the backends still have to bring in."""
    imports = 0 if "torch._export.non_strict_utils" in sys.modules else EXPORT_IMPORTS
    if "tensorrt-rtx" in backends and "tensorrt_rtx" not in sys.modules:
        imports += TENSORRT_IMPORTS
    return resident_bytes() + imports


def predict(
    facts: Facts, plan: Plan, floor: int, activation: int | None, known: Mapping[str, float]
) -> Prediction:
    """floor: `memory_floor` of the process that builds. activation: as in `Prediction`. known:
    seconds of an earlier build, where there was one."""
    peaks, took = _peaks(facts, plan, floor), _seconds(facts, plan)
    steps = {}
    for name, peak in peaks.items():
        seconds = known.get(name, took[name])
        settled = name == "verify" and plan.dtype == "float32"
        steps[name] = {
            "seconds": round(seconds, 2), "peak_bytes": int(peak), "recorded": name in known,
            "device_bytes": _on_device(name, facts, plan),
            "settled_bytes": settled_bytes(int(peak), facts, plan) if settled else None,
        }  # fmt: skip
    engine = _engine(facts, plan)
    disk = engine + (facts.weights if plan.backend.startswith("tensorrt") else 0)
    return Prediction(steps, engine, disk, activation)


def activation_bytes(program: Program, inputs: Sequence[GraphInput], plan: Plan) -> int | None:
    """Temporary tensors of a TensorRT engine's largest step, which it allocates once: those between
    layers, and those of the heaviest layer. None for other backends."""
    if not plan.backend.startswith("tensorrt"):
        return None
    limits = plan.limits
    blocks = -(-limits.max_len // BLOCK)
    sizes = {
        "batch": 1, "seq": min(limits.max_chunk, limits.max_len), "rows": 1, "max_blocks": blocks,
        "blocks": blocks, "block_size": BLOCK,
    }  # fmt: skip
    inside = padded_workspace(program, limits, plan.backend).bytes
    spec = plan.spec
    more = 3.6 * MB if spec.kv_lora_rank else 0 if spec.num_moe_layers else 2 * MB
    if plan.int4 is None:
        more += 0.7 * MB * plan.spec.num_moe_layers
    return int(inside + more + peak_bytes(_without_caches(program), inputs, sizes))


def _without_caches(program: Program) -> Program:
    """The logits alone: new keys and values go to memory of the caller's."""
    graph = fx.Graph()
    logits, *_ = graph.graph_copy(program.graph, {})  # type: ignore[misc]
    graph.output((logits,))
    module = fx.GraphModule(program.graph_module, graph)
    return Program(module, program.weights, program.constants)


def _peaks(facts: Facts, plan: Plan, floor: int) -> dict[str, float]:
    """Peak memory by step, in order: of this process, or of a larger one that the step starts."""
    peaks: dict[str, float] = {}
    if plan.proven:
        peaks["verify passes"] = floor + _proof(facts, plan)  # all given back
    peaks["export"] = floor + EXPORTED * facts.exported
    passed = peaks["export"] + 4 * MB
    peaks["passes"] = passed + (0 if plan.proven or plan.verify == "none" else _proof(facts, plan))
    if plan.int4 == "awq-int4":
        peaks["calibration"] = passed + _calibration(plan)
        passed += 0.75 * _calibration(plan)  # not all of it is given back
        if plan.verify != "none":
            peaks["verify smoothing"] = passed + _proof(facts, plan)
    peaks["weights"] = passed + facts.pieces
    after = passed + 5 * MB
    if plan.backend == "inductor":
        peaks["compile"] = max(after, _compiler(facts))
    else:
        after = peaks["ONNX"] = passed + ONNX_IMPORTS
    if plan.backend.startswith("tensorrt"):
        peaks[f"{plan.backend} build"] = passed + _tensorrt(facts)
        after = passed + 11 * MB + 0.62 * facts.weights + 1.7 * MB * facts.nodes
        after += 4.8 * MB * facts.experts
    peaks["checksums"] = after + 3 * MB
    if plan.executed:
        peaks["verify"] = after + _verify(facts, plan)
    return peaks


def _proof(facts: Facts, plan: Plan) -> float:
    """Graphs of some layers, with weights in fp32 and in the engine's dtype as far as they are
    held, and a dozen sets of logits; beyond that what a block of a large weight takes."""
    spec = plan.spec
    table = spec.vocab_size * spec.hidden_size * (1 if spec.tie_word_embeddings else 2)
    layers = (spec.parameters - table) / spec.num_layers * (plan.proven or spec.num_layers)
    both = 1.0 if plan.dtype == "float32" else 1.5
    weights = 4 * both * (table + layers * (2 if plan.int4 else 1))
    large = 20 * PIECE + facts.embedding / 2 if weights > HELD_BYTES else 0
    logits = 12 * both * 4 * sum(LENGTHS) * spec.vocab_size
    return min(weights, HELD_BYTES) + large + logits + 15 * MB


def settled_bytes(verify: int, facts: Facts, plan: Plan) -> int:
    """Peak of a verification, `verify` as predicted, in which fp64 settles whether an fp32 engine
    is right: that happens where weights are so large that fp32 eager itself is uncertain."""
    return int(verify - _verify(facts, plan) + 45 * MB + 16 * plan.spec.parameters)


def _compiler(facts: Facts) -> float:
    """The larger of AOTInductor's processes. The weights there are empty and take nothing."""
    return 514 * MB + 0.35 * MB * facts.nodes


def _on_device(step: str, facts: Facts, plan: Plan) -> int:
    """Of the GPU's memory; the KV cache of `verify` takes what is left."""
    if plan.device == "cpu" or step not in ("compile", "verify"):
        return 0
    return CONTEXT + facts.weights


def _tensorrt(facts: Facts) -> float:
    """The weights as parsed, as laid out and in the engine; its library; its graphs."""
    graphs = 1.83 * MB * facts.nodes + 22.5 * MB * facts.experts
    return 108 * MB + 3.11 * facts.weights + graphs


def _verify(facts: Facts, plan: Plan) -> float:
    """Eager in fp32 and, for lower dtypes, in those, with INT4 weights decoded on the way; the
    engine's weights, of which ONNX Runtime packs most a second time."""
    full = plan.dtype == "float32"
    eager = 4 * plan.spec.parameters * ((1.0 if full else 1.3) + (0.6 if plan.int4 else 0))
    if plan.backend == "inductor":
        return 30 * MB + eager + 0.8 * facts.weights
    return 45 * MB + eager + (1.72 if full else 3.5) * facts.weights


def _calibration(plan: Plan) -> float:
    """Hidden states of all tokens, before and after a layer; that layer's weights in fp32."""
    layer = 4 * plan.spec.parameters / plan.spec.num_layers
    return 30 * MB + 3 * 4 * TOKENS * plan.spec.hidden_size + 4 * layer


def _engine(facts: Facts, plan: Plan) -> int:
    """All files: weights, code, tokenizer."""
    spec, size = plan.spec, facts.weights + plan.tokenizer_bytes + 20_000
    if plan.backend == "inductor":
        code = 3.3 * MB + 7_500 * facts.nodes + 17_000 * facts.int4
        return int(size + (code if plan.device == "cpu" else code / 2))
    if plan.backend == "onnxruntime":
        return int(size + 800 * facts.nodes + 45_000 * facts.experts + 5_000 * facts.int4)
    latent = spec.num_layers if spec.kv_lora_rank else 0
    kernels = 2.3 + 0.8 * spec.num_layers + 1.9 * latent + 5.6 * facts.experts
    return int(size + MB * (kernels + (0 if facts.experts else 0.14 * facts.int4)))


def _seconds(facts: Facts, plan: Plan) -> dict[str, float]:
    """Two CPU cores that do nothing else."""
    weights = facts.weights / 400e6
    if plan.int4 is not None:
        weights += plan.spec.parameters / 6e6
    proof = 0.25 * 12 + 12 * 60 * plan.spec.parameters / plan.spec.num_layers / 1e10
    return {
        "verify passes": proof,
        "verify smoothing": proof / 4,
        "export": 0.6 + 0.0033 * facts.exported,
        "passes": 0.2 + 0.0012 * facts.exported,
        "calibration": 1.5e-6 * plan.spec.parameters,
        "weights": weights,
        "compile": 15 + 0.12 * facts.nodes + facts.weights / 30e6,
        "ONNX": 0.1,
        f"{plan.backend} build": 1 + 0.05 * facts.nodes + 2.0 * facts.experts,
        "checksums": facts.weights / 1.5e9,
        "verify": 1.2 + (7e-7 if plan.int4 else 3e-8) * plan.spec.parameters,
    }
