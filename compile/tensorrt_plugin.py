"""Paged attention as plugins of data-centre TensorRT (10.9 and later), compiled ahead of time.

TensorRT's own network cannot write into a paged cache. Two plugins can: `seekforge::kv_write` puts
a step's keys and values into the pools, its outputs being the pools themselves, and
`seekforge::paged_attention` attends over them, any mix of prefill and decode (layouts:
kernels/paged_attention.py, ragged form). Each gives TensorRT the PTX of a Triton kernel, a launch
grid in terms of the inputs' dimensions, and the integers it is called with; the engine then holds
the kernel and needs neither Python nor Triton.

**Not executed.** TensorRT's library is not part of this project's test machines: what is tested is
the PTX, its arguments, shapes and grids, and the calls against `tensorrt.plugin`'s Python layer.
Nothing lowers a graph to these plugins yet. Source: NVIDIA, "Quickly deployable plugins".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import GenericAlias
from typing import Any

from seekforge.compile.tensorrt_plugin_kernel import plugin_kv_write, plugin_paged_attention
from seekforge.compile.tensorrt_ptx import PTX_VERSION, PtxKernel, compile_kernel
from seekforge.kernels.errors import BuildError
from seekforge.kernels.paged_decode import LOG2_E
from seekforge.kernels.triton_support import next_power_of_2
from seekforge.kernels.tuning import decode_config

WRITE, ATTENTION = "seekforge::kv_write", "seekforge::paged_attention"
WRITE_INPUTS = ("k", "v", "k_pool", "v_pool", "slot_mapping")
ATTENTION_INPUTS = ("q", "k_pool", "v_pool", "block_tables", "context_lens", "query_start")
TYPES = {"FLOAT": "fp32", "HALF": "fp16", "BF16": "bf16"}  # TensorRT's -> Triton's
INTEGERS = "*i64"
SHARED_LIMIT = 48 << 10  # bytes that a launch may ask for without raising the function's limit


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is fixed when a kernel is compiled. dtype: Triton's, of q, k, v and the pools."""

    dtype: str
    kv_heads: int
    qk_dim: int
    v_dim: int
    block_size: int
    heads: int = 0


def write_kernel(sizes: Sizes, target: int, ptx_version: int = PTX_VERSION) -> PtxKernel:
    """Of `seekforge::kv_write`; one program a token."""
    pointer = f"*{sizes.dtype}"
    types = dict.fromkeys((*WRITE_INPUTS, "k_written", "v_written"), pointer)
    types["slot_mapping"] = INTEGERS
    constants = {
        "KV_HEADS": sizes.kv_heads, "HEADS": next_power_of_2(sizes.kv_heads),
        "QK_DIM": sizes.qk_dim, "V_DIM": sizes.v_dim, "QK": next_power_of_2(sizes.qk_dim),
        "V": next_power_of_2(sizes.v_dim), "BLOCK_SIZE": sizes.block_size,
    }  # fmt: skip
    warps = 4 if sizes.kv_heads * sizes.qk_dim > 512 else 1
    return compile_kernel(
        plugin_kv_write, types, constants, target, warps=warps, stages=1, ptx_version=ptx_version
    )


def attention_kernel(
    sizes: Sizes, scale: float, target: int, ptx_version: int = PTX_VERSION
) -> PtxKernel:
    """Of `seekforge::paged_attention`; one program a KV head and token. The scale is compiled in:
    a plugin's kernel takes integers only."""
    types = dict.fromkeys(ATTENTION_INPUTS, INTEGERS) | {"sequences": "i32", "max_blocks": "i32"}
    types |= dict.fromkeys(("q", "k_pool", "v_pool", "y"), f"*{sizes.dtype}")
    widest = max(sizes.qk_dim, sizes.v_dim)
    config = decode_config(
        {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[sizes.dtype],
        # So many tiles that no context is split: the parts would need memory of their own.
        tiles=1 << 20, context=1 << 20, block_size=sizes.block_size, dim=widest, processors=1,
    )  # fmt: skip
    constants = {
        "SCALE": scale * LOG2_E, "HEADS": sizes.heads, "KV_HEADS": sizes.kv_heads,
        "ROWS": max(next_power_of_2(sizes.heads // sizes.kv_heads), 16),
        "QK_DIM": sizes.qk_dim, "QK": next_power_of_2(max(sizes.qk_dim, 16)),
        "V_DIM": sizes.v_dim, "V": next_power_of_2(max(sizes.v_dim, 16)),
        "BLOCK_SIZE": sizes.block_size, "BLOCK_N": config.block_n,
        "PRECISION": "ieee" if sizes.dtype == "fp32" else "tf32",
    }  # fmt: skip
    for stages in range(config.stages, 0, -1):
        kernel = compile_kernel(
            plugin_paged_attention, types, constants, target,
            warps=config.warps, stages=stages, ptx_version=ptx_version,
        )  # fmt: skip
        if kernel.shared <= SHARED_LIMIT:
            return kernel
    raise BuildError(
        f"{ATTENTION} with {sizes} takes {kernel.shared} bytes of shared memory for sm_{target}; a "
        f"plugin's kernel may take {SHARED_LIMIT}: use a head size up to 128"
    )


def register_plugins(trt: Any, trtp: Any, target: int, ptx_version: int = PTX_VERSION) -> None:
    """Registers both with `trtp`, the module `tensorrt.plugin` of `trt`; once a process. target: of
    the GPU the engine is built on, 90 for sm_90.

    A network then takes `trtp.op.seekforge.kv_write(k, v, k_pool, v_pool, slot_mapping)` and
    `trtp.op.seekforge.paged_attention(q, k_pool, v_pool, block_tables, context_lens, query_start,
    scale=…)`, each called with `trt.QuickPluginCreationRequest.STRICT_AOT`, and the builder's
    preview feature ALIASED_PLUGIN_IO_10_03. Tensors are in linear format.
    """
    desc, result = trtp.TensorDesc, tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]

    def kv_write(k, v, k_pool, v_pool, slot_mapping):  # type: ignore[no-untyped-def]
        return k_pool.aliased(), v_pool.aliased()

    def kv_write_aot(k, v, k_pool, v_pool, slot_mapping, outputs, tactic):  # type: ignore[no-untyped-def]
        sizes = _sizes(k_pool, v_pool)
        kernel = write_kernel(sizes, target, ptx_version)
        launch = _launch(trtp, kernel, k.shape_expr[0], 1)
        return kernel.name, kernel.ptx, launch, trtp.SymIntExprs.from_tuple(())

    def paged_attention(  # type: ignore[no-untyped-def]
        q, k_pool, v_pool, block_tables, context_lens, query_start, scale
    ):
        shape = (q.shape_expr[0], q.shape_expr[1], v_pool.shape_expr[3])
        return trtp.from_shape_expr(shape, q.dtype)

    def paged_attention_aot(  # type: ignore[no-untyped-def]
        q, k_pool, v_pool, block_tables, context_lens, query_start, scale, outputs, tactic
    ):
        sizes = _sizes(k_pool, v_pool, int(q.shape[1]))
        kernel = attention_kernel(sizes, scale, target, ptx_version)
        launch = _launch(trtp, kernel, sizes.kv_heads, q.shape_expr[0])
        integers = (block_tables.shape_expr[0], block_tables.shape_expr[1])
        extra = trtp.SymIntExprs.from_tuple([trtp.SymInt32(value) for value in integers])
        return kernel.name, kernel.ptx, launch, extra

    tensors, pair = dict.fromkeys(WRITE_INPUTS, desc), GenericAlias(tuple, (desc, desc))
    _annotated(kv_write, tensors, pair)
    _annotated(kv_write_aot, tensors | {"outputs": pair, "tactic": int}, result)
    tensors = dict.fromkeys(ATTENTION_INPUTS, desc) | {"scale": float}
    _annotated(paged_attention, tensors, desc)
    outputs = GenericAlias(tuple, (desc,))
    _annotated(paged_attention_aot, tensors | {"outputs": outputs, "tactic": int}, result)
    for name, described, aot in (
        (WRITE, kv_write, kv_write_aot), (ATTENTION, paged_attention, paged_attention_aot)
    ):  # fmt: skip
        trtp.register(name)(described)
        trtp.aot_impl(name)(aot)


def _annotated(function: Callable[..., Any], inputs: dict[str, Any], result: Any) -> None:
    """TensorRT reads a plugin's signature from the annotations, as objects and not as text; they
    are only known when its module is."""
    function.__annotations__ = {**inputs, "return": result}


def _sizes(k_pool: Any, v_pool: Any, heads: int = 0) -> Sizes:
    """From descriptors with shapes, [blocks, block_size, kv_heads, dim]; only blocks may vary."""
    _, block_size, kv_heads, qk_dim = map(int, k_pool.shape)
    v_dim = int(v_pool.shape[3])
    dtype = TYPES.get(k_pool.dtype.name)
    if dtype is None or min(block_size, kv_heads, qk_dim, v_dim) < 1:
        raise BuildError(
            "paged attention takes pools [blocks, block_size, kv_heads, dim] of float16, bfloat16 "
            f"or float32 with fixed sizes behind blocks; these are {k_pool.dtype.name} "
            f"{tuple(k_pool.shape)} and {tuple(v_pool.shape)}: fix them in the network's inputs"
        )
    return Sizes(dtype, kv_heads, qk_dim, v_dim, block_size, heads)


def _launch(trtp: Any, kernel: PtxKernel, x: Any, z: Any) -> Any:
    """The grid [x, 1, z]."""
    launch = trtp.KernelLaunchParams()
    launch.grid_x, launch.grid_y, launch.grid_z = x, 1, z
    launch.block_x, launch.shared_mem = kernel.threads, kernel.shared
    return launch
