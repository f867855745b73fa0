"""Lowers a ragged program to AOTInductor packages: code only, the weights stay outside in one file.

model.pt2 takes any number of tokens. decode.pt2 (CPU) is the same graph for exactly one token,
where each linear layer becomes a loop that Inductor writes itself; see kernels/gemv.py. Element-
wise operators are inlined as torch code, so that Inductor fuses them with their neighbours;
attention stays a call of our operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from seekforge.kernels.add_rms_norm import add_rms_norm, add_rms_norm_reference
from seekforge.kernels.errors import BuildError
from seekforge.kernels.gemv import gemv
from seekforge.kernels.rms_norm import rms_norm, rms_norm_reference
from seekforge.kernels.rope import rope, rope_reference
from seekforge.kernels.swiglu import swiglu, swiglu_reference
from seekforge.passes.kv_cache import TRACE_SIZES, GraphInput
from seekforge.passes.linears import LINEAR
from seekforge.passes.program import Program

MODEL_NAME = "model.pt2"
DECODE_NAME = "decode.pt2"
INLINED: dict[Any, Callable[..., Any]] = {
    rms_norm: rms_norm_reference,
    add_rms_norm: add_rms_norm_reference,
    rope: rope_reference,
    swiglu: swiglu_reference,
}
ONE_TOKEN = {"tokens": 1, "sequences": 1, "sequences_plus_1": 2, "rows": 1}
CONFIG = {"aot_inductor.package_constants_in_so": False, "always_keep_tensor_constants": True}


def lower_inductor(
    program: Program, inputs: Sequence[GraphInput], device: str, path: Path, fixed: dict[str, int]
) -> None:
    """Compiles `program` into the package `path`.

    device: "cpu" or "cuda". fixed: dynamic dimensions given a size (`ONE_TOKEN`), {} for none.
    Raises BuildError with Inductor's own message.
    """
    assert program.form == "ragged"
    module = _trainless_copy(program, device, one_token=fixed.get("tokens") == 1)
    sizes = TRACE_SIZES | fixed
    example, dynamic = [], []
    for entry in inputs:
        shape = [d if isinstance(d, int) else sizes[d] for d in entry.dims]
        example.append(torch.zeros(shape, dtype=entry.dtype, device=device))
        free = [i for i, d in enumerate(entry.dims) if isinstance(d, str) and d not in fixed]
        dynamic.append(dict.fromkeys(free, torch.export.Dim.DYNAMIC) or None)
    _register_gemv()
    try:
        with torch.no_grad():
            exported = torch.export.export(
                module, tuple(example), dynamic_shapes=tuple(dynamic), strict=False
            )
            torch._inductor.aoti_compile_and_package(
                exported, package_path=str(path), inductor_configs=CONFIG
            )
    except Exception as error:
        raise BuildError(
            f"AOTInductor could not compile the graph for {device}: {error}"
        ) from error


def _trainless_copy(program: Program, device: str, one_token: bool) -> fx.GraphModule:
    """A copy of the graph on `device` with element-wise operators inlined.

    Its weights are never written: fresh pages of `torch.empty` cost no memory until touched.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    for node in graph.nodes:
        if node.target in INLINED:
            node.target = INLINED[node.target]
        elif one_token and node.target is LINEAR:
            _use_gemv(node)
    root = torch.nn.Module()
    for name in {str(n.target) for n in graph.find_nodes(op="get_attr")}:
        owner, meta = root, program.tensor(name)
        *parts, leaf = name.split(".")
        for part in parts:
            if not hasattr(owner, part):
                owner.add_module(part, torch.nn.Module())
            owner = getattr(owner, part)
        owner.register_buffer(leaf, torch.empty(meta.shape, dtype=meta.dtype, device=device))
    return fx.GraphModule(root, graph)


def _use_gemv(node: fx.Node) -> None:
    x, weight, *bias = node.args
    node.target, node.args = gemv, (x, weight)
    if bias and bias[0] is not None:
        with node.graph.inserting_after(node):
            total = node.graph.call_function(torch.ops.aten.add.Tensor, (node, bias[0]))
        node.replace_all_uses_with(total, lambda user: user is not total)


def _register_gemv() -> None:
    """Tells Inductor how to lower `seekforge::gemv`: multiply and sum, input and output kept in
    memory."""
    from torch._inductor.lowering import lowerings, register_lowering, to_dtype

    if gemv in lowerings:
        return
    aten = torch.ops.aten

    def lower(x: Any, weight: Any) -> Any:
        # Without realize, Inductor would recompute the norm or the activation for every output row.
        x.realize()
        dtype, columns = x.get_dtype(), x.get_size()[-1]
        row = to_dtype(lowerings[aten.view.default](x, [1, columns]), torch.float32)
        products = lowerings[aten.mul.Tensor](row, to_dtype(weight, torch.float32))
        y = to_dtype(lowerings[aten.sum.dim_IntList](products, [-1]), dtype)
        y.realize()
        return lowerings[aten.view.default](y, [*x.get_size()[:-1], weight.get_size()[0]])

    register_lowering(gemv, type_promotion_kind=None)(lower)
