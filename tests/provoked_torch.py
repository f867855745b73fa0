"""What AOTInductor and torch.export refuse, and what fails in the build around them."""

from __future__ import annotations

import resource
import stat
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from provoked import limited, provoked, quiet
from torch import fx, nn
from transformers import LlamaConfig, LlamaForCausalLM

from seekforge.compile import inductor, onnx_translations
from seekforge.compile.build import Options, build
from seekforge.compile.export import export_module
from seekforge.compile.failures_inductor import inductor_failure
from seekforge.compile.inductor import Job, compile_package, lower_inductor
from seekforge.kernels.rms_norm import rms_norm
from seekforge.passes.kv_cache import GraphInput
from seekforge.passes.program import Program


def ragged(function: Callable[[fx.Graph, fx.Node], fx.Node]) -> Program:
    graph = fx.Graph()
    result = function(graph, graph.placeholder("x"))
    result.meta["stack_trace"] = '  File "transformers/modeling_toy.py", line 41, in forward'
    graph.output((result,))
    return Program(fx.GraphModule(nn.Module(), graph), {}, {}, "ragged", ["x"], ["logits"])


def tanh(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return graph.call_function(torch.ops.aten.tanh.default, (x,))


INPUTS = [GraphInput("x", torch.float32, ("tokens", 8))]


def script(file: Path, text: str) -> Path:
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


def package(folder: Path, python: str) -> None:
    """Compiles as a build does, in processes that a shell script `python` starts."""
    (folder / "engine").mkdir()
    with patch.object(inductor.sys, "executable", str(script(folder / "python", python))):
        lower_inductor(ragged(tanh), INPUTS, "cpu", folder / "engine")


@provoked("a process of AOTInductor that the system kills")
def killed(folder: Path) -> None:
    package(folder, "kill -9 $$")


@provoked("200 MB of address space for AOTInductor")
def inductor_memory(folder: Path) -> None:
    package(folder, f'ulimit -v 200000\nexec {sys.executable} "$@"')


def compile_here(folder: Path, program: Program) -> None:
    """In this process, where operators made here are known."""
    module = inductor.module_of(program)
    try:
        compile_package(Job(module, tuple(INPUTS), "cpu", folder / "model.pt2", {}))
    except Exception:
        text = traceback.format_exc()
        log = folder / "inductor.log"
        raise inductor_failure(program, "model.pt2", "cpu", 1, text, log) from None


@provoked("a C++ compiler that does not exist, for AOTInductor")
def no_compiler(folder: Path) -> None:
    with torch._inductor.config.patch({"cpp.cxx": (None, "/nonexistent/g++")}):
        compile_here(folder, ragged(tanh))


@provoked("a C++ compiler that refuses all code, for AOTInductor")
def refusing_compiler(folder: Path) -> None:
    """It answers when it is asked for its version."""
    text = (
        'case "$*" in *--version*) exec g++ "$@";; esac\necho "code.cpp:1: error: no" >&2\nexit 1'
    )
    compiler = str(script(folder / "g++", text))
    with torch._inductor.config.patch({"cpp.cxx": (None, compiler)}):
        compile_here(folder, ragged(tanh))


@provoked("an operator without a fake implementation, for AOTInductor")
def no_fake(folder: Path) -> None:
    library = torch.library.Library("provoked", "FRAGMENT")
    library.define("shapeless(Tensor x) -> Tensor")
    operator = torch.ops.provoked.shapeless.default
    compile_here(folder, ragged(lambda graph, x: graph.call_function(operator, (x,))))


@provoked("matrices that do not fit together, for AOTInductor")
def inductor_shapes(folder: Path) -> None:
    operator = torch.ops.aten.mm.default
    compile_here(folder, ragged(lambda graph, x: graph.call_function(operator, (x, x))))


class Branches(LlamaForCausalLM):
    """A model whose code looks at values."""

    def forward(self, input_ids: Any, position_ids: Any, use_cache: bool) -> Any:  # type: ignore[override]
        if input_ids.max() > 3:
            input_ids = input_ids + 1
        return super().forward(input_ids, position_ids=position_ids, use_cache=use_cache)


class Fixes(LlamaForCausalLM):
    """A model whose code fixes the length."""

    def forward(self, input_ids: Any, position_ids: Any, use_cache: bool) -> Any:  # type: ignore[override]
        ids = input_ids.view(-1, 7)
        return super().forward(ids, position_ids=position_ids, use_cache=use_cache)


SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def exported(kind: type[LlamaForCausalLM]) -> None:
    with torch.device("meta"):
        module = kind(LlamaConfig(**SIZES)).eval().requires_grad_(False)
    export_module(module, {}, 64)


@provoked("a model that branches on values, for torch.export")
def branches(folder: Path) -> None:
    exported(Branches)


@provoked("a model that fixes the sequence's length, for torch.export")
def fixes(folder: Path) -> None:
    exported(Fixes)


def checkpoint(folder: Path) -> Path:
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder / "checkpoint")
    return folder / "checkpoint"


def build_here(folder: Path) -> None:
    options = Options(("onnxruntime",), max_batch=2, max_len=64, max_chunk=16, verify="none")
    build(checkpoint(folder), folder / "engines", options, quiet())


@provoked("files of at most 20 kB while weights are written")
def full_disk(folder: Path) -> None:
    path = checkpoint(folder)
    options = Options(("onnxruntime",), max_batch=2, max_len=64, max_chunk=16, verify="none")
    with limited(resource.RLIMIT_FSIZE, 20_000):
        build(path, folder / "engines", options, quiet())


@provoked("a fault of our own in a lowering")
def own_fault(folder: Path) -> None:
    def fault(*_: Any) -> Any:
        raise AssertionError("two weights were expected")

    with patch.dict(onnx_translations.TRANSLATIONS, {rms_norm: fault}):
        build_here(folder)
