"""Export of transformers' modules: symbolic sizes, weights' names, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from seekforge.compile.execute import run
from seekforge.compile.export import export_module
from seekforge.kernels.attention import attention
from seekforge.kernels.errors import BuildError
from seekforge.models.module import build_module
from seekforge.passes.cleanup import cleanup

SIZES = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip


def meta_module(family: str = "llama") -> nn.Module:
    return build_module(AutoConfig.for_model(family, **SIZES), torch.bfloat16)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_sizes_stay_symbolic(exported: Callable[..., Any], family: str) -> None:
    """B42: traced at (2, 7), bitwise equal to eager at 1, 3 and 2 sequences of other lengths."""
    program, module = exported(family)
    placeholders = program.graph.find_nodes(op="placeholder")
    assert [node.target for node in placeholders] == ["input_ids", "position_ids", "use_cache"]
    for node in placeholders[:2]:
        assert all(isinstance(size, torch.SymInt) for size in node.meta["val"].shape)
    cleanup(program)  # drops the checks for the meta device
    for batch, seq in ((1, 8), (3, 5), (2, 64), (1, 1)):
        ids = torch.randint(0, 293, (batch, seq))
        positions = torch.arange(seq).expand(batch, seq)
        (logits,) = run(program, module.get_parameter, ids, positions, False)
        eager = module(input_ids=ids, position_ids=positions, use_cache=False).logits
        assert torch.equal(logits, eager), f"{batch=} {seq=}"


def test_one_attention_node_a_layer_and_no_data() -> None:
    module = meta_module()
    program = export_module(module, {name: (name,) for name in module.state_dict()}, 256)
    (node,) = program.nodes(attention)
    assert node.args[3:] == (8**-0.5, 0)
    assert all(program.tensor(name).is_meta for name in program.weights)
    assert program.constants["model.rotary_emb.inv_freq"].device.type == "cpu"


def test_renamed_sources() -> None:
    """Checkpoint names may differ from the module's."""
    module = meta_module()
    program = export_module(module, {name: (f"x.{name}",) for name in module.state_dict()}, 256)
    assert program.weights["lm_head.weight"].sources == ("x.lm_head.weight",)


def test_a_weight_without_source_is_named() -> None:
    module = meta_module()
    sources = {name: (name,) for name in module.state_dict() if "gate_proj" not in name}
    with pytest.raises(BuildError, match=r"reads model\.layers\.0\.mlp\.gate_proj\.weight"):
        export_module(module, sources, 256)


@pytest.mark.parametrize("what", ["size", "data"])
def test_code_that_depends_on_values_is_refused(what: str) -> None:
    """A size that the code fixes, and a branch on data: no engine for one sample only."""
    module = meta_module()
    inner = module.model.embed_tokens.forward  # type: ignore[union-attr, operator]

    def fixed(ids: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == 7 if what == "size" else bool(ids.sum() > 0):
            ids = ids + 0
        y: torch.Tensor = inner(ids)
        return y

    module.model.embed_tokens.forward = fixed  # type: ignore[union-attr, assignment]
    with pytest.raises(BuildError, match=r"export .*(failed|baked in)"):
        export_module(module, {name: (name,) for name in module.state_dict()}, 256)
