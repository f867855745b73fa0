"""The pipeline: which passes run, in which order, and what must have fired.

One straight list. Fewer matches than the model family promises is an error with the near-misses'
reasons: a fusion that silently does not fire is how compiled models become slow or wrong unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable

from seekforge.kernels.errors import BuildError
from seekforge.passes import add_rms_norm, rms_norm, swiglu
from seekforge.passes.cleanup import cleanup, share_equal_weights
from seekforge.passes.int4 import Int4Options, insert_int4
from seekforge.passes.kv_cache import GraphInput, insert_kv_cache
from seekforge.passes.mla import fuse_mla
from seekforge.passes.mla_append import fuse_mla_append
from seekforge.passes.moe import fuse_moe
from seekforge.passes.program import Program
from seekforge.passes.qkv import fuse_qkv
from seekforge.passes.rope import fuse_rope
from seekforge.passes.rope_append import fuse_rope_append
from seekforge.passes.rule import PassResult, apply
from seekforge.passes.shared_experts import fuse_shared_experts

Step = tuple[str, Callable[[Program], PassResult]]
Observer = Callable[[str, Program], None]


def unobserved(name: str, program: Program) -> None:
    """The observer that looks at nothing."""


def fusions(max_len: int) -> list[Step]:
    """The graph-to-graph part, before the KV cache. max_len: rows of the RoPE table."""
    return [
        ("normalise", lambda p: cleanup(p, "normalise")),  # first: patterns see one spelling
        ("rms_norm", lambda p: apply(rms_norm.RULE, p)),
        ("add_rms_norm", lambda p: apply(add_rms_norm.RULE, p)),  # needs the rms_norm nodes
        ("rope", lambda p: fuse_rope(p, max_len)),
        ("qkv", fuse_qkv),  # needs the attention nodes of the export
        ("swiglu", lambda p: apply(swiglu.RULE, p)),
        ("mla", fuse_mla),  # needs the rope nodes
        ("moe", fuse_moe),
        ("cleanup", cleanup),  # transposes left by rope cancel
    ]


def run_fusions(program: Program, max_len: int, observe: Observer = unobserved) -> list[PassResult]:
    """Applies all fusions to `program` in place. observe: see `run_pipeline`."""
    share_equal_weights(program)
    observe("exported", program)
    results = []
    for name, run in fusions(max_len):
        results.append(run(program))
        observe(name, program)
    return results


def run_pipeline(
    program: Program,
    form: str,
    max_len: int,
    expected: dict[str, int] | None,
    int4: Int4Options | None = None,
    device: str = "cpu",
    observe: Observer = unobserved,
) -> tuple[list[PassResult], list[GraphInput]]:
    """All passes, from an exported graph to the `form` ("ragged" or "padded") that backends lower.

    int4: how linear layers and experts are quantised; None: not at all. device: "cpu" or "cuda".
    expected: passes and the number of times each must fire; None for a model without known numbers.
    observe: called with the name of each pass that ran and the program as it left it ("exported"
    before the first); the program changes afterwards, so what is to be kept must be copied.
    Raises BuildError when one fired less often.
    """
    results = run_fusions(program, max_len, observe)
    if int4 is not None:  # after the fusions: fused weights quantise as one
        results.append(insert_int4(program, int4))
        observe("int4", program)
    inserted, inputs = insert_kv_cache(program, form)
    results += inserted
    observe("kv_cache", program)
    if form == "ragged" and device == "cuda":
        results.append(fuse_rope_append(program))
        observe("rope_append", program)
        results.append(fuse_mla_append(program))
        observe("mla_append", program)
        results.append(fuse_shared_experts(program))  # needs the operators of INT4
        observe("shared_experts", program)
    results.append(cleanup(program, "final cleanup"))
    observe("final cleanup", program)
    if expected is not None:
        if form == "ragged" and device == "cuda":
            expected = expected | expected_on_gpus(expected, int4 is None)
        check_expected(results, expected)
    return results, inputs


def expected_on_gpus(expected: dict[str, int], plain: bool) -> dict[str, int]:
    """How often the GPU's own passes must fire, from what the fusions must. plain: nothing is INT4,
    where routed and shared experts may be of different formats."""
    latent = expected.get("mla", 0)
    appended = {"mla_append": latent} if latent else {"rope_append": expected["rope"]}
    # Of the layers with experts those with shared ones have an MLP beside them.
    dense = expected["rope"] - expected.get("moe", 0)
    return appended | ({"shared_experts": expected.get("swiglu", 0) - dense} if plain else {})


def check_expected(results: list[PassResult], expected: dict[str, int]) -> None:
    """Raises BuildError naming every pass that fired less often than expected, with its
    near-misses."""
    fired = {result.name: result for result in results}
    lines = []
    for name, count in expected.items():
        result = fired.get(name)
        if result is not None and result.fired >= count:
            continue
        lines.append(f"{name}: expected {count} matches, found {result.fired if result else 0}")
        for miss in result.misses[:5] if result else ():
            lines.append(f"    {miss.node} ({miss.source}): {miss.reason}")
    if lines:
        raise BuildError(
            "fusions did not fire as expected for this model:\n" + "\n".join(lines)
            + "\nThe installed transformers may build this model differently; tried: 5.17 to 5.24."
        )  # fmt: skip
