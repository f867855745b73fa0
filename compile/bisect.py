"""Bisection of an engine: which step of its making first computes something else, and which node.

    eager -> exported -> (smoothed -> rounded) -> each pass -> weights -> lowered -> runtime

In: an engine directory and its checkpoint. Export and passes are done again as the manifest says,
with the code that is installed; weights, the compiled model and the runtime are the engine's own.
Each step is judged against the one before it on the same inputs, node by node, and the walk ends at
the first value beyond tolerance. Out: a `Bisection`, which names it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from seekforge.compile.bisect_eager import eager_values
from seekforge.compile.bisect_graphs import GraphWalk
from seekforge.compile.bisect_lowered import Lowered, check_lowered
from seekforge.compile.bisect_reference import Reference
from seekforge.compile.bisect_result import Bisection, Culprit, Found, StepResult
from seekforge.compile.bisect_runtime import check_answers, run_requests
from seekforge.compile.bisect_steps import paged_steps, unpaged_inputs
from seekforge.compile.bisect_weights import check_rounding, check_smoothing, check_stored, decoded
from seekforge.compile.calibration_file import CALIBRATION_NAME, Calibrated, load_calibration
from seekforge.compile.export import DTYPES, export_checkpoint
from seekforge.compile.options import Options
from seekforge.compile.plan import int4_options
from seekforge.compile.prompts import PROMPTS
from seekforge.compile.quantise import QUANTISATIONS
from seekforge.compile.run_graph_weights import GraphWeights
from seekforge.compile.weights import WEIGHTS_NAME, Source
from seekforge.kernels.errors import InputError
from seekforge.models.checkpoint import open_checkpoint
from seekforge.passes.int4 import Int4Options, sign_int4
from seekforge.passes.pipeline import run_pipeline
from seekforge.passes.program import Program
from seekforge.runtime.fit import resolve_engine, unfit_reason
from seekforge.runtime.manifest import read_manifest

SEQUENCES = 2
TOKENS = 16  # of each sequence
BLOCK = 4  # tokens of a KV block in the graphs' steps, where the engine leaves that free


def bisect(
    directory: Path,
    checkpoint: Path | None = None,
    prompts: Sequence[str] = PROMPTS,
    tokens: int = TOKENS,
    out: Path | None = None,
) -> Bisection:
    """Walks an engine directory. checkpoint: None for the one its manifest names. prompts: what the
    model is asked; its first `tokens` tokens. out: folder for the culprit's tensors.

    Raises InputError (EngineError) where the engine or its checkpoint can't be read.
    """
    walk = _Walk(resolve_engine(directory), checkpoint, prompts, tokens)
    culprit = None
    try:
        walk.run()
    except Found as found:
        culprit = walk.ended(found.culprit)
    saved = culprit.save(out) if culprit is not None and out is not None else None
    return Bisection(walk.directory, tuple(walk.steps), culprit, saved)


class _Walk:
    def __init__(
        self, directory: Path, checkpoint: Path | None, prompts: Sequence[str], tokens: int
    ) -> None:
        self.directory = directory
        self.manifest = read_manifest(directory)
        path = checkpoint or Path(str(self.manifest.model.get("checkpoint", "")))
        if not (path / "config.json").is_file():
            raise InputError(
                f"{path}: the engine's checkpoint is not there; give it with --checkpoint"
            )
        self.checkpoint = open_checkpoint(path)
        self.dtype = DTYPES[self.manifest.dtype]
        self.text, self.tokens = self._tokens(prompts, tokens)
        self.quantization = self.manifest.quantization
        self.source = self._source()
        self.reference = Reference(self.checkpoint, self.source, self.quantization, self.dtype)
        self.steps: list[StepResult] = []
        self.since = time.perf_counter()

    def _tokens(self, prompts: Sequence[str], tokens: int) -> tuple[list[int], Tensor]:
        """All token ids of the prompts in a row, and SEQUENCES rows of them. Equal ones would hide
        which sequence is which, so a single prompt's second row begins in its middle."""
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(
                self.checkpoint.path, local_files_only=True
            )
        except Exception as error:  # transformers raises many kinds
            raise InputError(f"{self.checkpoint.path}: no tokenizer ({error})") from None
        ids = [list(tokenizer(prompt).input_ids) for prompt in prompts]
        text = [token for row in ids for token in row]
        length = min(tokens, self.manifest.limits.max_len)
        if length < 2 or len(text) < 2:
            raise InputError(
                f"{length} tokens of a text of {len(text)}: at least 2 are needed; give a longer "
                "--prompt or more --tokens"
            )
        count = min(SEQUENCES, self.manifest.limits.max_batch)
        starts = [i * max(1, len(text) // count) for i in range(count)]
        rows = [[text[(start + i) % len(text)] for i in range(length)] for start in starts]
        return text, torch.tensor(rows)

    def _source(self) -> Source:
        """Where the engine's weights come from."""
        quantization = self.quantization
        if quantization is None or quantization["method"] != "awq-int4":
            return self.checkpoint
        folder = self.directory.resolve().parent / CALIBRATION_NAME
        found = load_calibration(self.checkpoint, folder, quantization["calibration"]["key"])
        if found is None:
            raise InputError(
                f"{folder} has no calibration of this engine, or {self.checkpoint.path} is another "
                "checkpoint: build the engine again, or give its checkpoint with --checkpoint"
            )
        return found

    def _int4(self) -> Int4Options | None:
        quantization = self.quantization
        if quantization is None:
            return None
        if quantization["method"] in QUANTISATIONS:
            skip = tuple(quantization["skip"])
            return Int4Options(quantization["group_size"], quantization["symmetric"], skip)
        return int4_options(self.checkpoint, Options())

    def _done(self, name: str, error: float | None, note: str = "") -> None:
        now = time.perf_counter()
        self.steps.append(StepResult(name, now - self.since, error, note))
        self.since = now

    def ended(self, culprit: Culprit) -> Culprit:
        """Accounts for the step that the culprit was found in."""
        share = culprit.error / culprit.limit if culprit.limit else float("inf")
        self._done(culprit.step, share, "beyond tolerance")
        return culprit

    def run(self) -> None:
        program = export_checkpoint(
            self.checkpoint, self.manifest.dtype, self.manifest.limits.max_len
        )
        inputs = unpaged_inputs(self.tokens)
        self.graphs = GraphWalk(GraphWeights(self.checkpoint.read), inputs)
        _, graph_inputs = run_pipeline(
            program, self.manifest.form, self.manifest.limits.max_len, None, self._int4(),
            self.manifest.device, self._observe,
        )  # fmt: skip
        if self.manifest.backend.startswith("tensorrt"):
            sign_int4(program)  # as the build does
        weights = self.directory / WEIGHTS_NAME
        if weights.is_file():
            count = check_stored(program, self.graphs.weights, weights)
            self._done("weights", 0.0, f"{count} tensors, bit for bit")
        else:
            self._done("weights", None, "they are inside the engine")
        eager, exact = self.reference.logits([self.tokens])
        error, note = check_lowered(
            Lowered(
                self.directory, self.manifest, program, graph_inputs, self.source,
                self.graphs.weights, self.graphs.runs, eager[0].flatten(0, 1),
                exact[0].flatten(0, 1), self.reference.routed,
            )
        )  # fmt: skip
        self._done("lowered", error, note)
        self._runtime()

    def _observe(self, name: str, program: Program) -> None:
        """Called by the pipeline with each graph."""
        graphs = self.graphs
        if name == "exported":
            module = self.reference.module(self.dtype, rounded=False)
            given = eager_values(module, graphs.runs[0].inputs, program)
            del module
            graphs.begin(program, given)
            self._done(name, graphs.worst, f"{len(given)} values of modules")
            if self.quantization is not None:
                self._quantised(program)
            return
        if name == "kv_cache":
            kv = self.manifest.kv
            block = BLOCK if kv.dynamic_block_size else kv.block_size
            graphs.page(name, program, paged_steps(self.tokens, program, block))
        else:
            graphs.compare(name, program)
        self._done(name, graphs.worst)

    def _quantised(self, program: Program) -> None:
        """Smoothing and rounding by themselves; from here on graphs have the decoded weights."""
        quantization = self.quantization
        assert quantization is not None
        sizes, symmetric = quantization["tensors"], quantization["symmetric"]
        inputs = self.graphs.runs[0].inputs
        if isinstance(self.source, Calibrated):
            error = check_smoothing(program, self.source.calibration, sizes, inputs)
            self._done("smoothed", error)
        read = decoded(self.source, sizes, symmetric, self.dtype)
        self._done("rounded", check_rounding(self.source, read, sizes), f"{len(sizes)} tensors")
        self.graphs = GraphWalk(GraphWeights(read, self.source.int4), inputs)
        self.graphs.begin(program)

    def _runtime(self) -> None:
        reason = unfit_reason(self.manifest)
        if reason is not None:
            self._done("runtime", None, f"the engine is not executed: {reason}")
            return
        trace = run_requests(self.directory, self.text)
        error = check_answers(trace, self.reference, self.manifest.backend)
        self._done(
            "runtime", error,
            f"{trace.steps} steps of {len(trace.tokens)} requests, {trace.tensors} tensors",
        )  # fmt: skip
