"""The pipeline as a whole: counts, idempotence, sizes, and the error when too little fires."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from seekforge.compile.execute import run
from seekforge.kernels.errors import BuildError
from seekforge.kernels.tolerance import assert_close
from seekforge.models.families import expected_fusions
from seekforge.models.spec import ModelSpec
from seekforge.passes.cleanup import cleanup
from seekforge.passes.pattern import Miss
from seekforge.passes.pipeline import check_expected, fusions, run_fusions, run_pipeline
from seekforge.passes.program import Program, module_path
from seekforge.passes.rule import PassResult

FAMILIES = ["llama", "qwen2", "qwen3"]
FORMS = ["ragged", "padded"]
VIEWS = {
    "view", "reshape", "transpose", "unsqueeze", "squeeze", "slice", "expand", "getitem",
    "split_with_sizes", "sym_size",
}  # fmt: skip


def expected(module: nn.Module) -> dict[str, int]:
    return expected_fusions(ModelSpec.from_config(module.config))


def name_of(node: torch.fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return schema.name.split("::")[1] if schema else node.target.__name__  # type: ignore[union-attr]


def compute_nodes(program: Program) -> Counter[str]:
    calls = (node for node in program.graph.nodes if node.op == "call_function")
    return Counter(name for node in calls if (name := name_of(node)) not in VIEWS)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_counts_are_the_familys(exported: Callable[..., Any], family: str, form: str) -> None:
    program, module = exported(family)
    results, _ = run_pipeline(program, form, 64, expected(module))
    fired = {result.name: result.fired for result in results}
    assert {name: fired[name] for name in expected(module)} == expected(module)
    assert all(result.seconds >= 0 and result.nodes_after > 0 for result in results)
    first_norm = {"qwen3": 5}.get(family, 1)  # without a residual: the first, and q_norm, k_norm
    misses = {result.name: len(result.misses) for result in results if result.misses}
    assert misses == {"add_rms_norm": first_norm}


@pytest.mark.parametrize(
    ("family", "limit", "form"),
    [("llama", 9, "ragged"), ("qwen2", 9, "padded"), ("qwen3", 11, "ragged")],
)
def test_compute_nodes_a_layer(
    exported: Callable[..., Any], family: str, limit: int, form: str
) -> None:
    """At most 12 were asked for. A layer: 4 linears, 2 norms, RoPE, attention, SwiGLU; Qwen3 also
    norms q and k."""
    counts = []
    for layers in (1, 2):
        program, _ = exported(family, num_hidden_layers=layers)
        run_pipeline(program, form, 64, None)
        counts.append(compute_nodes(program))
    a_layer = counts[1] - counts[0]
    assert sum(a_layer.values()) == limit, a_layer
    assert a_layer["linear"] == 4
    # Around the layers: embedding, first norm, index_select, head.
    assert sum(counts[0].values()) - limit == 4, counts[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_graph_equals_eager_after_each_pass(
    exported: Callable[..., Any], family: str
) -> None:
    program, module = exported(family)
    ids = torch.randint(0, 293, (3, 5))
    positions = torch.arange(5).expand(3, 5) + 2
    eager = module(input_ids=ids, position_ids=positions, use_cache=False).logits
    for name, step in fusions(64):
        step(program)
        (logits,) = run(program, module.get_parameter, ids, positions, False)
        assert_close(logits, eager, f"{family} after {name}")


def test_fusions_are_idempotent(exported: Callable[..., Any]) -> None:
    program, _ = exported("qwen3")
    run_fusions(program, 64)
    before, weights = str(program.graph), dict(program.weights)
    assert [result.fired for result in run_fusions(program, 64)] == [0] * 9
    assert str(program.graph) == before
    assert program.weights == weights


@pytest.mark.parametrize("form", FORMS)
def test_final_clean_up_leaves_nothing(exported: Callable[..., Any], form: str) -> None:
    program, _ = exported("llama")
    run_pipeline(program, form, 64, None)
    assert cleanup(program).fired == 0


@pytest.mark.parametrize("tied", [False, True])
def test_each_checkpoint_tensor_is_used_once(exported: Callable[..., Any], tied: bool) -> None:
    """None is lost, none doubled; a tied matrix has one name in the graph (B22)."""
    program, module = exported("qwen2", tie_word_embeddings=tied)
    run_pipeline(program, "ragged", 64, expected(module))
    sources = [source for weight in program.weights.values() for source in weight.sources]
    used = sorted(module.get_parameter(source).data_ptr() for source in sources)
    assert used == sorted(parameter.data_ptr() for parameter in module.parameters())
    assert {n for n, w in program.weights.items() if w.value is not None} == {
        "rope.cos",
        "rope.sin",
    }
    read = {str(node.target) for node in program.graph.nodes if node.op == "get_attr"}
    assert read == set(program.weights)
    assert all(program.tensor(name).is_meta for name in read)
    assert {name for name, _ in program.graph_module.named_buffers()} | {
        name for name, _ in program.graph_module.named_parameters()
    } == read


def test_tied_head_equals_eager(exported: Callable[..., Any]) -> None:
    program, module = exported("qwen2", tie_word_embeddings=True)
    run_fusions(program, 64)
    ids = torch.randint(0, 293, (2, 7))
    positions = torch.arange(7).expand(2, 7)
    eager = module(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert_close(run(program, module.get_parameter, ids, positions, False)[0], eager, "tied")


def test_one_fusion_too_few_ends_the_build(exported: Callable[..., Any]) -> None:
    """The message names the pass, both numbers, and each near-miss with its source and reason."""
    program, module = exported("llama")
    wanted = expected(module) | {"add_rms_norm": 5, "moe": 1}
    with pytest.raises(BuildError) as raised:
        run_pipeline(program, "ragged", 64, wanted)
    message = str(raised.value)
    assert "add_rms_norm: expected 5 matches, found 4" in message
    assert "modeling_llama.py:" in message
    assert "expected aten.add.Tensor, found aten.embedding" in message
    assert "moe: expected 1 matches, found 0" in message
    assert "rope" not in message


def test_gelu_model_names_the_activation(tiny_checkpoint: Callable[..., Path]) -> None:
    """A model whose MLP is not SwiGLU does not reach a backend silently."""
    from transformers import AutoConfig

    from seekforge.compile.export import export_module
    from seekforge.models.module import build_module

    config = AutoConfig.from_pretrained(tiny_checkpoint("llama"))
    wanted = expected_fusions(ModelSpec.from_config(config))
    config.hidden_act = "gelu"
    module = build_module(config, torch.float32)
    program = export_module(module, {name: name for name in module.state_dict()}, 64)
    with pytest.raises(BuildError, match="swiglu: expected 2 matches, found 0"):
        run_pipeline(program, "padded", 64, wanted)


def test_check_expected_shows_five_reasons() -> None:
    misses = tuple(Miss(f"n{i}", f"reason {i}", "file.py:1") for i in range(9))
    with pytest.raises(BuildError) as raised:
        check_expected([PassResult("rope", 1, misses)], {"rope": 10})
    assert str(raised.value).count("file.py:1") == 5
    check_expected([PassResult("rope", 11, misses)], {"rope": 10})  # more is fine


def test_nodes_keep_their_origin(exported: Callable[..., Any]) -> None:
    """Backends' errors name the module and the source line of what they refuse."""
    program, _ = exported("llama")
    run_pipeline(program, "padded", 64, None)
    for node in program.graph.nodes:
        if node.op == "call_function" and "seekforge" in str(node.target):
            assert module_path(node), node
            assert "modeling_llama.py" in node.meta["stack_trace"], node
