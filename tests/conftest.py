"""Tiny checkpoints, made on the spot: `tiny_checkpoint("qwen3", num_hidden_layers=1) -> Path`.

Weights are drawn with standard deviation 0.5 (transformers' 0.02 would hide errors under the
tolerance: logits reach about 8 this way), biases with 1, norm weights around 1. The tokenizer is a
real byte-level BPE: 256 bytes, 3 special tokens, 21 merges; the model's vocabulary is 13 ids wider.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

# Without a GPU the Triton kernels run in Triton's interpreter. It is chosen when a kernel is
# decorated, so before any kernel file is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from seekforge.compile.build import Options, build
from seekforge.compile.export import export_module
from seekforge.compile.onnx import write_onnx
from seekforge.compile.weights import WEIGHTS_NAME
from seekforge.models.default import cache_folder
from seekforge.models.exportable import make_exportable
from seekforge.models.module import build_module
from seekforge.passes.kv_cache import GraphInput, trace_values
from seekforge.passes.program import Program, Weight

COMMON = {
    "vocab_size": 293,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
MLA = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"hidden_size": 40, "num_key_value_heads": 1, "head_dim": 16},  # 4 * 16 != 40
    "qwen3_moe": {
        "hidden_size": 40, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 24, "norm_topk_prob": True,
    },
    "deepseek_v2": MLA | {
        "q_lora_rank": None, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
        "n_shared_experts": 2, "norm_topk_prob": False, "routed_scaling_factor": 1.0,
    },
    "deepseek_v3": MLA | {
        "q_lora_rank": 24, "n_group": 4, "topk_group": 2, "n_shared_experts": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    },
}  # fmt: skip
SPECIAL_TOKENS = ["<|begin|>", "<|end|>", "<|pad|>"]  # ids 0, 1, 2
TOKENIZER_SIZE = 280
TEXT = ["the capital of France is Paris and the capital of Spain is Madrid", "one then another"]


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests see the user's converted checkpoints, but none of the durations and builds that are
    remembered from earlier, and leave none."""
    checkpoints = cache_folder()
    checkpoints.mkdir(parents=True, exist_ok=True)
    base = tmp_path_factory.mktemp("cache")
    (base / "seekforge").mkdir()
    (base / "seekforge" / "checkpoints").symlink_to(checkpoints)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(base))
        yield


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Factory `(family, **config overrides) -> Path`, one folder for each set of arguments.

    Do not change the folder: it is shared (copy it with shutil.copytree). A vocab_size below 280
    leaves the tokenizer out.
    """
    made: dict[str, Path] = {}

    def make(family: str, **overrides: Any) -> Path:
        key = json.dumps([family, overrides], sort_keys=True)
        if key not in made:
            made[key] = tmp_path_factory.mktemp(family)
            write_checkpoint(made[key], family, overrides)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_model(tiny_checkpoint: Callable[..., Path]) -> Callable[..., nn.Module]:
    """Factory `(family, **config overrides) -> nn.Module`: transformers eager, fp32, eval, a fresh
    module in each call with the weights of `tiny_checkpoint` for the same arguments."""

    def make(family: str, **overrides: Any) -> nn.Module:
        path = tiny_checkpoint(family, **overrides)
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        )
        return model.eval().requires_grad_(False)

    return make


def write_checkpoint(folder: Path, family: str, overrides: dict[str, Any]) -> None:
    config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family], **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise if name.endswith("bias") else 1 + 0.1 * noise)
        for name, buffer in model.named_buffers():  # of routers; zero unless trained
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(folder)
    if config.vocab_size >= TOKENIZER_SIZE:
        byte_level_tokenizer().save_pretrained(folder)


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    begin, end, pad = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token=begin, eos_token=end, pad_token=pad
    )


@pytest.fixture(scope="session")
def tiny_engine(
    tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Factory `(family, backend, dtype=, max_len=, max_chunk=, **config) -> engine directory`.

    Built once for each set of arguments; the engines of one checkpoint share a bundle.
    """
    made: dict[str, Path] = {}

    def make(
        family: str,
        backend: str,
        dtype: str = "float32",
        max_len: int = 256,
        max_chunk: int = 64,
        **config: Any,
    ) -> Path:
        key = json.dumps([family, dtype, max_len, max_chunk, config], sort_keys=True)
        bundle = made.setdefault(key, tmp_path_factory.mktemp(f"{family}-engines"))
        if not (bundle / backend).exists():
            options = Options(
                backends=(backend,), dtype=dtype, max_len=max_len, max_chunk=max_chunk, max_batch=5
            )
            build(tiny_checkpoint(family, **config), bundle, options)
        return bundle / backend

    return make


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Operators and passes are tested on tensors of a few KB, where a second thread costs 10 ms a
    matrix product on a busy machine (the tests of passes took 107 s instead of 47)."""
    threads = torch.get_num_threads()
    if Path(request.path).name.startswith(("test_kernel_", "test_pass_", "test_export")):
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=["cpu", GPU])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    return str(request.param)


@pytest.fixture(params=["interpreter", GPU])
def kernel_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where a Triton kernel runs: on the GPU, or on CPU tensors in Triton's interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed")
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA GPU")
        return "cuda"
    if "TRITON_INTERPRET" not in os.environ:
        pytest.skip("the kernels are compiled for the GPU of this machine")
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(x: Any, source: Any, target: Any, mode: Any) -> Any:
        """Rounds fp32 to bf16 and FP8 to nearest even, as GPUs do; the interpreter truncates."""
        wide = torch.tensor(x).view(torch.float32) if source == tl.float32 else None
        if wide is not None and target == tl.bfloat16:
            return wide.to(torch.bfloat16).view(torch.uint16).numpy()
        if wide is not None and target == tl.float8e4nv:
            return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return convert(x, source, target, mode)

    monkeypatch.setattr(interpreter, "_convert_float", rounded)
    dot = interpreter.InterpreterBuilder.create_dot

    def widened(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        """A dot of bf16 tiles; the interpreter would multiply their bit patterns."""

        def wide(x: Any) -> Any:
            if x.dtype.scalar != tl.bfloat16:
                return x
            value = torch.tensor(x.data.view("int16")).view(torch.bfloat16).float().numpy()
            return interpreter.TensorHandle(value, tl.float32)

        return dot(self, wide(a), wide(b), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", widened)
    return "cpu"


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fresh memory holds NaN: an output element that is never written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all() and torch.ones(1).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["plain", "transposed", "expanded", "sliced"])
def layout(request: pytest.FixtureRequest) -> Callable[[torch.Tensor], torch.Tensor]:
    """Repeats a tensor's first row along dim 0, stored contiguously or in another way."""

    def lay(x: torch.Tensor) -> torch.Tensor:
        x = x[:1].expand_as(x)
        if request.param == "transposed":
            return x.transpose(0, -1).contiguous().transpose(0, -1)
        if request.param == "expanded":
            return x
        if request.param == "sliced":
            return torch.nn.functional.pad(x, (3, 2))[..., 3:-2]
        return x.contiguous()

    return lay


@pytest.fixture
def cached_sequences() -> Callable[..., SimpleNamespace]:
    """Factory of the inputs of cached attention, and what plain attention says.

    `make([(past, new), ...], block_size=4, heads=4, kv_heads=2, qk_dim=8, v_dim=8)`: sequence i has
    `past` tokens in the pools and `new` ones in this step. Blocks are shuffled; pool slots without
    a token hold random values. All tokens' q, k, v are `rows` of [new tokens]; `expected` [tokens,
    heads, v_dim] is causal attention over each whole sequence, in the pools' dtype.
    """
    return make_cached_sequences


def make_cached_sequences(
    chunks: list[tuple[int, int]],
    *,
    block_size: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    qk_dim: int = 8,
    v_dim: int = 8,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    spare: int = 3,
) -> SimpleNamespace:
    random = torch.Generator().manual_seed(len(chunks) + block_size)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(device, dtype)

    counts = [-(-(past + new) // block_size) for past, new in chunks]
    order = torch.randperm(sum(counts) + spare, generator=random).tolist()
    case = SimpleNamespace(
        k_pool=draw(len(order), block_size, kv_heads, qk_dim),
        v_pool=draw(len(order), block_size, kv_heads, v_dim),
        scale=qk_dim**-0.5,
        expected=[],
    )
    tables, slots, parts = [], [], []
    for (past, new), count in zip(chunks, counts, strict=True):
        blocks, order = order[:count], order[count:]
        tables.append(blocks + [0] * (max(counts) - count))
        at = torch.tensor(
            [blocks[i // block_size] * block_size + i % block_size for i in range(past + new)],
            dtype=torch.int64,
        ).to(device)
        q, k, v = (
            draw(past + new, h, d)
            for h, d in ((heads, qk_dim), (kv_heads, qk_dim), (kv_heads, v_dim))
        )
        case.k_pool.flatten(0, 1)[at[:past]] = k[:past]
        case.v_pool.flatten(0, 1)[at[:past]] = v[:past]
        repeated = [x.repeat_interleave(heads // kv_heads, 1).transpose(0, 1) for x in (k, v)]
        whole = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), *repeated, is_causal=True, scale=case.scale
        )
        case.expected.append(whole.transpose(0, 1)[past:])
        parts.append([x[past:] for x in (q, k, v)])
        slots.append(at[past:])
    case.q, case.k, case.v = (torch.cat(x) for x in zip(*parts, strict=True))
    case.expected = torch.cat(case.expected)
    case.slot_mapping = torch.cat(slots)
    index = {"dtype": torch.long, "device": device}
    case.block_tables = torch.tensor(tables, **index)
    case.past_lens = torch.tensor([past for past, _ in chunks], **index)
    case.context_lens = torch.tensor([sum(chunk) for chunk in chunks], **index)
    case.query_start = torch.tensor([0, *(new for _, new in chunks)], **index).cumsum(0)
    case.paged = lambda c=case: (
        c.q, c.k, c.v, c.k_pool, c.v_pool, c.slot_mapping, c.block_tables, c.context_lens,
        c.query_start, c.scale,
    )  # fmt: skip
    return case


@pytest.fixture(scope="session")
def exported(tiny_model: Callable[..., nn.Module]) -> Callable[..., tuple[Program, nn.Module]]:
    """Factory `(family, dtype=float32, **config) -> (program, eager module)`.

    The program is an export of transformers' own module; its checkpoint names are those of the
    module's parameters. The eager module attends with `seekforge::attention`; do not change it.
    """
    made: dict[str, tuple[Program, nn.Module]] = {}

    def make(
        family: str, dtype: torch.dtype = torch.float32, **overrides: Any
    ) -> tuple[Program, nn.Module]:
        key = json.dumps([family, str(dtype), overrides], sort_keys=True)
        if key not in made:
            module = tiny_model(family, **overrides)
            # Not module.to(dtype): it would round the rotary frequencies, which stay fp32 in use.
            for parameter in module.parameters():
                parameter.data = parameter.data.to(dtype)
            sources = {name: (name,) for name in module.state_dict()}
            bare = build_module(copy.deepcopy(module.config), dtype)
            made[key] = export_module(bare, sources, 64), make_exportable(module)
        program, module = made[key]
        graph = torch.fx.Graph()
        graph.output(graph.graph_copy(program.graph, {}))
        copied = torch.fx.GraphModule(program.graph_module, graph)
        return Program(copied, dict(program.weights), dict(program.constants)), module

    return make


class Toy(nn.Module):
    """A function as a module; tensors become parameters, or constants where they are named so."""

    def __init__(self, function: Callable[..., Any], parts: dict[str, Any]) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if not isinstance(part, torch.Tensor):
                self.add_module(name, part)
            elif name.startswith("constant"):
                self.register_buffer(name, part, persistent=False)
            else:
                self.register_parameter(name, nn.Parameter(part, requires_grad=False))

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(self, *inputs)


@pytest.fixture
def traced() -> Callable[..., tuple[Program, nn.Module]]:
    """Factory `(function, *inputs, **parts) -> (program, module)` of a small graph.

    function: called with the module, whose attributes are `parts`, and the inputs. Dimensions 0 and
    1 of the inputs are dynamic; an input of integers is named position_ids.
    """

    def make(
        function: Callable[..., Any], *inputs: torch.Tensor, **parts: Any
    ) -> tuple[Program, nn.Module]:
        module = Toy(function, parts).eval().requires_grad_(False)
        dims = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("seq", max=64)}
        lifted = torch.export.export(
            copy.deepcopy(module).to("meta"),
            tuple(x.to("meta") for x in inputs),
            dynamic_shapes=(tuple(dims for _ in inputs),),
            strict=False,
        ).module(check_guards=False)
        graph_module = torch.fx.GraphModule(lifted, lifted.graph)
        graph_module.graph.set_codegen(torch.fx.graph.CodeGen())
        for i, node in enumerate(graph_module.graph.find_nodes(op="placeholder")):
            node.target = f"x{i}" if inputs[i].is_floating_point() else "position_ids"
            node._rename(node.target)
        constants = dict(module.named_buffers())
        weights = {name: Weight((name,)) for name, _ in module.named_parameters()}
        weights |= {name: Weight(value=value) for name, value in constants.items()}
        read = {str(node.target) for node in graph_module.graph.find_nodes(op="get_attr")}
        kept = {name: weight for name, weight in weights.items() if name in read}
        return Program(graph_module, kept, constants), module

    return make


@pytest.fixture
def op_onnx(tmp_path: Path) -> Callable[..., Path]:
    """Factory `(function, inputs, weights, outputs, target) -> path of a model.onnx`.

    function: called with the graph and one node for each input and weight, in order; returns the
    nodes of the outputs. inputs: name -> (dtype, dims), names of dims as in passes/kv_cache.py.
    """

    def make(
        function: Callable[..., list[torch.fx.Node]],
        inputs: dict[str, tuple[torch.dtype, tuple[int | str, ...]]],
        weights: dict[str, torch.Tensor],
        outputs: list[str],
        target: str = "onnxruntime",
    ) -> Path:
        root, graph = nn.Module(), torch.fx.Graph()
        for name, value in weights.items():
            root.register_buffer(name, value.to("meta"))
        nodes = [graph.placeholder(name) for name in inputs]
        nodes += [graph.get_attr(name) for name in weights]
        graph.output(tuple(function(graph, *nodes)))
        program = Program(
            torch.fx.GraphModule(root, graph),
            {name: Weight(value=value) for name, value in weights.items()},
            {}, "padded", list(inputs), outputs,
        )  # fmt: skip
        entries = [GraphInput(name, dtype, dims) for name, (dtype, dims) in inputs.items()]
        trace_values(program, entries)
        stored = {name: value.contiguous() for name, value in weights.items()}
        save_file(stored, tmp_path / WEIGHTS_NAME)
        write_onnx(program, entries, tmp_path / WEIGHTS_NAME, tmp_path / "model.onnx", target)
        return tmp_path / "model.onnx"

    return make
