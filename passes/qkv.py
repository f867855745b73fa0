"""QKV: the projections of one attention layer that read the same input become one matrix product.

For Llama and Qwen these are q, k and v (with bias in Qwen2, with different widths under
grouped-query attention); for DeepSeek the first projection of q (q_a_proj, or q_proj where there is
no q LoRA) and kv_a_proj_with_mqa. Linears belong together when they have one input and sit in the
module of the attention node. Where only some have a bias (DeepSeek's kv_a beside q_proj) it is
added behind the product.
"""

from __future__ import annotations

import time
from collections import defaultdict

from torch import fx

from seekforge.kernels.attention import attention
from seekforge.passes.linears import (
    LINEAR,
    cannot_concatenate,
    concatenate,
    replace_by_split,
    separate_biases,
)
from seekforge.passes.pattern import Miss
from seekforge.passes.program import Program, module_path, source_line
from seekforge.passes.rule import PassResult


def fuse_qkv(program: Program) -> PassResult:
    """fired: attention layers whose projections were fused."""
    start, before = time.perf_counter(), len(program.graph.nodes)
    projections: dict[str, dict[fx.Node, list[fx.Node]]] = defaultdict(lambda: defaultdict(list))
    for node in program.nodes(LINEAR):
        owner = module_path(node).rpartition(".")[0]
        projections[owner][node.args[0]].append(node)  # type: ignore[index]
    fired, misses = 0, []
    for layer in program.nodes(attention):
        owner = module_path(layer)
        groups = [group for group in projections[owner].values() if len(group) > 1]
        if not groups:
            reason = f"no two linear layers of {owner or 'its module'} share an input"
            misses.append(Miss(layer.name, reason, source_line(layer)))
        for group in groups:
            refused = cannot_concatenate(program, group, mixed_bias=True)
            if refused:
                misses.append(Miss(group[0].name, refused, source_line(group[0])))
                continue
            group = separate_biases(program, group)
            replace_by_split(program, group, concatenate(program, group, f"{owner}.qkv_proj"))
            fired += 1
    program.drop_unused()
    program.graph.lint()
    after = len(program.graph.nodes)
    return PassResult("qkv", fired, tuple(misses), before, after, time.perf_counter() - start)
