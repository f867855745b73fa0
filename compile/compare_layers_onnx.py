"""model.onnx again, with the input of each layer's norm as an output."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx

from seekforge.kernels.errors import InputError

MODEL_NAME = "model.onnx"
NORMS = ("RMSNormalization", "SimplifiedLayerNormalization")


def add_hidden_model(directory: Path, folder: Path, names: Sequence[str]) -> list[str]:
    """Writes `folder`/model.onnx, which reads the same weights file; returns the names of the
    hidden states. names: of the norms' weights. Their type and shape are for the runtime to infer.
    """
    model = onnx.load(directory / MODEL_NAME, load_external_data=False)
    readers = {node.input[1]: node for node in model.graph.node if node.op_type in NORMS}
    missing = [name for name in names if name not in readers]
    if missing:
        raise InputError(
            f"--layers: no norm in {directory / MODEL_NAME} reads {', '.join(missing[:3])}: its "
            "layers can't be told apart"
        )
    outputs = [readers[name].input[0] for name in names]
    known = {output.name for output in model.graph.output}
    model.graph.output.extend(
        onnx.ValueInfoProto(name=name) for name in dict.fromkeys(outputs) if name not in known
    )
    (folder / MODEL_NAME).write_bytes(model.SerializeToString())
    return outputs
