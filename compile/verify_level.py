"""How much of a model the passes are proven on, and what the manifest keeps of it.

"cheap": one layer of each kind. A model with the checkpoint's first layers, up to the first of the
last kind, is exported and put through the same passes; of the weights only theirs are read. "full":
the program that is built, every layer, while its own passes run; so is "cheap" where the model has
no further layers. "none": nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from seekforge.compile.check_model import Subject, alike, shortened
from seekforge.compile.export import export_checkpoint
from seekforge.compile.steps import Steps
from seekforge.compile.verify import Verifier
from seekforge.compile.weights import Source
from seekforge.passes.int4_options import Int4Options
from seekforge.passes.pipeline import run_pipeline
from seekforge.passes.program import Program

MOST_LAYERS = 8  # of the cheap level: DeepSeek-V3 needs 4, dense models 2
STEP = "verify passes"


def cheap_layers(subject: Subject) -> tuple[int, tuple[int, ...]]:
    """(how many of the first layers are run, the first layer of each kind beyond them). There are
    kinds beyond them only in checkpoints that are quantised layer by layer."""
    first = sorted(alike(subject, None))
    count = min(1 + first[-1], MOST_LAYERS)
    return count, tuple(layer for layer in first if layer >= count)


@dataclass(slots=True)
class PassProof:
    """The proof of the passes of one engine. form, dtype, max_len, int4, device: as the pipeline
    and the export take them. source: what `check_source` found.

    In order: `run_short`; the build's own pipeline with `observe`; `finish`; with calibrated
    weights `check_source`. Each does its part at its level.
    """

    subject: Subject
    level: str
    form: str
    dtype: str
    max_len: int
    int4: Int4Options | None
    device: str
    verifier: Verifier | None = field(init=False, default=None)
    left_out: tuple[int, ...] = field(init=False, default=())
    source: dict[str, float] | None = field(init=False, default=None)

    @property
    def whole(self) -> bool:
        """Whether the program that is built is looked at itself."""
        assert self.verifier is not None
        return self.verifier.layers == self.subject.spec.num_layers

    def __post_init__(self) -> None:
        if self.level == "none":
            return
        count = self.subject.spec.num_layers
        if self.level == "cheap":
            count, self.left_out = cheap_layers(self.subject)
        assert self.subject.checkpoint is not None, "only weights can prove anything"
        self.verifier = Verifier(self.subject.checkpoint, count, self.dtype, self.max_len)

    def run_short(self, steps: Steps) -> None:
        """Proves the passes on the first layers, where that is the level. Raises BuildError as the
        build's own passes do, and for one that changes what the model computes."""
        if self.verifier is None or self.whole:
            return
        checkpoint = self.verifier.checkpoint
        short = replace(checkpoint, config=shortened(checkpoint.config, self.verifier.layers))
        int4 = self.int4
        if int4 is not None:  # which layers are left as they are does not concern the pass
            int4 = replace(int4, skip=tuple(n for n in int4.skip if not re.search(r"\d", n)))
        with steps.step(STEP):
            program = export_checkpoint(short, self.dtype, self.max_len)
            observe = self.verifier.observe
            run_pipeline(program, self.form, self.max_len, None, int4, self.device, observe)
        self.verifier.release()  # before the export needs memory

    def observe(self, name: str, program: Program) -> None:
        """The observer of the build's own pipeline."""
        if self.verifier is not None and self.whole:
            self.verifier.observe(name, program)

    def check_source(self, source: Source, steps: Steps) -> None:
        """Holds the weights that calibration made against the checkpoint's (`Verifier`)."""
        if self.verifier is None:
            return
        with steps.step("verify smoothing"):
            self.source = self.verifier.check_source(source)
        steps.console.print(
            f"    smoothing changes the logits of {self.verifier.where()} by "
            f"{self.source['smoothing']:.1e}, INT4 then by {self.source['rounding']:.1e}",
            highlight=False, style="dim",
        )  # fmt: skip

    def finish(self, steps: Steps) -> None:
        """Prints what was proven: the worst pass and its limit, what INT4 lost, what was not run.
        Drops the weights that were held for it."""
        if self.verifier is None:
            return
        self.verifier.release()
        errors = self.verifier.errors
        name, worst = max(errors.items(), key=lambda item: item[1].normalised)
        lines = [
            f"{len(errors)} passes proven on {self.verifier.where()}: largest normalised error "
            f"{worst.normalised:.1e} ({name}; limit {self.verifier.limit:.0e})"
        ]
        for error in errors.values():
            if error.rounding is not None:
                lines.append(f"INT4 by plain rounding changes these logits by {error.rounding:.1e}")
        if self.left_out:
            others = ", ".join(map(str, self.left_out))
            lines.append(f"not run: kinds of layers that begin at layer {others}")
        for line in lines:
            steps.console.print(f"    {line}", highlight=False, style="dim")

    def with_errors(self, passes: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
        """The manifest's passes, each with its "error" where one was found: logits_rows has none of
        its own, it is one change of the graph with kv_cache."""
        found = self.verifier.errors if self.verifier else {}
        return tuple(
            dict(entry)
            | ({"error": found[entry["name"]].to_dict()} if entry["name"] in found else {})
            for entry in passes
        )

    def record(self) -> dict[str, Any]:
        """The manifest's account of the proof: the limits, and what the passes were run on."""
        if self.verifier is None:
            return {"level": "none"}
        return {
            "level": self.level,
            "layers": self.verifier.layers,
            "kinds_left_out": list(self.left_out),
            "tokens": self.verifier.positions,
            "limit": self.verifier.limit,
            "own_limit": self.verifier.own_limit,
            "source": self.source,
        }
