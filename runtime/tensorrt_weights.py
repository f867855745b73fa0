"""Where a TensorRT engine's weights come from when it is loaded: refit and streaming.

A stripped engine holds none. Its directory has the ONNX graph and `weights.safetensors`, from which
they are put in, laid out as the engine wants them, before anything runs. A streaming engine keeps
only so many bytes of them on the GPU and fetches the others from the host in each step.
Both are written against TensorRT-RTX 1.7's documentation and have not run on a GPU yet.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from seekforge.kernels.errors import EngineError
from seekforge.runtime.tensorrt_api import capture, import_tensorrt, process_logger

MODEL_NAME = "model.onnx"


def refit(engine: Any, model: Path, product: str) -> None:
    """Puts the weights of the ONNX file `model` into `engine`. Raises EngineError, with the first
    weight that is missing, where it does not have all of them."""
    trt = import_tensorrt(product)
    if not engine.refittable:
        raise EngineError(
            f"{model.parent}: the manifest says that the engine has no weights of its own, but the "
            "engine takes none; build it again"
        )
    logger = process_logger(product)
    with capture(product) as log:
        refitter = trt.Refitter(engine, logger)
        parser = trt.OnnxParserRefitter(refitter, logger)
        # From a file, not from bytes: external data is looked up beside it.
        read = parser.refit_from_file(str(model))
        missing = refitter.get_missing_weights()
        if read and not missing and refitter.refit_cuda_engine():
            return
    said = [parser.get_error(i).desc() for i in range(parser.num_errors)] + log.errors
    if missing:
        said.insert(0, f"{len(missing)} weights are missing, first {missing[0]!r}")
    raise EngineError(
        f"{model}: its weights do not go into the engine: {(said or ['no reason given'])[0]}; "
        "build it again"
    )


def stream_weights(engine: Any, budget: int, directory: Path) -> None:
    """Keeps at most `budget` bytes of weights on the GPU; 0 streams as many as can be. Before any
    execution context is made: the budget is fixed then."""
    total = engine.streamable_weights_size
    if total == 0:
        raise EngineError(
            f"{directory}: the engine was built without weight streaming, the manifest says "
            "otherwise; build it again with --weight-streaming"
        )
    # All of them or more turns streaming off.
    engine.weight_streaming_budget_v2 = min(budget, total)
    if engine.weight_streaming_budget_v2 != min(budget, total):
        raise EngineError(
            f"{directory}: TensorRT does not keep {min(budget, total)} of {total} bytes of weights "
            "on this GPU; build with another --weight-streaming, or free GPU memory"
        )
