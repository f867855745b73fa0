"""Real TensorRT-RTX engines of a hand-made two-layer padded graph: built, read, and refused.

No GPU is needed to build. To run the session's whole path without one, a stand-in context computes
with ONNX Runtime from the raw addresses that the session binds.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path
from string import Template
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
import torch
from onnx import numpy_helper

from seekforge.compile.profiles import make_profiles
from seekforge.compile.tensorrt import TensorRTResult, build_tensorrt
from seekforge.compile.tensorrt_options import TensorRTOptions
from seekforge.kernels.errors import BuildError, EngineError
from seekforge.runtime.manifest import FORMAT_VERSION, Generation, KVLayout, Limits, Manifest
from seekforge.runtime.profiles import profile_to_json
from seekforge.runtime.session import Chunk
from seekforge.runtime.tensorrt import TensorRTSession

trt = pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")

LAYERS, HEADS, KV_HEADS, DIM, VOCAB, BLOCK = 2, 6, 2, 16, 37, 4
LIMITS = Limits(max_len=32, max_batch=3, max_chunk=8)
STACK = 'File "run.py", line 3, in main\n  m(x)\nFile "modeling_toy.py", line 41, in forward\n  {}'

LAYER = Template("""
 [layers_${i}_input_norm] n$i = RMSNormalization <axis = -1> (x$i, norm)
 qkv$i = MatMul(n$i, qkv_$i)
 q$i, k$i, v$i = Split <axis = 2> (qkv$i, split_qkv)
 [layers_${i}_rope_q] qr$i = RotaryEmbedding <num_heads = $HEADS> (q$i, cos, sin, positions)
 [layers_${i}_rope_k] kr$i = RotaryEmbedding <num_heads = $KV_HEADS> (k$i, cos, sin, positions)
 new_k_$i = Reshape(kr$i, to_kv_heads)
 new_v_$i = Reshape(v$i, to_kv_heads)
 pk$i = Gather(k_pool_$i, block_tables)
 pv$i = Gather(v_pool_$i, block_tables)
 fk$i = Reshape(pk$i, past_shape)
 fv$i = Reshape(pv$i, past_shape)
 hk$i = Concat <axis = 1> (fk$i, kr$i)
 hv$i = Concat <axis = 1> (fv$i, v$i)
 [layers_${i}_attention] a$i = Attention
   <scale = 0.25, q_num_heads = $HEADS, kv_num_heads = $KV_HEADS> (qr$i, hk$i, hv$i, mask)
 o$i = MatMul(a$i, o_$i)
 r$i = Add(x$i, o$i)
 m$i = RMSNormalization <axis = -1> (r$i, norm)
 gu$i = MatMul(m$i, gate_up_$i)
 g$i, u$i = Split <axis = 2, num_outputs = 2> (gu$i)
 s$i = Sigmoid(g$i)
 silu$i = Mul(g$i, s$i)
 act$i = Mul(silu$i, u$i)
 d$i = MatMul(act$i, down_$i)
 x$next = Add(r$i, d$i)
""")
GRAPH = Template("""
<ir_version: 10, opset_import: ["" : 23]>
padded (int64[B,S] token_ids, int64[B,S] positions, int64[B,M] block_tables, int64[B] past_lens,
   int64[N] logits_rows, $pools) => ($dtype[N,$VOCAB] logits, $news)
 <int64[1] one = {1}, int64[1] block = {$BLOCK}, int64[1] zero = {0},
  int64 start = {0}, int64 step = {1}, int64[2] one_two = {1, 2}, int64[1] kv_width = {$kv},
  int64[3] split_qkv = {$hidden, $kv, $kv}, int64[4] to_kv_heads = {0, 0, $KV_HEADS, $dim},
  int64[2] flat = {-1, $hidden}>
{
 batch = Shape <start = 0, end = 1> (token_ids)
 seq = Shape <start = 1, end = 2> (token_ids)
 tables = Shape <start = 1, end = 2> (block_tables)
 past = Mul(tables, block)
 past_shape = Concat <axis = 0> (batch, past, kv_width)
 past_end = Squeeze(past, zero)
 seq_end = Squeeze(seq, zero)
 slots = Range(start, past_end, step)
 queries = Range(start, seq_end, step)
 lens = Unsqueeze(past_lens, one)
 cached2 = Less(slots, lens)
 cached = Unsqueeze(cached2, one_two)
 row = Unsqueeze(queries, zero)
 column = Unsqueeze(queries, one)
 causal = LessOrEqual(row, column)
 cached_shape = Concat <axis = 0> (batch, one, seq, past)
 causal_shape = Concat <axis = 0> (batch, one, seq, seq)
 cached4 = Expand(cached, cached_shape)
 causal4 = Expand(causal, causal_shape)
 mask = Concat <axis = 3> (cached4, causal4)
 x0 = Gather(embed_tokens, token_ids)
 $body
 h = RMSNormalization <axis = -1> (x$LAYERS, norm)
 tokens = Reshape(h, flat)
 rows = Gather(tokens, logits_rows)
 head = Transpose <perm = [1, 0]> (embed_tokens)
 [lm_head] logits = MatMul(rows, head)
}
""")


def padded_graph(dtype: str = "float16", dim: int = DIM) -> onnx.ModelProto:
    """The contract's padded form: GQA, RoPE, paged past through Gather, tied head."""
    hidden, kv = HEADS * dim, KV_HEADS * dim
    sizes = {"HEADS": HEADS, "KV_HEADS": KV_HEADS, "VOCAB": VOCAB, "BLOCK": BLOCK}
    names = [f"{side}_{i}" for i in range(LAYERS) for side in "kv"]
    kind = {"float32": "float"}.get(dtype, dtype)
    pools = [f"{kind}[blocks,{BLOCK},{KV_HEADS},{dim}] {n[0]}_pool_{n[2:]}" for n in names]
    text = GRAPH.substitute(
        sizes, LAYERS=LAYERS, dtype=kind, dim=dim, hidden=hidden, kv=kv, pools=", ".join(pools),
        news=", ".join(f"{kind}[B,S,{KV_HEADS},{dim}] new_{name}" for name in names),
        body="".join(LAYER.substitute(sizes, i=i, next=i + 1) for i in range(LAYERS)),
    )  # fmt: skip
    model = onnx.parser.parse_model(text)
    random = np.random.default_rng(0)
    angles = np.arange(LIMITS.max_len)[:, None] / 1e4 ** (np.arange(0, dim, 2) / dim)
    weights = {
        "embed_tokens": random.standard_normal((VOCAB, hidden)),
        "norm": 1 + 0.1 * random.standard_normal(hidden),
        "cos": np.cos(angles), "sin": np.sin(angles),
    }  # fmt: skip
    for i in range(LAYERS):
        shapes = {"qkv": (hidden, hidden + 2 * kv), "o": (hidden, hidden),
                  "gate_up": (hidden, 128), "down": (64, hidden)}  # fmt: skip
        weights |= {f"{k}_{i}": random.standard_normal(s) / 8 for k, s in shapes.items()}
    for name, value in weights.items():
        model.graph.initializer.append(numpy_helper.from_array(value.astype(dtype), name))
    for node in model.graph.node:
        stack = node.metadata_props.add()
        stack.key, stack.value = "pkg.torch.onnx.stack_trace", STACK.format(f"made {node.op_type}")
    return model


def layout(dtype: str = "float16", dim: int = DIM) -> KVLayout:
    pools = {"k": (KV_HEADS, dim), "v": (KV_HEADS, dim)}
    return KVLayout(LAYERS, BLOCK, pools, dtype, dynamic_block_size=False)


def save(model: onnx.ModelProto, folder: Path, weights: str | None = None) -> Path:
    path = folder / "model.onnx"
    onnx.save_model(
        model, path, save_as_external_data=weights is not None, location=weights, size_threshold=0
    )
    return path


def build(path: Path, dtype: str = "float16", dim: int = DIM, **options: Any) -> TensorRTResult:
    options = {"product": "tensorrt-rtx", **options}
    profiles = make_profiles(LIMITS, layout(dtype, dim))
    return build_tensorrt(path, path.with_name("model.engine"), profiles=profiles, **options)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> TensorRTResult:
    """One engine in a folder with a space and non-ASCII letters, weights in a file beside it."""
    folder = tmp_path_factory.mktemp("an engine é模")
    return build(save(padded_graph(), folder, weights="weights.safetensors"))


def manifest_of(result: TensorRTResult) -> Manifest:
    return Manifest(
        format_version=FORMAT_VERSION, seekforge_version="0", backend="tensorrt-rtx",
        backend_version=result.backend_version, device="cuda", compute_capability="8.9",
        form="padded", dtype="float16", model={"vocab_size": VOCAB}, limits=LIMITS, kv=layout(),
        inputs=result.inputs, outputs=result.outputs,
        profiles=tuple(profile_to_json(profile) for profile in result.profiles),
        generation=Generation((0,), None, None), quantization=None, passes=(), receipt=None,
        steps=(), layers=result.layers, memory=None, files=(),
    )  # fmt: skip


def test_attention_and_rope_become_native_fused_layers(built: TensorRTResult) -> None:
    assert built.layers["network"]["attention"] == LAYERS
    assert built.layers["network"]["rotary_embedding"] == 2 * LAYERS
    assert [profile["fused_attention"] for profile in built.layers["profiles"]] == [LAYERS, LAYERS]
    assert built.layers["profiles"][0]["compiled"]["gemm"] >= 4
    of_layer_1 = [x for x in built.compiled if "layers_1_attention" in x.nodes]
    assert {x.profile for x in of_layer_1 if x.is_fused_attention} == {0, 1}
    assert built.warnings == ()
    assert built.engine.stat().st_size == built.size > 100_000


def test_the_engines_own_tensors_are_those_reported(built: TensorRTResult) -> None:
    """The builder lists the finished engine's inputs and outputs in its log."""
    line = re.compile(
        r"^ Name: (\w+), IOMode: \w+, DataType: (\w+), Dimensions: \[([-\d,]*)\]"
        r".*?ProfileInfo: (.*)$",
        re.M,
    )
    listed = {m[1]: m for m in line.finditer(built.log_path.read_text(encoding="utf-8"))}
    manifest = manifest_of(built)
    assert listed.keys() == {spec.name for spec in (*manifest.inputs, *manifest.outputs)}
    words = {"int64": "Int64", "float16": "Half"}
    for spec in (*manifest.inputs, *manifest.outputs):
        assert listed[spec.name][2] == words[spec.dtype], spec.name
        assert listed[spec.name][3].count(",") + 1 == len(spec.shape), spec.name
    for spec in manifest.inputs:
        ranges = re.findall(
            r"MinShape: (\S+), OptShape: (\S+), MaxShape: (\S+),", listed[spec.name][4]
        )
        assert ranges == [
            tuple(str(profile[spec.name][k]).replace(" ", "") for k in ("min", "opt", "max"))
            for profile in manifest.profiles
        ], spec.name
    assert manifest.inputs[0].shape == ("B", "S")
    assert [spec.name for spec in manifest.inputs] == list(built.profiles[0])


def test_b48_weights_are_found_beside_the_model_from_anywhere(
    built: TensorRTResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # another working directory, and the folder has been moved
    moved = tmp_path / "moved ø"
    moved.mkdir()
    for name in ("model.onnx", "weights.safetensors"):
        (moved / name).write_bytes((built.engine.parent / name).read_bytes())
    again = build(moved / "model.onnx")
    assert again.layers == built.layers
    assert abs(again.size - built.size) < 10_000
    data = (moved / "weights.safetensors").read_bytes()
    (moved / "weights.safetensors").write_bytes(data[:-1])
    with pytest.raises(BuildError, match=r"stored in 'weights.safetensors' up to byte \d+, but"):
        build(moved / "model.onnx")
    (moved / "weights.safetensors").unlink()
    with pytest.raises(BuildError, match=r"missing from .*moved ø; export it again"):
        build(moved / "model.onnx")


def test_a_refused_node_is_named_with_its_source_line(tmp_path: Path) -> None:
    model = padded_graph()
    attention = next(node for node in model.graph.node if node.name == "layers_1_attention")
    attention.attribute.append(onnx.helper.make_attribute("softcap", 30.0))
    with pytest.raises(BuildError) as error:
        build(save(model, tmp_path))
    for part in (
        "refused node 'layers_1_attention' (Attention)",
        "at: modeling_toy.py:41 in forward: made Attention -> ONNX node 'layers_1_attention'",
        "has no logit soft cap\n  do: build this model for onnxruntime or inductor",
        f"log: {tmp_path / 'model.log'}",
    ):
        assert part in str(error.value)
    assert "layers_1_attention" in (tmp_path / "model.log").read_text(encoding="utf-8")
    assert not (tmp_path / "model.engine").exists()


def test_unknown_operators_and_wrong_shapes_are_named(tmp_path: Path) -> None:
    model = padded_graph()
    head = next(node for node in model.graph.node if node.name == "lm_head")
    head.op_type = "FancyMatMul"
    with pytest.raises(BuildError, match=r"(?s)'lm_head' \(FancyMatMul\).*neither standard ONNX"):
        build(save(model, tmp_path))
    head.op_type, head.domain = "MatMul", "com.example"  # the parser would take it for ONNX's own
    with pytest.raises(BuildError, match=r"'lm_head' \(MatMul\).*of domain 'com.example'"):
        build(save(model, tmp_path))
    model = padded_graph()
    next(node for node in model.graph.node if node.name == "lm_head").input[1] = "embed_tokens"
    said = r"(?s)'lm_head' \(MatMul\).*last dimension of input0 = 96"
    with pytest.raises(BuildError, match=said):
        build(save(model, tmp_path))


def test_an_input_that_tensorrt_ignores_ends_the_build(tmp_path: Path) -> None:
    model = padded_graph()
    ghost = onnx.helper.make_tensor_value_info("ghost", onnx.TensorProto.INT64, ["B"])
    model.graph.input.append(ghost)
    with pytest.raises(BuildError, match="TensorRT ignores input 'ghost', which no node reads"):
        build(save(model, tmp_path))


def test_an_attention_input_dropped_without_a_word_ends_the_build(tmp_path: Path) -> None:
    """Opset 24's nonpad_kv_seqlen is accepted by the parser and then not used."""
    model = padded_graph()
    model.opset_import[0].version = 24
    for node in model.graph.node:
        if node.op_type == "Attention":
            node.input.extend(["", "", "valid"])
    nodes = [onnx.helper.make_node("Add", ["past_lens", "one"], ["valid"], name="valid_lens")]
    nodes[0].metadata_props.add(key="pkg.torch.onnx.stack_trace", value=STACK.format("lens + 1"))
    for node in reversed(nodes):
        model.graph.node.insert(0, node)
    with pytest.raises(BuildError) as error:
        build(save(model, tmp_path))
    assert "ignores node 'valid_lens' (Add), from modeling_toy.py:41 in forward: lens + 1" in str(
        error.value
    )
    assert "read by node 'layers_0_attention' (Attention)" in str(error.value)


def test_attention_without_a_fused_kernel_is_an_error_unless_allowed(tmp_path: Path) -> None:
    path = save(padded_graph("float32"), tmp_path)
    with pytest.raises(BuildError, match=r"2 of 2 attention layers have no fused.*'layers_0_atten"):
        build(path, "float32")
    assert not (tmp_path / "model.engine").exists()
    result = build(path, "float32", allow_unfused_attention=True)
    # one query for each sequence has a fused kernel in float32 too
    assert [x["fused_attention"] for x in result.layers["profiles"]] == [0, LAYERS]
    with pytest.raises(BuildError, match="float16 and bfloat16 with head sizes that are multiples"):
        build(save(padded_graph(dim=8), tmp_path), dim=8)


def test_what_cannot_be_asked_for_is_refused(tmp_path: Path) -> None:
    path = save(padded_graph(), tmp_path)
    with pytest.raises(
        BuildError, match=r"compute capability 9.0: tensorrt-rtx builds for 7.5, 8.0"
    ):
        build(path, options=TensorRTOptions(("9.0",)))
    with pytest.raises(BuildError, match="none given"):
        build(path, options=TensorRTOptions(()))
    profile = {k: v for k, v in make_profiles(LIMITS, layout())[0].items() if k != "v_pool_1"}
    with pytest.raises(BuildError, match="its inputs and the profiles differ in v_pool_1"):
        build_tensorrt(
            path, tmp_path / "e", product="tensorrt-rtx", profiles=[profile]
        )  # fmt: skip
    path.write_bytes(b"no onnx")
    with pytest.raises(BuildError, match="not a readable ONNX model"):
        build(path)


def test_a_product_that_is_not_installed_is_named_with_its_extra(tmp_path: Path) -> None:
    if importlib.util.find_spec("tensorrt") is not None:
        pytest.skip("tensorrt is installed here")
    path = save(padded_graph(), tmp_path)
    with pytest.raises(BuildError, match=r"'tensorrt'.*pip install 'seekforge\[tensorrt\]'"):
        build(path, product="tensorrt", options=TensorRTOptions(()))


def test_progress_is_reported_and_an_interrupt_stops_the_build(tmp_path: Path) -> None:
    path = save(padded_graph(), tmp_path)
    seen = []

    def interrupt(phase: str, fraction: float) -> None:
        seen.append((phase, fraction))
        if phase == "Optimizing graph":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(path, progress=interrupt)
    assert not list(tmp_path.glob("*engine*"))
    assert all(0 < fraction <= 1 for _, fraction in seen)
    assert build(path).size > 0  # and the next build is not disturbed


def test_profiles_of_one_are_static(tmp_path: Path) -> None:
    limits = Limits(max_len=1, max_batch=1, max_chunk=1)
    path = save(padded_graph(), tmp_path)
    profiles = make_profiles(limits, layout())
    result = build_tensorrt(
        path,
        tmp_path / "e",
        product="tensorrt-rtx",
        profiles=profiles,
    )
    assert result.profiles[0]["token_ids"].min == result.profiles[0]["token_ids"].max == (1, 1)


def test_the_session_refuses_this_machine_in_one_clear_error(built: TensorRTResult) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(EngineError) as error:
        TensorRTSession(built.engine.parent, manifest_of(built))
    for part in ("model.engine: cannot be loaded", "for compute capability 8.9",
                 "this machine has no CUDA device", "--backend inductor"):  # fmt: skip
        assert part in str(error.value)


class StandInEngine:
    """`ICudaEngine` and its context as far as the session uses them; computes with ONNX Runtime
    from raw addresses and holds to the real engine's profile ranges."""

    def __init__(self, result: TensorRTResult, rename: dict[str, str] | None = None) -> None:
        path = result.engine.with_name("model.onnx")
        self.onnx = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        specs = (*result.inputs, *result.outputs)
        self.specs = {(rename or {}).get(spec.name, spec.name): spec for spec in specs}
        self.outputs = [spec.name for spec in result.outputs]
        self.profiles = result.profiles
        self.num_io_tensors = len(self.specs)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.used: list[int] = []

    def get_tensor_name(self, index: int) -> str:
        return list(self.specs)[index]

    def get_tensor_dtype(self, name: str) -> Any:
        return {"int64": trt.DataType.INT64, "float16": trt.DataType.HALF}[self.specs[name].dtype]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if not self.shapes:
            return (-1,) * len(self.specs[name].shape)
        sizes = {"N": self.shapes["logits_rows"][0]} | dict(
            zip("BS", self.shapes["token_ids"], strict=True)
        )
        return tuple(sizes[d] if isinstance(d, str) else d for d in self.specs[name].shape)

    def create_runtime_config(self) -> Any:
        cache = SimpleNamespace(serialize=lambda: b"kernels", deserialize=lambda _: True)
        return SimpleNamespace(create_runtime_cache=lambda: cache, set_runtime_cache=lambda _: True)

    def create_execution_context(self, config: Any) -> StandInEngine:
        return self

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self.profile = self.profiles[index]
        self.used.append(index)
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        return self.profile[name].admits(shape)

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        feeds = {n: self._view(n, shape).copy() for n, shape in self.shapes.items()}
        for name, value in zip(self.outputs, self.onnx.run(self.outputs, feeds), strict=True):
            self._view(name, value.shape)[...] = value
        return True

    def _view(self, name: str, shape: tuple[int, ...]) -> Any:
        dtype = np.dtype(self.specs[name].dtype)
        size = int(np.prod(shape)) * dtype.itemsize
        buffer = (ctypes.c_char * size).from_address(self.addresses[name])
        return np.frombuffer(memoryview(buffer), dtype).reshape(shape)


def test_the_stand_in_has_only_what_tensorrt_has() -> None:
    methods = {name for name in vars(StandInEngine) if not name.startswith("_")}
    real = {*dir(trt.ICudaEngine), *dir(trt.IExecutionContext)}
    assert methods <= real, methods - real


def test_the_session_binds_runs_and_scatters_like_one_long_prefill(built: TensorRTResult) -> None:
    engine = StandInEngine(built)
    session = TensorRTSession(built.engine.parent, manifest_of(built), engine=engine, device="cpu")
    session.allocate(num_blocks=12, block_size=BLOCK)
    a, b = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [8, 9, 7, 9, 3]
    table_a, table_b = [7, 2, 9], [4, 11]
    # a: prompt in chunks of 7 and 3, then a decode; b: prompt of 4, then a decode beside a's
    assert session.step([Chunk(a[:7], 0, table_a, [])]).shape == (0, VOCAB)
    first = session.step([Chunk(b[:4], 0, table_b, [3]), Chunk(a[7:10], 7, table_a, [0, 2])])
    last = session.step([Chunk(a[10:], 10, table_a, [0]), Chunk(b[4:], 4, table_b, [0])])
    assert engine.used == [0, 1]  # context for the chunks, generation for the two decodes
    got = torch.cat((first, last))

    fresh = StandInEngine(built)
    alone = TensorRTSession(built.engine.parent, manifest_of(built), engine=fresh, device="cpu")
    for tokens, rows in ((b, [3]), (a[:8], [7]), (a[:10], [9]), (a, [10]), (b, [4])):
        want = unpadded_logits(fresh.onnx, tokens)[rows[0]]
        error = (got[0] - want).abs().max() / want.abs().max()
        assert error < 5e-3, f"{tokens=} {rows=} {float(error)=}"
        got = got[1:]
    assert alone.profiles == list(built.profiles)


def unpadded_logits(session: onnxruntime.InferenceSession, tokens: list[int]) -> torch.Tensor:
    """All logits of one prompt without any past."""
    pool = np.zeros((1, BLOCK, KV_HEADS, DIM), np.float16)
    feeds = {
        "token_ids": np.array([tokens]), "positions": np.arange(len(tokens))[None],
        "block_tables": np.zeros((1, 1), np.int64), "past_lens": np.zeros(1, np.int64),
        "logits_rows": np.arange(len(tokens)),
    }  # fmt: skip
    feeds |= {f"{side}_pool_{i}": pool for i in range(LAYERS) for side in "kv"}
    return torch.from_numpy(session.run(["logits"], feeds)[0]).float()


def test_the_session_refuses_what_the_engine_cannot_take(built: TensorRTResult) -> None:
    folder, manifest = built.engine.parent, manifest_of(built)
    session = TensorRTSession(folder, manifest, engine=StandInEngine(built), device="cpu")
    with pytest.raises(EngineError, match="block size 16 was asked for, but this engine has 4"):
        session.allocate(8, 16)
    with pytest.raises(
        EngineError, match=r"0 KV blocks were asked for; this engine takes 1 to \d+"
    ):
        session.allocate(0, BLOCK)
    session.allocate(8, BLOCK)
    with pytest.raises(EngineError, match=r"token_ids \[1, 9\] is outside \[1, 1..8\]"):
        session.step([Chunk(list(range(9)), 0, [0, 1, 2], [8])])
    other = StandInEngine(built, rename={"past_lens": "context_lens"})
    with pytest.raises(
        EngineError, match="'context_lens' is int64 with 1 dimensions, the manifest"
    ):
        TensorRTSession(folder, manifest, engine=other, device="cpu")
