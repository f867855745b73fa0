"""The plugins of compile/tensorrt_plugin.py, registered and asked for kernels without TensorRT.

`calls(layer)` does what a build does with them: registers, asks for the outputs' shapes, and for
each plugin's kernel, launch and integers, all as expressions of the inputs' dimensions. The layer
is `tensorrt.plugin`'s Python: a small one of our own, which follows its documented interface and
refuses what it refuses, or NVIDIA's own (the package tensorrt-cu13-bindings, which needs no library
for that) over a stand-in for what the library would give it. To be run in a process of its own:
where the tests run, Triton's interpreter replaces the language.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stand_in_tensorrt import DataType, Dim, ExprBuilder, tensorrt

from seekforge.compile.tensorrt_plugin import ATTENTION, WRITE, register_plugins

Dims = tuple[int | str, ...]
# Default model's sizes; names are dynamic dimensions.
BLOCK, HEADS, KV_HEADS, DIM, SCALE = 16, 9, 3, 64, 0.125
POOL: Dims = ("blocks", BLOCK, KV_HEADS, DIM)
INPUTS: dict[str, dict[str, tuple[str, Dims]]] = {
    WRITE: {
        "k": ("HALF", ("tokens", KV_HEADS, DIM)), "v": ("HALF", ("tokens", KV_HEADS, DIM)),
        "k_pool": ("HALF", POOL), "v_pool": ("HALF", POOL), "slot_mapping": ("INT64", ("tokens",)),
    },
    ATTENTION: {
        "q": ("HALF", ("tokens", HEADS, DIM)), "k_pool": ("HALF", POOL), "v_pool": ("HALF", POOL),
        "block_tables": ("INT64", ("sequences", "max_blocks")),
        "context_lens": ("INT64", ("sequences",)), "query_start": ("INT64", ("entries",)),
    },
}  # fmt: skip
OUTPUTS: dict[str, list[Dims]] = {WRITE: [POOL, POOL], ATTENTION: [("tokens", HEADS, DIM)]}
ATTRIBUTES: dict[str, dict[str, float]] = {WRITE: {}, ATTENTION: {"scale": SCALE}}
STEPS = (
    {"tokens": 1, "sequences": 1, "max_blocks": 3, "blocks": 40, "entries": 2},
    {"tokens": 37, "sequences": 5, "max_blocks": 7, "blocks": 40, "entries": 6},
)


class SymInt32:
    def __init__(self, value: Any) -> None:
        self.dim: Dim = value.dim if isinstance(value, SymInt32) else ExprBuilder().dim(value)


class SymIntExprs(list[SymInt32]):
    @classmethod
    def from_tuple(cls, values: Any) -> SymIntExprs:
        assert all(isinstance(value, SymInt32) for value in values), "integers are SymInt32"
        return cls(values)


class KernelLaunchParams:
    NAMES = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_mem")

    def __init__(self) -> None:
        for name in self.NAMES:
            setattr(self, name, int(name != "shared_mem"))

    def __setattr__(self, name: str, value: Any) -> None:
        assert name in self.NAMES, name
        object.__setattr__(self, name, SymInt32(value))


class TensorDesc:
    def __init__(self, shape_expr: Any, dtype: DataType, shape: Any = None) -> None:
        self.shape_expr, self.dtype, self.shape = shape_expr, dtype, shape
        self.aliased_to: TensorDesc | None = None

    def aliased(self) -> TensorDesc:
        other = TensorDesc(self.shape_expr, self.dtype)
        other.aliased_to = self
        return other


class OwnLayer:
    """`tensorrt.plugin` as its documentation has it."""

    TensorDesc, KernelLaunchParams = TensorDesc, KernelLaunchParams
    SymIntExprs, SymInt32 = SymIntExprs, SymInt32
    from_shape_expr = staticmethod(TensorDesc)

    def __init__(self) -> None:
        self.described: dict[str, Any] = {}
        self.compiled: dict[str, Any] = {}

    def register(self, name: str) -> Callable[[Any], Any]:
        def decorate(function: Any) -> Any:
            signature = inspect.signature(function)
            kinds = [p.annotation for p in signature.parameters.values()]
            tensors = sum(kind is TensorDesc for kind in kinds)
            assert all(kind is TensorDesc for kind in kinds[:tensors]), "tensors come first"
            assert all(kind in (int, float, str, bool) for kind in kinds[tensors:]), kinds
            result = signature.return_annotation
            assert set(typing.get_args(result) or (result,)) == {TensorDesc}, result
            self.described[name] = function
            return function

        return decorate

    def aot_impl(self, name: str) -> Callable[[Any], Any]:
        def decorate(function: Any) -> Any:
            signature = inspect.signature(function)
            registered = list(inspect.signature(self.described[name]).parameters)
            assert list(signature.parameters) == [*registered, "outputs", "tactic"]
            result = typing.get_args(signature.return_annotation)
            assert result == (str, str, KernelLaunchParams, SymIntExprs), result
            self.compiled[name] = function
            return function

        return decorate

    def call(self, name: str) -> dict[str, Any]:
        inputs = [
            TensorDesc([SymInt32(d) for d in dims], DataType[dtype], shape_of(dims))
            for dtype, dims in INPUTS[name].values()
        ]
        attributes = ATTRIBUTES[name].values()
        outputs = self.described[name](*inputs, *attributes)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        entry, ptx, launch, extra = self.compiled[name](*inputs, *attributes, outputs, 0)
        return {
            "outputs": [[d.dim for d in output.shape_expr] for output in outputs],
            "dtypes": [output.dtype for output in outputs],
            "aliases": [
                inputs.index(output.aliased_to) if output.aliased_to else -1 for output in outputs
            ],
            "name": entry, "ptx": ptx, "extra": [value.dim for value in extra],
            "launch": {key: getattr(launch, key).dim for key in KernelLaunchParams.NAMES},
        }  # fmt: skip


class NvidiaLayer:
    """NVIDIA's own, from the folder of its package."""

    def __init__(self, package: Path) -> None:
        self.trt: Any = tensorrt()
        sys.modules["tensorrt"] = self.trt
        folder = package / "plugin"
        spec = importlib.util.spec_from_file_location(
            "tensorrt.plugin", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        self.plugin: Any = importlib.util.module_from_spec(spec)
        sys.modules["tensorrt.plugin"] = self.trt.plugin = self.plugin
        spec.loader.exec_module(self.plugin)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plugin, name)

    def call(self, name: str) -> dict[str, Any]:
        library, classes = (sys.modules[f"tensorrt.plugin.{n}"] for n in ("_lib", "_plugin_class"))
        made: Any = library.QDP_REGISTRY[name]  # type: ignore[attr-defined]
        space, short = name.split("::")
        plugin = classes._TemplateAOTPlugin(short, space, made.num_outputs)  # type: ignore[attr-defined]
        plugin.init(
            made.register_func, ATTRIBUTES[name], made.aot_impl_attr_names, made.aot_impl_func,
            made.autotune_attr_names, made.autotune_func,
        )  # fmt: skip
        described = INPUTS[name].values()
        dtypes = [DataType[dtype] for dtype, _ in described]
        out_types = plugin.get_output_data_types(dtypes, [len(dims) for _, dims in described])
        builder = ExprBuilder()
        shapes = [[builder.dim(d) for d in dims] for _, dims in described]
        outputs = plugin.get_output_shapes(shapes, [], builder)
        plugin.set_tactic(0)
        in_out = [
            self._desc(dtype, dims)
            for dtype, dims in [
                *zip(dtypes, (dims for _, dims in described), strict=True),
                *zip(out_types, OUTPUTS[name], strict=True),
            ]
        ]
        launch, extra = SimpleNamespace(), Setter()
        plugin.get_launch_params(shapes, in_out, len(dtypes), launch, extra, builder)
        descs = [desc.desc for desc in in_out]
        entry, ptx = plugin.get_kernel(descs[: len(dtypes)], descs[len(dtypes) :])
        return {
            "outputs": outputs, "dtypes": out_types,
            "aliases": [plugin.get_aliased_input(i) for i in range(len(outputs))],
            "name": entry, "ptx": ptx.decode(), "extra": [value.expr for value in extra.values()],
            "launch": {key: value.expr for key, value in vars(launch).items()},
        }  # fmt: skip

    def _desc(self, dtype: DataType, dims: Dims) -> Any:
        inner = SimpleNamespace(type=dtype, dims=shape_of(dims), format="linear", scale=1.0)
        desc = self.trt.DynamicPluginTensorDesc()
        desc.desc = inner
        return desc


class Setter(dict[int, Any]):
    nbSymExprs = 0


def shape_of(dims: Dims) -> tuple[int, ...]:
    return tuple(d if isinstance(d, int) else -1 for d in dims)


def calls(layer: str, target: int) -> dict[str, dict[str, Any]]:
    """layer: "" for our own, or the folder of NVIDIA's package. Numbers for each of STEPS."""
    trtp: Any = NvidiaLayer(Path(layer)) if layer else OwnLayer()
    register_plugins(tensorrt(), trtp, target)
    found = {}
    for name in (WRITE, ATTENTION):
        said = trtp.call(name)
        found[name] = {
            "name": said["name"], "ptx": said["ptx"], "aliases": said["aliases"],
            "dtypes": [dtype.name for dtype in said["dtypes"]],
            "steps": [
                {
                    "outputs": [[d.at(step) for d in dims] for dims in said["outputs"]],
                    "launch": {key: dim.at(step) for key, dim in said["launch"].items()},
                    "extra": [dim.at(step) for dim in said["extra"]],
                }
                for step in STEPS
            ],
        }  # fmt: skip
    return found
