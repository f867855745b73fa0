"""KV-cache insertion: every `attention` node becomes a paged one; the graph gets its last inputs.

Ragged form (AOTInductor), one row of tokens, all sequences behind one another:
    token_ids [T], positions [T], slot_mapping [T], block_tables [R, M], context_lens [R],
    query_start [R + 1], logits_rows [N], k_pool_i, v_pool_i (mutated)  ->  logits [N, V]
Padded form (ONNX Runtime, TensorRT), pure:
    token_ids [B, S], positions [B, S], block_tables [B, M], past_lens [B], logits_rows [N],
    k_pool_i, v_pool_i  ->  logits [N, V], new_k_i, new_v_i [B, S, kv_heads, head_dim]
Pools are [blocks, block_size, kv_heads, head_dim]; all index tensors are int64. Layers with
latent attention have one pool, latent_pool_i [blocks, block_size, kv_lora_rank + qk_rope_head_dim],
and one new_latent_i. After this pass the values in the graph's metadata are those of the new
inputs.

The residual stream becomes [tokens, hidden] in both forms; only the attention sees batch and seq.
With linear layers on [batch, seq, hidden] TensorRT keeps a second copy of most weights, one for
each profile (433 MB instead of 294 MB for 269 MB of weights).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from seekforge.kernels.attention import attention
from seekforge.kernels.errors import BuildError
from seekforge.kernels.gathered_attention import gathered_attention
from seekforge.kernels.gathered_mla_attention import gathered_mla_attention
from seekforge.kernels.mla_attention import mla_attention
from seekforge.kernels.paged_attention import paged_attention
from seekforge.kernels.paged_mla_attention import paged_mla_attention
from seekforge.passes.cleanup import VIEWS
from seekforge.passes.logits_rows import select_rows
from seekforge.passes.program import Program, source_line
from seekforge.passes.rule import PassResult

aten = torch.ops.aten
Inputs = dict[str, fx.Node]

RAGGED = {
    "token_ids": ("tokens",),
    "positions": ("tokens",),
    "slot_mapping": ("tokens",),
    "block_tables": ("sequences", "max_blocks"),
    "context_lens": ("sequences",),
    "query_start": ("sequences_plus_1",),
    "logits_rows": ("rows",),
}
PADDED = {
    "token_ids": ("batch", "seq"),
    "positions": ("batch", "seq"),
    "block_tables": ("batch", "max_blocks"),
    "past_lens": ("batch",),
    "logits_rows": ("rows",),
}
# Sizes used to trace. All differ and all are >= 2: a size of 1 would be baked into the graph.
TRACE_SIZES = {
    "tokens": 11, "sequences": 3, "sequences_plus_1": 4, "max_blocks": 5, "rows": 6,
    "batch": 3, "seq": 7, "blocks": 19, "block_size": 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GraphInput:
    """One input (or output) of the final graph; dims are sizes or names of dynamic dimensions."""

    name: str
    dtype: torch.dtype
    dims: tuple[int | str, ...]


def insert_kv_cache(program: Program, form: str) -> tuple[list[PassResult], list[GraphInput]]:
    """Turns an exported graph into its `form`; returns the results of kv_cache and logits_rows,
    and the inputs.

    Raises BuildError where the graph has attention layers missing, reads other inputs, or does
    with the attention's output what the flattened residual stream can't do.
    """
    start, before = time.perf_counter(), len(program.graph.nodes)
    graph = program.graph
    layers = sorted((n for op in KINDS for n in program.nodes(op)), key=_layer)
    numbers = [_layer(node) for node in layers]
    if numbers != list(range(len(layers))):
        raise BuildError(f"attention layers are numbered {numbers}, expected 0..{len(layers) - 1}")
    inputs = [
        GraphInput(name, torch.int64, dims)
        for name, dims in (RAGGED if form == "ragged" else PADDED).items()
    ]
    for index, node in enumerate(layers):
        dtype = node.args[0].meta["val"].dtype  # type: ignore[union-attr]
        for kind, shape in KINDS[node.target].pools(node).items():
            dims: tuple[int | str, ...] = ("blocks", "block_size", *shape)
            inputs.append(GraphInput(f"{kind}_pool_{index}", dtype, dims))

    old = {node.name: node for node in graph.find_nodes(op="placeholder")}
    placeholders: dict[str, fx.Node] = {}
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        for entry in inputs:
            placeholders[entry.name] = graph.placeholder(entry.name)
        tokens, positions = placeholders["token_ids"], placeholders["positions"]
        if form == "ragged":
            flat = tokens
            tokens = graph.call_function(aten.unsqueeze.default, (tokens, 0))
            positions = graph.call_function(aten.unsqueeze.default, (positions, 0))
        else:
            flat = graph.call_function(aten.view.default, (tokens, [-1]))
    for embedding in program.nodes(aten.embedding.default):
        embedding.replace_input_with(old["input_ids"], flat)
    for name, new in (("input_ids", tokens), ("position_ids", positions)):
        node = old.pop(name)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    for name, node in old.items():
        if node.users:
            raise BuildError(f"the exported graph reads an input that engines do not have: {name}")
        graph.erase_node(node)

    outputs: list[fx.Node] = []
    for index, node in enumerate(layers):
        paging = KINDS[node.target]
        names = [f"{name}_pool_{index}" for name in paging.pools(node)]
        insert = paging.ragged if form == "ragged" else paging.padded
        outputs += insert(graph, node, [placeholders[name] for name in names], placeholders)
    rows = select_rows(program, placeholders["logits_rows"])
    output = graph.output_node()
    output.args = ((*output.args[0], *outputs),)  # type: ignore[misc]
    program.form = form
    program.inputs = [entry.name for entry in inputs]
    program.outputs = ["logits"]
    if form == "padded":
        pools = [entry.name for entry in inputs if "_pool_" in entry.name]
        program.outputs += ["new_" + name.replace("pool_", "") for name in pools]
    graph.set_codegen(fx.graph.CodeGen())  # export's codegen expects the old inputs
    program.drop_unused()
    graph.lint()
    trace_values(program, inputs)
    account = PassResult(
        "kv_cache", len(layers), (), before, len(graph.nodes), time.perf_counter() - start
    )
    return [account, rows], inputs


def _layer(node: fx.Node) -> int:
    number = node.args[-1]
    assert isinstance(number, int)
    return number


def _kv_pools(node: fx.Node) -> dict[str, tuple[int, ...]]:
    return {kind: _shape(x, 2) for kind, x in (("k", node.args[1]), ("v", node.args[2]))}


def _kv_ragged(graph: fx.Graph, node: fx.Node, pools: list[fx.Node], inputs: Inputs) -> list[Any]:
    with graph.inserting_before(node):
        qkv = [graph.call_function(aten.squeeze.dim, (x, 0)) for x in node.args[:3]]
        index = [inputs[n] for n in ("slot_mapping", "block_tables", "context_lens", "query_start")]
        paged = graph.call_function(paged_attention, (*qkv, *pools, *index, node.args[3]))
        result = graph.call_function(aten.unsqueeze.default, (paged, 0))
    _replace(node, paged, result)
    return []


def _kv_padded(graph: fx.Graph, node: fx.Node, pools: list[fx.Node], inputs: Inputs) -> list[Any]:
    q, k, v, scale, _ = node.args
    with graph.inserting_before(node):
        index = [inputs[name] for name in ("block_tables", "past_lens")]
        gathered = graph.call_function(gathered_attention, (q, k, v, *pools, *index, scale))
    _replace(node, gathered, gathered)
    return [k, v]


def _latent_pools(node: fx.Node) -> dict[str, tuple[int, ...]]:
    return {"latent": (_shape(node.args[2], 1)[0] + _shape(node.args[3], 1)[0],)}


def _latent_ragged(
    graph: fx.Graph, node: fx.Node, pools: list[fx.Node], inputs: Inputs
) -> list[Any]:
    q_nope, q_rope, latent, k_rope, kv_b, scale, _ = node.args
    with graph.inserting_before(node):
        q = [graph.call_function(aten.squeeze.dim, (x, 0)) for x in (q_nope, q_rope)]
        # The latent comes from the residual stream, which is [tokens, hidden] now.
        kv = [
            graph.call_function(aten.reshape.default, (x, [-1, *_shape(x, 1)]))
            for x in (latent, k_rope)
        ]
        index = [inputs[n] for n in ("slot_mapping", "block_tables", "context_lens", "query_start")]
        paged = graph.call_function(paged_mla_attention, (*q, *kv, *pools, *index, kv_b, scale))
        result = graph.call_function(aten.unsqueeze.default, (paged, 0))
    _replace(node, paged, result)
    return []


def _latent_padded(
    graph: fx.Graph, node: fx.Node, pools: list[fx.Node], inputs: Inputs
) -> list[Any]:
    q_nope, q_rope, latent, k_rope, kv_b, scale, _ = node.args
    with graph.inserting_before(node):
        sizes = [graph.call_function(aten.sym_size.int, (inputs["token_ids"], i)) for i in (0, 1)]
        kv = [
            graph.call_function(aten.reshape.default, (x, [*sizes, *_shape(x, 1)]))
            for x in (latent, k_rope)
        ]
        index = [inputs[name] for name in ("block_tables", "past_lens")]
        args = (q_nope, q_rope, *kv, *pools, *index, kv_b, scale)
        gathered = graph.call_function(gathered_mla_attention, args)
        new = graph.call_function(aten.cat.default, (kv, -1))
    _replace(node, gathered, gathered)
    return [new]


def _shape(node: Any, dims: int) -> tuple[int, ...]:
    """The last `dims` sizes of a node's value, which are static."""
    return tuple(map(int, node.meta["val"].shape[-dims:]))


@dataclass(frozen=True, slots=True)
class Kind:
    """How one kind of attention becomes paged. pools: each pool's shape behind [blocks,
    block_size]; ragged and padded insert the operator and return the values that leave the
    graph."""

    pools: Callable[[fx.Node], dict[str, tuple[int, ...]]]
    ragged: Callable[[fx.Graph, fx.Node, list[fx.Node], Inputs], list[Any]]
    padded: Callable[[fx.Graph, fx.Node, list[fx.Node], Inputs], list[Any]]


KINDS: dict[Any, Kind] = {
    attention: Kind(_kv_pools, _kv_ragged, _kv_padded),
    mla_attention: Kind(_latent_pools, _latent_ragged, _latent_padded),
}


def _replace(node: fx.Node, made: fx.Node, result: fx.Node) -> None:
    for key in ("stack_trace", "nn_module_stack"):
        for new in {made, result}:
            new.meta[key] = node.meta.get(key)
    heads, v_dim = map(int, node.meta["val"].shape[-2:])
    for user in list(node.users):
        merges = user.target in VIEWS and user.meta["val"].dim() == 3
        if not merges or user.meta["val"].shape[-1] != heads * v_dim:
            raise BuildError(
                f"{source_line(user)}: the output of {node.name} goes into {user.format_node()}, "
                f"expected a view as [batch, seq, {heads * v_dim}]"
            )
        user.args = (user.args[0], [-1, heads * v_dim])
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)


def graph_outputs(program: Program) -> list[GraphInput]:
    """The outputs of a program after this pass, in order, with their dimensions' names."""
    outputs = []
    for name, node in zip(program.outputs, program.graph.output_node().args[0], strict=True):  # type: ignore[arg-type]
        value = node.meta["val"]
        lead = ("rows",) if name == "logits" else ("batch", "seq")
        dims = (*lead, *map(int, value.shape[len(lead) :]))
        outputs.append(GraphInput(name, value.dtype, dims))
    return outputs


def example_inputs(inputs: list[GraphInput], device: str = "meta") -> list[Tensor]:
    """Tensors of the trace sizes, in order."""
    return [
        torch.zeros([d if isinstance(d, int) else TRACE_SIZES[d] for d in entry.dims],
                    dtype=entry.dtype, device=device)
        for entry in inputs
    ]  # fmt: skip


def trace_values(program: Program, inputs: list[GraphInput]) -> None:
    """Recomputes every node's fake value for the given inputs, dynamic dimensions as symbols."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fakes = iter(
        mode.from_tensor(
            tensor,
            symbolic_context=StatelessSymbolicContext(
                dynamic_sizes=[
                    DimDynamic.STATIC if isinstance(d, int) else DimDynamic.DUCK for d in entry.dims
                ]
            ),
        )
        for tensor, entry in zip(example_inputs(inputs), inputs, strict=True)
    )
    env: dict[fx.Node, Any] = {}
    weights: dict[str, Tensor] = {}
    with mode, enable_python_dispatcher():  # C++ alone refuses some symbolic sizes (torch 2.11)
        for node in program.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(fakes)
            elif node.op == "get_attr":
                name = str(node.target)
                if name not in weights:
                    weights[name] = mode.from_tensor(program.tensor(name), static_shapes=True)
                env[node] = weights[name]
            elif node.op == "call_function":
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
                try:
                    env[node] = node.target(*args, **kwargs)
                except Exception as error:
                    raise BuildError(
                        f"{node.format_node()}: {error} (from {source_line(node)})"
                    ) from error
            else:
                continue
            node.meta["val"] = env[node]
