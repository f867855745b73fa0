"""Lowers a ragged program to AOTInductor packages: code only, the weights stay outside in one file.

model.pt2 takes any number of tokens. decode.pt2 (CPU) is the same graph for exactly one token:
each linear layer and the attention become loops that Inductor writes itself (kernels/gemv.py,
`one_token_attention`). Element-wise operators are inlined as torch code, so that Inductor fuses
them with their neighbours; in model.pt2 attention stays a call of our operator.

Inductor spends most of its time in single-threaded Python, so each package is compiled by a process
of its own: `python -m seekforge.compile.inductor JOB PARENT`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

import seekforge.kernels.rope_paged_attention
import seekforge.kernels.rope_paged_mla_attention
import seekforge.kernels.shared_experts  # noqa: F401  (the worker loads graphs that call them)
from seekforge.compile.failures_inductor import inductor_failure
from seekforge.compile.inductor_code import choose_code
from seekforge.kernels.gemv import gemv, in_memory, int4_gemv
from seekforge.kernels.int4 import SYMMETRIC_ZERO
from seekforge.passes.kv_cache import TRACE_SIZES, GraphInput
from seekforge.passes.program import Program

PR_SET_PDEATHSIG = 1  # linux/prctl.h
MODEL_NAME = "model.pt2"
DECODE_NAME = "decode.pt2"


ONE_TOKEN = {"tokens": 1, "sequences": 1, "sequences_plus_1": 2, "rows": 1}
CONFIG = {
    "aot_inductor.package_constants_in_so": False,
    "always_keep_tensor_constants": True,
    # Multiply and add in one instruction: INT4 loops are bound by arithmetic, not by reading.
    "cpp.enable_floating_point_contract_flag": "fast",
}
# Of a GPU's package only the code around the kernels runs on the host, once a captured step: it is
# not worth optimising, nor finding out by trial which vector instructions the processor has.
CUDA_CONFIG = CONFIG | {
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "cpp.vec_isa_ok": True,
}
# Arguments after which Inductor ends a C++ function. With its own limit of 500, the one-token graph
# becomes two functions for 30 layers, which take g++ 20 s; with 16, equal layers share functions,
# which take 1.5 s.
CPP_FUNCTION_ARGUMENTS = 16


@dataclass(frozen=True, slots=True)
class Job:
    """One package to compile. fixed: dynamic dimensions given a size (`ONE_TOKEN`, or none)."""

    module: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    device: str
    path: Path
    fixed: dict[str, int]


def lower_inductor(
    program: Program,
    inputs: Sequence[GraphInput],
    device: str,
    folder: Path,
    decode: bool = True,
) -> None:
    """Compiles `program` into packages in `folder`, side by side.

    device: "cpu" or "cuda". decode: whether the CPU gets a package for one token too. Raises
    BuildError with Inductor's own message.
    """
    assert program.form == "ragged"
    targets = {MODEL_NAME: dict[str, int]()}
    if device == "cpu" and decode:
        targets[DECODE_NAME] = ONE_TOKEN
    running = []
    try:
        for name, fixed in targets.items():
            job = folder / f"{name}.job"
            module = module_of(program)
            torch.save(Job(module, tuple(inputs), device, folder / name, fixed), job)
            log = (folder / f"{name}.log").open("w+")
            command = [sys.executable, "-m", "seekforge.compile.inductor", str(job)]
            command.append(str(os.getpid()))
            running.append((name, subprocess.Popen(command, stdout=log, stderr=log), log))
        for name, process, log in running:
            if code := process.wait():
                log.seek(0)
                kept = folder.parent / "inductor.log"
                raise inductor_failure(program, name, device, code, log.read(), kept)
    finally:
        for name, process, log in running:
            process.kill()
            process.wait()
            log.close()
            for suffix in (".job", ".log"):
                (folder / f"{name}{suffix}").unlink(missing_ok=True)


def module_of(program: Program) -> fx.GraphModule:
    """The graph and its meta parameters, without the nodes' metadata, which can't be stored."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    for node in graph.nodes:
        node.meta = {}
    root = nn.Module()
    for name in {str(node.target) for node in graph.find_nodes(op="get_attr")}:
        _set_parameter(root, name, program.tensor(name))
    return fx.GraphModule(root, graph)


def _set_parameter(root: nn.Module, name: str, tensor: Tensor) -> None:
    """A parameter: AOTInductor copies buffers, since a graph may write to them."""
    *parts, leaf = name.split(".")
    for part in parts:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    root.register_parameter(leaf, nn.Parameter(tensor.detach(), requires_grad=False))


def compile_package(job: Job) -> None:
    """Exports the job's graph with the operators inlined and writes its package."""
    choose_code(job.module, job.device, one_token=job.fixed.get("tokens") == 1)
    # Never written: fresh pages cost no memory until touched.
    module = job.module.to_empty(device=job.device)
    sizes = TRACE_SIZES | job.fixed
    example, dynamic = [], []
    for entry in job.inputs:
        shape = [d if isinstance(d, int) else sizes[d] for d in entry.dims]
        example.append(torch.zeros(shape, dtype=entry.dtype, device=job.device))
        free = [i for i, d in enumerate(entry.dims) if isinstance(d, str) and d not in job.fixed]
        dynamic.append(dict.fromkeys(free, torch.export.Dim.DYNAMIC) or None)
    _register_lowerings()
    with torch.no_grad(), _short_functions():
        exported = torch.export.export(
            module, tuple(example), dynamic_shapes=tuple(dynamic), strict=False
        )
        torch._inductor.aoti_compile_and_package(
            exported,
            package_path=str(job.path),
            inductor_configs=CUDA_CONFIG if job.device == "cuda" else CONFIG,
        )


@contextmanager
def _short_functions() -> Iterator[None]:
    from torch._inductor.codegen.cpp import CppScheduling

    before = CppScheduling.MAX_FUSED_KERNEL_ARGS_NUM
    CppScheduling.MAX_FUSED_KERNEL_ARGS_NUM = CPP_FUNCTION_ARGUMENTS
    try:
        yield
    finally:
        CppScheduling.MAX_FUSED_KERNEL_ARGS_NUM = before


def _register_lowerings() -> None:
    """Tells Inductor what `seekforge::in_memory` means, and to lower `seekforge::gemv` and
    `seekforge::int4_gemv` to one loop each, in and out kept in memory."""
    from torch._inductor.lowering import lowerings, register_lowering

    if gemv in lowerings:
        return
    register_lowering(gemv, type_promotion_kind=None)(_lower_gemv)
    register_lowering(int4_gemv, type_promotion_kind=None)(_lower_int4_gemv)
    register_lowering(in_memory, type_promotion_kind=None)(_lower_in_memory)


def _lower_in_memory(x: Any) -> Any:
    from torch._inductor.lowering import lowerings

    # No copy: what is computed behind the clone is written to this buffer.
    y = lowerings[torch.ops.aten.clone.default](x, memory_format=torch.contiguous_format)
    y.realize()
    return y


def _lower_gemv(x: Any, weight: Any) -> Any:
    from torch._inductor.lowering import lowerings, to_dtype

    aten = torch.ops.aten
    # Without realize, Inductor would recompute the norm or the activation for every output row.
    x.realize()
    dtype, columns = x.get_dtype(), x.get_size()[-1]
    row = to_dtype(lowerings[aten.view.default](x, [1, columns]), torch.float32)
    products = lowerings[aten.mul.Tensor](row, to_dtype(weight, torch.float32))
    y = to_dtype(lowerings[aten.sum.dim_IntList](products, [-1]), dtype)
    y.realize()
    return lowerings[aten.view.default](y, [*x.get_size()[:-1], weight.get_size()[0]])


def _lower_int4_gemv(x: Any, qweight: Any, scales: Any, zeros: Any, chosen: Any) -> Any:
    """The sum of `int4_gemv_reference` in few instructions: byte = low + 16 * high, so that

        (low - z) * even + (high - z) * odd
            = byte * odd / 16 + low * (even - odd / 16) - z * (even + odd)

    and what depends on x alone is stored first. Inductor's vectors lie along the bytes of a group.
    """
    from torch._inductor.ir import Pointwise, Reduction
    from torch._inductor.virtualized import ops

    rows = x.get_size()[0]
    *experts, out_features, packed = qweight.get_size()
    groups = scales.get_size()[-1]
    x.realize()
    load_x, load_q, load_scale = (t.make_loader() for t in (x, qweight, scales))
    load_zero, load_chosen = (t and t.make_loader() for t in (zeros, chosen))
    device, fp32 = x.get_device(), torch.float32

    def constant(value: float) -> Any:
        return ops.constant(value, fp32)

    def stored(make: Callable[[Any, Any], Any]) -> Any:
        def at(index: Sequence[Any]) -> Any:
            row, byte = index
            pair = (ops.to_dtype(load_x([row, 2 * byte + odd]), fp32) for odd in (0, 1))
            return make(*pair)

        made = Pointwise.create(device=device, dtype=fp32, inner_fn=at, ranges=[rows, packed])
        made.realize()
        return made.make_loader()

    for_byte = stored(lambda even, odd: odd * constant(1 / 16))
    for_low = stored(lambda even, odd: even - odd * constant(1 / 16))
    for_zero = stored(
        lambda even, odd: (even + odd) * constant(SYMMETRIC_ZERO if zeros is None else 1)
    )

    def product(index: Sequence[Any], inner: Sequence[Any]) -> Any:
        (row, out), (group, at) = index, inner
        position = [row, group * (packed // groups) + at]
        matrix = []
        if chosen is not None:
            matrix = [ops.indirect_indexing(load_chosen([row]), experts[0], check=False)]
        byte = ops.to_dtype(load_q([*matrix, out, position[1]]), torch.int32)
        low = ops.to_dtype(ops.bitwise_and(byte, ops.constant(15, torch.int32)), fp32)
        zero = for_zero(position)
        if zeros is not None:
            zero = zero * ops.to_dtype(load_zero([*matrix, out, group]), fp32)
        value = ops.to_dtype(byte, fp32) * for_byte(position) - zero + low * for_low(position)
        return value * ops.to_dtype(load_scale([*matrix, out, group]), fp32)

    y = Reduction.create(
        device=device, dst_dtype=fp32, src_dtype=fp32, inner_fn=product,
        ranges=[rows, out_features], reduction_ranges=[groups, packed // groups],
        reduction_type="sum",
    )  # fmt: skip
    y.realize()
    return y


def _end_with(parent: int) -> None:
    """A build that is killed takes its compilations along: the next one needs the processor."""
    with suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was killed before that
        sys.exit(1)


if __name__ == "__main__":
    _end_with(int(sys.argv[2]))
    compile_package(torch.load(sys.argv[1], weights_only=False))
