"""What backends say when a build fails, and what it means: the table behind every reworded failure.

One row for each kind of message: (backends, pattern in their text, cause, what to do). The first
row that matches is used, so special ones come before general ones. docs/errors.md shows what a user
sees for each; tests/test_failures.py provokes them with the real libraries.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Known:
    """backends: beginnings of backends' names that say it, "" for anyone. pattern: a regular
    expression, searched in their text with line breaks as spaces."""

    backends: tuple[str, ...]
    pattern: str
    cause: str
    advice: str


TENSORRT = ("tensorrt",)
ONNX = ("onnxruntime", "onnx")
INDUCTOR = ("inductor",)
EXPORT = ("export",)
ANY = ("",)

KNOWN = (
    # TensorRT's parser
    Known(
        TENSORRT, r"not supported by a dedicated kernel",
        "TensorRT has no fused attention kernel for this dtype and head size",
        "use float16 or bfloat16 and a head size that is a multiple of 16, up to 256",
    ),
    Known(
        TENSORRT, r"same head dimension|Key and Value must have the same shape",
        "TensorRT's attention needs one head size for Q, K and V",
        "pad V to the head size of Q and K in the lowering",
    ),
    Known(
        TENSORRT, r"[Ss]oft.?cap",
        "TensorRT's attention has no logit soft cap",
        "build this model for onnxruntime or inductor",
    ),
    Known(
        TENSORRT, r"[Nn]on-zero zero.?point|shiftIsAllZeros|zeroPoint",
        "TensorRT accepts only zero as an INT4 zero point",
        "quantise symmetrically for TensorRT (leave --asymmetric out)",
    ),
    Known(
        TENSORRT, r"Failed to convert ONNX date type|convertDtype",
        "TensorRT has no such element type",
        "use float32, float16, bfloat16, int64, int32, bool, or INT4 weights",
    ),
    Known(
        TENSORRT, r"Failed to import initializer|cannot be imported into TensorRT",
        "TensorRT cannot hold a weight of this element type",
        "store it as float32, float16, bfloat16, int64, int32, bool or signed INT4",
    ),
    Known(
        TENSORRT, r"must have same input types|inconsistent types|types? .* (is|are) not equal",
        "the network is strongly typed and this node mixes element types",
        "insert a Cast before it in the lowering, so that all inputs have one type",
    ),
    Known(
        TENSORRT, r"Plugin not found|plugin creator .*not found",
        "the operator is neither standard ONNX nor a TensorRT plugin that is loaded",
        "lower it to standard operators of opset 23, or build for onnxruntime or inductor",
    ),
    # TensorRT's builder
    Known(
        TENSORRT, r"no tactics to implement the operation within workspace limit",
        "no kernel for this operation fits into the workspace limit",
        "raise the workspace limit, or lower --max-chunk and --max-batch",
    ),
    Known(
        TENSORRT, r"Could not find any implementation|[Nn]o implementation for node",
        "TensorRT has no kernel for this node with these types, shapes and workspace",
        "change the node's dtype (--dtype float16), raise the workspace limit, or build for "
        "onnxruntime or inductor",
    ),
    Known(
        TENSORRT, r"graph_jit\.cpp.*CUDA_SUCCESS",
        "an engine whose weights can be changed is laid out on a GPU while it is built, and there "
        "is none, or no driver",
        "build on a machine with an NVIDIA GPU, or leave --strip out",
    ),
    Known(
        TENSORRT, r"no optimization profile has been defined|missing dimensions in profile",
        "an input with dynamic dimensions has no range in a profile",
        "the graph's inputs and the profiles must list the same names",
    ),
    Known(
        TENSORRT, r"MIN<=OPT<=MAX|profile->isValid",
        "a profile's sizes are not min <= opt <= max",
        "give limits of at least 1, and an optimum within them",
    ),
    # TensorRT's runtime
    Known(
        TENSORRT, r"incompatible serialization version|kEXPECTED_MAGIC_TAG|deserialization call on"
        r"|[Vv]ersion tag does not match|older TensorRT version",
        "the engine was written by another version of TensorRT, or is no engine",
        "build it again with the version that is installed here",
    ),
    Known(
        TENSORRT, r"Error Code 1: Serialization|empty memory buffer|No engine found in plan",
        "the engine file was cut or changed",
        "build it again, or copy it again and compare its sha256 with the manifest's",
    ),
    Known(
        TENSORRT, r"not compatible with the (current )?(GPU|device)|different (GPU|device|compute)"
        r"|compute capability \S+ and this GPU",
        "the engine is made for GPUs of another compute capability",
        "build it with --target of this GPU",
    ),
    Known(
        TENSORRT, r"cudaError 35|driver version is insufficient",
        "there is no NVIDIA driver here, or one older than this CUDA runtime needs",
        "install a driver that `nvidia-smi` shows with at least that CUDA version, or use another "
        "backend: --backend inductor",
    ),
    Known(
        TENSORRT, r"cudaError 100|no CUDA-capable device",
        "the driver sees no NVIDIA GPU",
        "make a GPU visible (CUDA_VISIBLE_DEVICES, the container's --gpus), or use another backend",
    ),
    # ONNX checker, ONNX Runtime
    Known(
        ONNX, r"Could not find an implementation for",
        "this execution provider has no kernel for the operator with these element types",
        "use --dtype float32 or float16 on the CPU",
    ),
    Known(
        ONNX, r"No Op registered for",
        "the operator is not one of this ONNX version",
        "lower it to operators of opset 23",
    ),
    Known(
        ONNX, r"IR version|ir_version",
        "the model file's IR version is newer than the library reads",
        "install a newer onnxruntime and onnx, or write an older IR version",
    ),
    Known(
        ONNX, r"models stamped with official released|under development",
        "the model's opset is newer than the library knows",
        "install a newer onnxruntime, or lower to opset 23",
    ),
    Known(
        ONNX, r"bound to different types|inconsistent type",
        "the node's inputs have different element types",
        "insert a Cast before it in the lowering, so that all inputs have one type",
    ),
    Known(
        ONNX, r"Unrecognized attribute",
        "the operator has no such attribute in this opset",
        "check its translation in compile/onnx_translations.py against opset 23",
    ),
    Known(
        ONNX, r"topologically sorted|is not a graph input, initializer, or output",
        "the node reads a value that nothing before it makes",
        "this is a fault of the lowering: report it with the log",
    ),
    Known(
        ONNX, r"ShapeInferenceError|Incompatible dimensions|Attempting to broadcast",
        "the shapes of the node's inputs do not fit together",
        "check its translation in compile/onnx_translations.py, or the inputs it is run with",
    ),
    Known(
        ONNX, r"escapes model directory|points outside the directory",
        "the weights are said to lie outside the model's folder",
        "keep them beside the model, under a bare file name",
    ),
    Known(
        ONNX, r"External data path|not regular file|is not a regular file",
        "the file with the model's weights is not beside the model",
        "move both together, or build the engine again",
    ),
    Known(
        ONNX, r"are out of bounds or can ?not be read in full",
        "the file with the model's weights is shorter than the model says: cut, or of another one",
        "build the engine again",
    ),
    Known(
        ONNX, r"[Pp]rotobuf parsing failed|not a readable ONNX model",
        "the file is no ONNX model, or was cut",
        "build the engine again",
    ),
    # AOTInductor
    Known(
        INDUCTOR, r"InvalidCxxCompiler|No working C\+\+ compiler found",
        "no C++ compiler: AOTInductor needs one to build, and the environment's CXX is used if set",
        "install g++, or set CXX to a compiler that exists: CXX=/usr/bin/g++",
    ),
    Known(
        INDUCTOR, r"CppCompileError|C\+\+ compile error",
        "the C++ compiler refused the code that Inductor wrote",
        "try the system's own compiler: CXX=/usr/bin/g++; the log has its messages",
    ),
    Known(
        INDUCTOR, r"no fake impl|[Nn]o fake implementation|UnsupportedFakeTensorException"
        r"|There was no fake|UnsupportedOperatorException",
        "an operator has no fake implementation, so that export cannot know its result's shape",
        "register one (register_fake), or keep the operator out of the graph",
    ),
    Known(
        INDUCTOR, r"MissingOperator|missing lowering|no lowering",
        "Inductor cannot compile this operator",
        "write it with ATen operators",
    ),
    Known(
        INDUCTOR, r"RuntimeError: .*(same reduction dim|size of tensor|shape|sizes)",
        "the shapes of the operator's inputs do not fit together",
        "a pass or the model's code made a graph that cannot run: report it with the log",
    ),
    Known(
        INDUCTOR, r"TritonMissing|Cannot find a working triton",
        "Triton is not installed, and Inductor needs it for a GPU",
        "pip install 'seekforge[gpu]'",
    ),
    Known(
        INDUCTOR, r"undefined symbol|GLIBCXX|cannot open shared object",
        "the compiled package does not load: it was linked against another C++ library",
        "build again with the system's own compiler: CXX=/usr/bin/g++",
    ),
    # torch.export
    Known(
        EXPORT, r"[Dd]ata.?[Dd]ependent|GuardOnDataDependentSymNode",
        "the model's code decides by the values of a tensor, which a graph cannot",
        "write it without that branch (torch.where), or register an implementation that exports, "
        "as models/exportable.py does for experts and attention",
    ),
    Known(
        EXPORT, r"Constraints violated|specializ|specialis|baked in",
        "the model's code fixes a size that must stay free (batch or sequence)",
        "write it without int(x.shape[…]) and without branches on sizes",
    ),
    # Anyone
    Known(
        ANY, r"signal 9|SIGKILL",
        "the process was killed: mostly the kernel's doing, when memory has run out",
        "see `seekforge check` for what the build needs; build one backend at a time, or on a "
        "machine with more memory",
    ),
    Known(
        ANY, r"[Oo]ut.?[Oo]f.?[Mm]emory|bad_?alloc|[Cc]annot allocate|can't allocate|MemoryError"
        r"|failed to map segment|[Uu]nable to mmap|Arena alloc failed",
        "memory ran out during the build",
        "see `seekforge check` for what the build needs; lower --max-batch, --max-chunk or "
        "--max-len, or build on a machine with more",
    ),
    Known(
        ANY, r"No space left on device|File too large|[Dd]isk quota exceeded",
        "the disk is full, or the file is larger than is allowed here",
        "see `seekforge check` for what the build needs; free some, or give another folder with -o",
    ),
    Known(
        ANY, r"Permission denied|Read-only file system",
        "a file cannot be written or read by this user",
        "give another folder with -o, or change its permissions",
    ),
    Known(
        TENSORRT, r"UNSUPPORTED_NODE",
        "TensorRT's parser does not support this operator, or not in this form",
        "lower it to other operators, or build for onnxruntime or inductor",
    ),
    Known(
        TENSORRT, r"INVALID_NODE|INVALID_GRAPH",
        "the node is not valid: its inputs' shapes, types or attributes contradict each other",
        "check its translation in compile/onnx_translations.py",
    ),
)  # fmt: skip


def known(backend: str, text: str) -> Known | None:
    """The first row that fits what `backend` said."""
    flat = " ".join(text.split())
    for row in KNOWN:
        if backend.startswith(row.backends) and re.search(row.pattern, flat):
            return row
    return None
