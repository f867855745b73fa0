"""Checkpoint module to program: torch.export of transformers' own module on the meta device.

Nothing of the weights is needed. Batch and sequence stay symbolic: the trace uses sizes >= 2 (a
size of 1 would be baked into the graph) and the result is checked for it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, fx, nn

from seekforge.compile.failures import export_failure
from seekforge.kernels.errors import BuildError
from seekforge.models.checkpoint import Checkpoint, tensors_for_parameter
from seekforge.models.exportable import make_exportable
from seekforge.models.module import build_module
from seekforge.passes.program import Program, Weight

TRACE_BATCH, TRACE_SEQ = 2, 7
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export_checkpoint(checkpoint: Checkpoint, dtype: str, max_len: int) -> Program:
    """`export_module` of an opened checkpoint in `dtype`; no weights are read."""
    module = build_module(checkpoint.config, DTYPES[dtype])
    sources = {name: tensors_for_parameter(checkpoint, name) for name in module.state_dict()}
    return export_module(module, sources, max_len)


def export_module(
    module: nn.Module, sources: Mapping[str, tuple[str, ...]], max_len: int
) -> Program:
    """Exports a causal language model of transformers.

    module: on the meta device, but for non-persistent buffers with real values. sources: for each
    parameter and stored buffer the checkpoint tensors it is made of. Returns a program with inputs
    input_ids, position_ids [batch, seq] int64 and output logits [batch, seq, vocab]. Raises
    BuildError if export fails or a dynamic dimension became a constant.
    """
    constants: dict[str, Tensor] = {
        name: buffer.clone() for name, buffer in module.named_buffers() if not buffer.is_meta
    }
    module = make_exportable(module.to("meta"))
    ids = torch.zeros(TRACE_BATCH, TRACE_SEQ, dtype=torch.long, device="meta")
    batch = torch.export.Dim("batch", min=1, max=1 << 16)
    seq = torch.export.Dim("seq", min=1, max=max(TRACE_SEQ, max_len))
    dims = {0: batch, 1: seq}
    try:
        with torch.no_grad():
            exported = torch.export.export(
                module,
                (),
                {"input_ids": ids, "position_ids": ids.clone(), "use_cache": False},
                dynamic_shapes={"input_ids": dims, "position_ids": dims, "use_cache": None},
                strict=False,
            )
    except Exception as error:
        raise export_failure(type(module).__name__, error) from error
    lifted = exported.module(check_guards=False)
    # A plain GraphModule: export's own checks its inputs in a hook, and passes will change them.
    graph_module = fx.GraphModule(lifted, lifted.graph)
    _check_symbolic(graph_module)
    weights = {}
    for node in graph_module.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if name in constants:
            weights[name] = Weight(value=constants[name])
        elif name in sources:
            weights[name] = Weight(sources[name])
        else:
            raise BuildError(
                f"the exported graph reads {name}, which no checkpoint tensor provides"
            )
    return Program(graph_module, weights, constants)


def _check_symbolic(graph_module: fx.GraphModule) -> None:
    for node in graph_module.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            fixed = [i for i, size in enumerate(value.shape) if isinstance(size, int)]
            if fixed:
                raise BuildError(
                    f"export baked in the size of dimension {fixed[0]} of {node.name}: "
                    f"{tuple(value.shape)}; the model's code depends on its value"
                )
