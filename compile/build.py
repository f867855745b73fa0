"""The build: a checkpoint in, a bundle of engine directories out, each verified before it appears.

    open -> export -> passes -> weights -> lower -> verify -> rename into place

The manifest is written last. A build that fails or is killed leaves nothing that loads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from seekforge.compile.account import account_passes
from seekforge.compile.build_cache_lower import lower_or_reuse
from seekforge.compile.build_cache_request import Request, request
from seekforge.compile.build_cache_reuse import NEW, reason_to_build
from seekforge.compile.bundle import (
    atomic_directory,
    check_writable,
    copy_tokenizer,
    exclusive,
    link_weights,
    tokenizer_missing,
    write_whole,
)
from seekforge.compile.calibration_file import CALIBRATION_NAME, Calibrated
from seekforge.compile.check_costs import activation_bytes, memory_floor, predict
from seekforge.compile.check_machine import requirements
from seekforge.compile.check_model import Subject, count_calls, facts_of
from seekforge.compile.compare import compare
from seekforge.compile.compare_text import format_table
from seekforge.compile.export import export_checkpoint
from seekforge.compile.failures import caught
from seekforge.compile.kernel_cache import ship_kernels
from seekforge.compile.lower import MODEL_NAME, Lowering
from seekforge.compile.options import FORMS
from seekforge.compile.options import Options as Options
from seekforge.compile.plan import engine_dtype, int4_options, limits_of, plan_of
from seekforge.compile.prompts import PROMPTS
from seekforge.compile.quantise import calibrated, summary, text_windows
from seekforge.compile.report import write_report
from seekforge.compile.report_graphs import Recorder
from seekforge.compile.steps import Steps, durations
from seekforge.compile.verify_level import PassProof
from seekforge.compile.weights import WEIGHTS_NAME, Source, recipe, write_weights
from seekforge.compile.workspace import check_workspace
from seekforge.kernels.errors import BuildError, InputError
from seekforge.models.checkpoint import Checkpoint, open_checkpoint
from seekforge.models.families import expected_fusions
from seekforge.passes.int4 import int4_sizes, int4_tensors, sign_int4
from seekforge.passes.kv_cache import GraphInput, graph_outputs
from seekforge.passes.pipeline import run_pipeline
from seekforge.passes.program import Program
from seekforge.passes.rule import PassResult
from seekforge.runtime.fit import unfit_reason
from seekforge.runtime.manifest import (
    FORMAT_VERSION,
    Generation,
    KVLayout,
    Limits,
    Manifest,
    TensorSpec,
    file_entries,
    read_manifest,
    write_manifest,
)


def build(
    checkpoint_path: Path, out: Path, options: Options, steps: Steps | None = None
) -> list[Path]:
    """Builds one engine directory for each backend below `out`; returns them.

    Raises InputError (CheckpointError) before anything heavy for what can be known then, BuildError
    for a step that failed; finished engines stay, the failed one leaves nothing.
    """
    floor = memory_floor(options.backends)
    checkpoint = open_checkpoint(checkpoint_path)
    limits = limits_of(checkpoint.config, options)
    int4_options(checkpoint, options)  # refuses what contradicts the checkpoint
    check_writable(out)
    for backend in options.backends:
        dtype = engine_dtype(checkpoint.config, options, backend)
        problems = requirements(backend, options.device, dtype, options.target, options.strip)
        if problems:
            raise InputError("; ".join(map(str, problems)))
    missing = tokenizer_missing(checkpoint.path)
    if missing and options.verify != "none":
        raise InputError(f"{missing}; add it, or build with --no-verify")
    steps = steps or Steps(checkpoint.spec.model_type)
    text = None
    if options.quant == "awq-int4":  # a text that can't be used is known before anything heavy
        text = text_windows(checkpoint, options.calib)
    for line in checkpoint.warnings:
        steps.console.print(f"warning: {line}", style="yellow", highlight=False)
    job = _Job(checkpoint, out, options, limits, steps, text, floor)
    return [job.build(backend) for backend in options.backends]


class _Job:
    """One build call: what its engines share."""

    def __init__(
        self, checkpoint: Checkpoint, out: Path, options: Options, limits: Limits, steps: Steps,
        text: list[list[int]] | None, floor: int,
    ) -> None:  # fmt: skip
        self.checkpoint, self.out, self.options = checkpoint, out, options
        self.limits, self.steps, self.text = limits, steps, text
        self.subject = Subject(checkpoint.path, checkpoint.config, checkpoint.spec, checkpoint)
        self.calibrated: Calibrated | None = None
        self.floor = floor  # of memory, before the next engine
        self.exported = 0  # calls of the graph before the passes

    def build(self, backend: str) -> Path:
        """The engine in its place: made, or the one that is there, if a build would give it."""
        engine, console = self.out / backend, self.steps.console
        console.print(f"{backend}", style="bold")
        with exclusive(engine, lambda: console.print("    another build makes it; waiting")):
            wanted = request(self.checkpoint.path, self.options, backend)
            reason = reason_to_build(engine, wanted, self.checkpoint.path, self.options)
            if reason is None:
                console.print("    unchanged")
                return engine
            if reason != NEW:
                console.print(f"    rebuilt: {reason}", highlight=False, markup=False)
            return self._build(backend, wanted)

    def _build(self, backend: str, wanted: Request) -> Path:
        first, floor = len(self.steps.done), self.floor
        plan = plan_of(self.subject, self.options, backend)
        self.steps.subject, dtype = plan.subject, plan.dtype
        known = durations(plan.subject)
        log = self.out / f"{backend}.log"
        keep = WEIGHTS_NAME if self.options.cache else None  # of builds that were killed
        with (
            atomic_directory(self.out / backend, keep) as folder,
            caught(backend, log, self.steps, folder / MODEL_NAME),
        ):
            proof = PassProof(
                self.subject, self.options.verify, FORMS[backend], dtype, self.limits.max_len,
                int4_options(self.checkpoint, self.options), self.options.device,
            )  # fmt: skip
            proof.run_short(self.steps)
            program, inputs, passes = self._program(backend, dtype, proof)
            counted = facts_of(program, self.exported, plan.spec.num_layers, self.subject)
            activation = activation_bytes(program, inputs, plan)
            predicted = predict(counted, plan, floor, activation, known)
            source = self._source(program)
            if source is not self.checkpoint:
                proof.check_source(source, self.steps)
            made = recipe(program, source)
            kv = self._kv(backend, dtype)
            lowering = Lowering(
                backend, program, inputs, folder, dtype, self.options.device, self.limits, kv,
                self.options.tensorrt, self.out, self.steps,
            )  # fmt: skip
            facts = lower_or_reuse(
                lowering, made, lambda: self._weights(program, source, folder, made),
                plan.subject, self.options.cache,
            )  # fmt: skip
            copy_tokenizer(self.checkpoint.path, folder)
            manifest = self._manifest(backend, dtype, program, inputs, passes, kv, facts, folder)
            manifest = dataclasses.replace(
                manifest,
                steps=tuple(self.steps.done[first:]),
                predicted=dataclasses.asdict(predicted),
                built_from=wanted,
                passes=proof.with_errors(manifest.passes),
                proof=proof.record(),
            )
            write_manifest(folder, manifest)
            if backend == "inductor" and self.options.device == "cuda":
                with self.steps.step("kernels"):
                    ship_kernels(folder)
                manifest = dataclasses.replace(manifest, files=file_entries(folder))
                write_manifest(folder, manifest)
            receipt = self._verify(backend, folder)
            write_manifest(
                folder,
                dataclasses.replace(
                    manifest, receipt=receipt, steps=tuple(self.steps.done[first:])
                ),
            )
            write_report(folder, self.recorder, program, self.steps.console)
        self.floor = memory_floor(self.options.backends)
        return self.out / backend

    def _program(
        self, backend: str, dtype: str, proof: PassProof
    ) -> tuple[Program, list[GraphInput], list[PassResult]]:
        self.recorder = Recorder(self.checkpoint.spec.num_layers)
        with self.steps.step("export"):
            program = export_checkpoint(self.checkpoint, dtype, self.limits.max_len)
        self.exported = count_calls(program, self.checkpoint.spec.num_layers)
        with self.steps.step("passes"):
            passes, inputs = run_pipeline(
                program,
                FORMS[backend],
                self.limits.max_len,
                expected_fusions(self.checkpoint.spec),
                int4_options(self.checkpoint, self.options),
                self.options.device,
                self.recorder.beside(proof.observe),
            )
            workspace = None
            if FORMS[backend] == "padded":
                workspace = check_workspace(program, self.limits, backend)
            if backend.startswith("tensorrt"):
                sign_int4(program)  # ONNX's own INT4 type
        fired = ", ".join(
            f"{p.name} {p.fired}" for p in passes if "clean" not in p.name and p.name != "normalise"
        )
        self.steps.console.print(f"    {fired}", highlight=False, style="dim")
        proof.finish(self.steps)
        if workspace is not None:
            self.steps.console.print(
                f"    largest temporary {workspace.bytes / 1e6:.0f} MB: {workspace.what}",
                highlight=False, style="dim",
            )  # fmt: skip
        return program, inputs, passes

    def _source(self, program: Program) -> Source:
        """Where weights come from: the checkpoint, or what calibration makes of it."""
        if self.text is None:
            return self.checkpoint
        self.calibrated = calibrated(
            self.checkpoint, self.text, int4_tensors(program), self.options.int4.symmetric,
            self.out / CALIBRATION_NAME, self.steps,
        )  # fmt: skip
        return self.calibrated

    def _weights(self, program: Program, source: Source, folder: Path, made: str) -> None:
        """The weights file of the recipe `made`: one that is there already, or a new one."""
        found = link_weights(self.out, folder, made)
        if found is not None:
            self.steps.reused("weights", found)
            return
        with self.steps.step("weights"):
            write_whole(folder / WEIGHTS_NAME, lambda path: write_weights(program, source, path))

    def _kv(self, backend: str, dtype: str) -> KVLayout:
        return KVLayout(
            num_layers=self.checkpoint.spec.num_layers,
            block_size=self.options.block_size,
            pools=self.checkpoint.spec.kv_pools,
            dtype=dtype,
            dynamic_block_size=not backend.startswith("tensorrt"),
        )

    def _manifest(
        self,
        backend: str,
        dtype: str,
        program: Program,
        inputs: list[GraphInput],
        passes: list[PassResult],
        kv: KVLayout,
        facts: dict[str, Any],
        folder: Path,
    ) -> Manifest:
        checkpoint = self.checkpoint
        with self.steps.step("checksums"):
            files = file_entries(folder)
        return Manifest(
            format_version=FORMAT_VERSION,
            seekforge_version=version("seekforge"),
            backend=backend,
            form=FORMS[backend],
            dtype=dtype,
            model=checkpoint.spec.to_dict() | {"checkpoint": str(checkpoint.path.resolve())},
            limits=self.limits,
            kv=kv,
            generation=Generation(checkpoint.eos_token_ids, checkpoint.bos_token_id, None),
            quantization=self._quantization(program),
            passes=tuple(account_passes(passes, expected_fusions(checkpoint.spec))),
            receipt=None,
            steps=(),
            files=files,
            **{
                "layers": None,
                "memory": None,
                "profiles": (),
                "inputs": _specs(inputs),
                "outputs": _specs(graph_outputs(program)),
                **facts,
            },
        )

    def _quantization(self, program: Program) -> dict[str, Any] | None:
        options = int4_options(self.checkpoint, self.options)
        if options is None:
            return None
        quant = self.checkpoint.quant
        return {
            "method": self.options.quant if quant is None else quant.method,
            "group_size": options.group_size if quant is None else quant.group_size,
            "symmetric": options.symmetric,
            "skip": list(options.skip),
            "group_sizes": int4_sizes(program),
            "tensors": int4_tensors(program),
            "calibration": None if self.calibrated is None else summary(self.calibrated),
        }

    def _verify(self, backend: str, folder: Path) -> dict[str, Any]:
        """Compares the engine with eager: its receipt. One that can't run here says so in it."""
        if self.options.verify == "none":
            return {"executed": False, "reason": "built with --no-verify"}
        session_reason = _cannot_run(folder)
        if session_reason:
            self.steps.console.print(f"    not executed: {session_reason}", highlight=False)
            return {"executed": False, "reason": session_reason}
        with self.steps.step("verify"):
            result = compare([folder], self.checkpoint.path, prompts=PROMPTS[:2], max_tokens=8)
        (engine,) = result.engines
        if not engine.passed:
            raise BuildError(
                f"the {backend} engine does not compute what the checkpoint computes:\n"
                + format_table(result)
            )
        self.steps.console.print(f"    {engine.summary()}", highlight=False, style="dim")
        return {"executed": True, **engine.to_dict()}


def _cannot_run(folder: Path) -> str | None:
    return unfit_reason(read_manifest(folder, check_files=False))


def _specs(values: Iterable[GraphInput]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(v.name, str(v.dtype).removeprefix("torch."), v.dims) for v in values)
