"""What NVIDIA's `tensorrt` gives the Python layer of its plugins, without the library: symbolic
dimensions that can be evaluated, enumerations, and empty base classes."""

from __future__ import annotations

import enum
import typing
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any


class Dim:
    """`IDimensionExpr`: a number for each step."""

    def __init__(self, at: Callable[[dict[str, int]], int], constant: bool = False) -> None:
        self.at, self.constant = at, constant

    def is_constant(self) -> bool:
        return self.constant

    def get_constant_value(self) -> int:
        return self.at({})


class Operation(enum.Enum):
    SUM, PROD, MAX, MIN, SUB, EQUAL, LESS, FLOOR_DIV, CEIL_DIV = range(9)


ARITHMETIC: dict[Operation, Callable[[int, int], int]] = {
    Operation.SUM: lambda a, b: a + b, Operation.SUB: lambda a, b: a - b,
    Operation.PROD: lambda a, b: a * b, Operation.FLOOR_DIV: lambda a, b: a // b,
    Operation.CEIL_DIV: lambda a, b: -(-a // b), Operation.MAX: max, Operation.MIN: min,
}  # fmt: skip


class ExprBuilder:
    def constant(self, value: int) -> Dim:
        return Dim(lambda _: value, True)

    def operation(self, op: Operation, a: Dim, b: Dim) -> Dim:
        return Dim(
            lambda sizes: ARITHMETIC[op](a.at(sizes), b.at(sizes)), a.constant and b.constant
        )

    def dim(self, value: int | str) -> Dim:
        if isinstance(value, int):
            return self.constant(value)
        return Dim(lambda sizes: sizes[value])


class DataType(enum.Enum):
    FLOAT, HALF, BF16, INT64, INT32 = range(5)


def tensorrt() -> ModuleType:
    """What `tensorrt` gives the Python layer of its plugins; unknown names are empty classes."""
    module: Any = ModuleType("tensorrt")
    made: dict[str, type] = {}
    module.__getattr__ = lambda name: made.setdefault(name, type(name, (), {}))
    for name in (
        "PluginFieldType",
        "PluginArgType",
        "PluginArgDataType",
        "QuickPluginCreationRequest",
    ):
        values = ("INT", "INT8", "INT16", "INT32", "INT64", "FLOAT16", "FLOAT32", "FLOAT64", "CHAR")
        setattr(module, name, enum.Enum(name, (*values, "UNKNOWN", "STRICT_AOT")))
    module.DataType, module.DimensionOperation, module.IDimensionExpr = DataType, Operation, Dim
    module.Dims = type("Dims", (tuple,), {"MAX_DIMS": 8})
    module.DimsExprs = lambda count: [None] * count
    module.TensorFormat = SimpleNamespace(LINEAR="linear")
    module.Logger = type("Logger", (), {"WARNING": 2, "log": lambda *_: None})
    module.PluginField = module.PluginFieldCollection = lambda *values: values
    creators: dict[str, Any] = {}
    module.get_plugin_registry = lambda: SimpleNamespace(
        register_creator=lambda creator, space: creators.setdefault(creator.name, creator),
        get_creator=lambda name, version, space: creators[name],
    )
    module.float32, module.float16, module.int32 = DataType.FLOAT, DataType.HALF, DataType.INT32
    return typing.cast(ModuleType, module)
