"""report.html: what it says is what the manifest says, whatever the names; its data stays small."""

from __future__ import annotations

import dataclasses
import json
import re
import zipfile
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from seekforge.compile.build import Options, build
from seekforge.compile.cli import main
from seekforge.compile.report import REPORT_NAME, page, rewrite_report, write_report
from seekforge.compile.report_accuracy import judgement
from seekforge.compile.report_graphs import Lowered, Recorder
from seekforge.compile.report_links import links
from seekforge.compile.report_lowered import inductor_items, onnx_items, tensorrt_items
from seekforge.compile.report_nodes import ShownNode, source_of
from seekforge.compile.steps import Steps
from seekforge.kernels.errors import EngineError
from seekforge.passes.pipeline import run_pipeline
from seekforge.passes.program import Program
from seekforge.runtime.manifest import Manifest, file_entries, read_manifest

Engine = Callable[..., Path]
Exported = Callable[..., tuple[Program, Any]]
HOSTILE = '</script><b onclick="x">&amp;\'"'


class Reader(HTMLParser):
    """Tables by their label, as rows of cells; the JSON; names of elements; links and sources."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.elements: list[str] = []
        self.outside: list[str] = []
        self.graphs: Any = None
        self.text = ""
        self._rows: list[list[str]] | None = None
        self._cell = False
        self._json = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.elements.append(tag)
        self.outside += [v or "" for k, v in attrs if k in ("src", "href", "srcset", "data")]
        if tag == "table":
            self._rows = self.tables.setdefault(values["aria-label"] or "", [])
        elif tag == "tr" and self._rows is not None:
            self._rows.append([])
        elif tag in ("td", "th") and self._rows is not None:
            self._rows[-1].append("")
            self._cell = True
        self._json = tag == "script" and values.get("id") == "graphs"

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._cell = False
        elif tag == "table":
            self._rows = None

    def handle_data(self, data: str) -> None:
        if self._json:
            self.graphs = json.loads(data)
        elif self._cell and self._rows is not None:
            self._rows[-1][-1] += data
        self.text += data


def read(folder: Path) -> tuple[Reader, Manifest]:
    text = (folder / REPORT_NAME).read_text(encoding="utf-8")
    return Reader(text), read_manifest(folder, check_files=False)


def check(folder: Path) -> Reader:
    """What every page has to hold."""
    page, manifest = read(folder)
    rows = {row[0]: row for row in page.tables["Passes in the order they ran"][1:]}
    assert list(rows) == [passed["name"] for passed in manifest.passes]
    for passed in manifest.passes:
        expected = "–" if passed["expected"] is None else str(passed["expected"])
        numbers = [expected, str(passed["fired"]), f"{passed['nodes_before']:,}",
                   f"{passed['nodes_after']:,}"]  # fmt: skip
        assert rows[passed["name"]][1:5] == numbers
        assert rows[passed["name"]][6] == f"{passed['seconds'] * 1e3:,.1f}"
        assert all(miss["reason"] in page.text for miss in passed["misses"][:1])
    receipt = dict(page.tables["Accuracy receipt"][1:])
    assert manifest.receipt is not None
    assert receipt["largest logit error"] == f"{manifest.receipt['max_error']:.2e}"
    assert receipt["greedy tokens equal"] == f"{manifest.receipt['tokens']:.2%}"
    steps = page.tables["Steps of the build"][1:]
    assert [row[:2] for row in steps] == [
        [step["name"], f"{step['seconds']:,.2f}"] for step in manifest.steps
    ]
    limits = dict(page.tables["Limits"][1:])
    assert limits["tokens of a sequence"] == f"{manifest.limits.max_len:,}"
    assert limits["bytes of cache a token"] == f"{manifest.kv.token_bytes:,}"
    files = [
        (row[0], int(row[1].replace(",", ""))) for row in page.tables["Files of the engine"][1:]
    ]
    assert files == [(entry.path, entry.size) for entry in manifest.files]
    assert all(link.startswith("#") for link in page.outside), page.outside
    steps_of = [[step["name"] for step in kind["steps"]] for kind in page.graphs["kinds"]]
    names = [p["name"] for p in manifest.passes if p["name"] != "logits_rows"]  # one step there
    assert all(found == ["exported", *names] for found in steps_of)
    # Every layer once, and what belongs to none.
    counts = [kind["count"] for kind in page.graphs["kinds"]]
    assert sum(counts) == manifest.model["num_layers"] + 1
    return page


def nodes_after(graphs: dict[str, Any], kind: dict[str, Any], name: str) -> list[list[Any]]:
    nodes: list[int] = []
    for step in kind["steps"]:
        nodes = step.get("nodes", nodes)
        if step["name"] == name:
            return [graphs["nodes"][at] for at in nodes]
    raise AssertionError(name)


def test_dense_engine(tiny_engine: Engine) -> None:
    engine = tiny_engine("llama", "onnxruntime")
    graphs = check(engine).graphs
    for kind in graphs["kinds"][:-1]:
        before = [node[1] for node in nodes_after(graphs, kind, "normalise")]
        after = [node[1] for node in nodes_after(graphs, kind, "rms_norm")]
        assert (before.count("aten.rsqrt"), after.count("aten.rsqrt")) == (2, 0)
        assert after.count("rms_norm") == 2
        (lowered,) = kind["lowered"]
        assert lowered["title"] == "ONNX nodes"
        assert [what for _, what in lowered["items"]].count("Attention") == 1
        (attention,) = [
            (at, to) for at, to in lowered["links"] if lowered["items"][to][1] == "Attention"
        ]
        final = nodes_after(graphs, kind, "final cleanup")
        assert final[attention[0]][1] == "gathered_attention"
    node = nodes_after(graphs, graphs["kinds"][0], "rms_norm")[0]
    source = graphs["sources"][node[5]]
    assert node[1] == "rms_norm" and node[3] == "[batch, seq, 32] fp32"
    assert node[4] == "input_layernorm" and source[0].startswith("llama/modeling_llama.py:")
    assert "self.weight" in source[2]
    (last,) = [
        n for n in nodes_after(graphs, graphs["kinds"][1], "final cleanup") if n[1] == "swiglu"
    ]
    assert last[3] == "[batch·seq, 56] fp32"


def test_mixture_of_experts_and_latent_attention(tiny_engine: Engine) -> None:
    graphs = check(tiny_engine("deepseek_v3", "onnxruntime")).graphs
    dense, mixture = (kind for kind in graphs["kinds"] if kind["layers"])
    assert (dense["layers"], mixture["layers"]) == ("0", "1")
    operators = {node[1] for node in nodes_after(graphs, mixture, "final cleanup")}
    assert {"gathered_mla_attention", "moe_route", "moe_experts"} <= operators
    (mla,) = [step for step in mixture["steps"] if step["name"] == "mla"]
    became = {nodes_after(graphs, mixture, "mla")[to][1] for _, to in mla["links"]}
    assert "mla_attention" in became


def test_awq_engine(tiny_checkpoint: Engine, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the capital of France is Paris and one then another " * 30)
    options = Options(
        backends=("onnxruntime",), quant="awq-int4", calib=text, max_len=128, dtype="float32"
    )
    (engine,) = build(tiny_checkpoint("qwen3_moe"), tmp_path / "out", options)
    page, (_, manifest) = check(engine), read(engine)
    assert manifest.quantization is not None
    calibration = manifest.quantization["calibration"]
    rows = page.tables["Scale groups"][1:]
    assert [row[2:] for row in rows] == [
        [f"{g['rtn_error']:.2e}", f"{g['error']:.2e}", f"{g['error'] / (g['rtn_error'] or 1):.2f}",
         f"{g['ratio']:.2f}", f"{g['clipped']:.1%}"]
        for g in calibration["groups"]
    ]  # fmt: skip
    int4 = dict(page.tables["INT4"][1:])
    assert int4["mean output error, plain rounding"] == f"{calibration['rtn_error']:.3e}"
    experts = page.tables["An expert that saw none is rounded as it is"][1:]
    assert len(experts) == len(calibration["expert_tokens"]) == 2
    counts = calibration["expert_tokens"]["0"]
    assert experts[0][2] == f"{min(counts):,}" and experts[0][4] == f"{max(counts):,}"
    titles = re.findall(r"layer (\d+), expert (\d+): ([\d,]+) tokens", page.text)
    assert len(titles) == sum(map(len, calibration["expert_tokens"].values()))
    assert ("0", "0", f"{counts[0]:,}") in titles
    roles = {re.sub(r"\.weight$", "", group["producer"]) for group in calibration["groups"]}
    assert page.elements.count("figure") == len(roles) + 1
    (kind, *_) = page.graphs["kinds"]
    final = {node[1] for node in nodes_after(page.graphs, kind, "final cleanup")}
    assert "int4_linear" in final


def recorded(exported: Exported, family: str, form: str, **config: Any) -> tuple[Recorder, Program]:
    program, module = exported(family, **config)
    recorder = Recorder(module.config.num_hidden_layers)
    run_pipeline(program, form, 64, None, observe=recorder.observe)
    return recorder, program


def test_data_does_not_grow_with_depth(exported: Exported) -> None:
    few, many = (
        recorded(exported, "llama", "ragged", num_hidden_layers=layers)[0].data()
        for layers in (4, 12)
    )
    assert [kind["layers"] for kind in many["kinds"]] == ["0", "1-10", "11", ""]
    assert [kind["count"] for kind in many["kinds"]] == [1, 10, 1, 1]
    assert len(json.dumps(many)) < 1.05 * len(json.dumps(few))


def test_a_layer_that_went_another_way_is_shown_apart(exported: Exported) -> None:
    config = {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    data = recorded(exported, "qwen3_moe", "ragged", **config)[0].data()
    kinds = {kind["layers"]: kind for kind in data["kinds"]}
    assert list(kinds) == ["0", "1", "2-4", "5", ""]
    experts = [
        label for label, kind in kinds.items()
        if any(n[1] == "moe_experts" for n in nodes_after(data, kind, "final cleanup"))
    ]  # fmt: skip
    assert experts == ["1", "5"]


def node(name: str, *refs: str, operator: str = "f") -> ShownNode:
    return ShownNode(name, operator, "", refs, "", "", None)


def test_lines_between_graphs() -> None:
    before = [node("a"), node("b", "a"), node("c", "b"), node("keep", "c"), node("dead", "a")]
    after = [node("a"), node("new", "a"), node("keep", "new")]
    assert links(before, after) == [("b", "new"), ("c", "new")]  # nothing took the place of dead


def test_lines_of_a_node_whose_readers_all_stay() -> None:
    """A no-op is gone: its readers read what it read."""
    before = [node("a"), node("noop", "a"), node("x", "noop"), node("y", "noop", "a")]
    after = [node("a"), node("x", "a"), node("y", "a")]
    assert links(before, after) == [("noop", "a")]


def test_lines_do_not_run_along_the_residual_stream() -> None:
    """Each sum is read by a norm and the next sum, and all are gone: the norm beside it counts."""
    before = [node("x0")]
    after = [node("x0")]
    for i in range(1, 4):
        before += [node(f"sum{i}", f"sum{i - 1}" if i > 1 else "x0"), node(f"norm{i}", f"sum{i}"),
                   node(f"out{i}", f"norm{i}")]  # fmt: skip
        after += [node(f"both{i}", f"both{i - 1}" if i > 1 else "x0"), node(f"out{i}", f"both{i}")]
    found = links(before, after)
    assert found == [(f"{what}{i}", f"both{i}") for i in range(1, 4) for what in ("sum", "norm")]


def test_source_lines() -> None:
    ours = 'File "/x/llama/modeling_llama.py", line 7, in forward\n    y = self.f(x)\n'
    torch = 'File "/x/site-packages/torch/nn/linear.py", line 9, in forward\n    return g(x)\n'
    found = source_of(ours + torch.replace("/x/site-packages/torch", str(_torch())))
    assert found == ("llama/modeling_llama.py:7", "forward", "y = self.f(x)")
    assert source_of("") is None


def _torch() -> Path:
    import torch

    return Path(torch.__file__).parent


@pytest.fixture
def hostile(tiny_engine: Engine, exported: Exported) -> tuple[Manifest, Recorder]:
    """A manifest and graphs whose every name is an attempt to break out of the page."""
    manifest = read_manifest(tiny_engine("llama", "onnxruntime"), check_files=False)
    passes = tuple(
        dict(p) | {"misses": [{"node": HOSTILE, "source": HOSTILE, "reason": HOSTILE, "depth": 1}]}
        for p in manifest.passes
    )
    manifest = dataclasses.replace(
        manifest, passes=passes, model=manifest.model | {"checkpoint": f"/x/{HOSTILE}"},
        receipt=(manifest.receipt or {}) | {HOSTILE: HOSTILE},
    )  # fmt: skip
    recorder, _ = recorded(exported, "llama", "padded")
    name, layers = recorder.steps[0]
    bad = dataclasses.replace(layers[0][0], name=HOSTILE, operator=HOSTILE, args=HOSTILE)
    recorder.steps[0] = (name, [[bad, *layers[0][1:]], *layers[1:]])
    recorder.lowered = [(HOSTILE, [Lowered(HOSTILE, HOSTILE, (), 0)])]
    return manifest, recorder


def test_hostile_names_are_text(hostile: tuple[Manifest, Recorder]) -> None:
    manifest, recorder = hostile
    text = page(manifest, recorder.data(), [])
    found = Reader(text)
    assert found.elements.count("script") == 2 and "<b onclick" not in text
    assert found.elements.count("b") == len(manifest.passes)  # names of passes with near-misses
    assert found.graphs == recorder.data()
    assert found.graphs["nodes"][0][0] == HOSTILE and found.text.count(HOSTILE) > 4


def test_page_is_documentation(tiny_engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    """It is not listed, so the engine loads without it; it can be written again."""
    engine = tiny_engine("qwen3", "onnxruntime")
    path = engine / REPORT_NAME
    before = path.read_text()
    assert REPORT_NAME not in {entry.path for entry in read_manifest(engine).files}
    assert main(["report", str(engine)]) == 0
    assert capsys.readouterr().out.strip() == str(path) and path.read_text() == before
    path.unlink()
    read_manifest(engine)
    rewrite_report(engine)
    assert "no record of its graphs" in Reader(path.read_text()).text
    path.write_text(before)
    with pytest.raises(EngineError, match=r"manifest\.json"):
        rewrite_report(engine.parent / "nothing")


def test_a_fault_of_the_page_loses_no_engine(
    tiny_engine: Engine, exported: Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder, program = recorded(exported, "llama", "padded")
    write_report(tmp_path, recorder, program, Steps("x").console)
    assert "no report.html: EngineError" in capsys.readouterr().err
    assert not (tmp_path / REPORT_NAME).exists()


def test_verdicts(tiny_engine: Engine) -> None:
    manifest = read_manifest(tiny_engine("llama", "onnxruntime"), check_files=False)
    assert manifest.receipt is not None
    # Other tests may have compared the engine, with other checkpoints too.
    receipt = {key: value for key, value in manifest.receipt.items() if key != "compared"}
    manifest = dataclasses.replace(manifest, receipt=receipt)

    def word(**changes: Any) -> str:
        return judgement(dataclasses.replace(manifest, **changes))[1]

    assert word() == "Verified"
    assert word(receipt={"executed": False, "reason": "no GPU"}) == "Not executed"
    assert word(receipt=receipt | {"passed": False}) == "Failed"
    few = tuple(p | {"fired": 0} for p in manifest.passes)
    assert word(passes=few) == "Incomplete"
    compared = receipt | {"when": "2026-01-02", "passed": False, "limit": None}
    later = dataclasses.replace(manifest, receipt=receipt | {"compared": compared})
    assert judgement(later)[1] == "Failed"
    found = Reader(page(later, {}, [])).tables
    assert dict(found["Last comparison, 2026-01-02"])["same first choice"] == "100.00%"


def test_onnx_nodes_outside_the_standard(op_onnx: Callable[..., Path]) -> None:
    import onnx
    from onnx import helper

    node = helper.make_node("MatMulNBits", ["x"], ["y"], name="n", domain="com.microsoft")
    model = helper.make_model(helper.make_graph([node], "g", [], []))
    assert isinstance(model, onnx.ModelProto)
    assert onnx_items(model) == [Lowered("n", "com.microsoft.MatMulNBits", ())]


CODE = """
void cpp_fused_silu_3(const float*);
void AOTInductorModel::run_impl(
    cpp_fused_add_mean_2((const float*)(model_layers_0_input_layernorm_weight.data_ptr()));
    // Topologically Sorted Source Nodes: [pow_1, linear], Original ATen: [aten.pow, aten.mm]
    CHECK(aoti_torch_cpu_mm_out(buf1, wrap(model_layers_0_self_attn_qkv_proj_weight, 2)));
    cpp_fused_index_1((const float*)(rope_cos.data_ptr()));
    // Topologically Sorted Source Nodes: [squeeze, paged_attention], Original ATen: [aten.squeeze, seekforge.paged_attention]
    CHECK(aoti_torch_proxy_executor_call_function(proxy_executor, 0, 0));
    // Topologically Sorted Source Nodes: [linear_1], Original ATen: [aten.t, aten.add]
    CHECK(aoti_torch_cpu_addmm_out(buf2, wrap(model_layers_0_self_attn_o_proj_weight, 2)));
    cpp_fused_mul_silu_3((const float*)(buf17.data_ptr()));
    CHECK(aoti_torch_empty_strided(2, int_array_5, int_array_6));
"""  # noqa: E501


def test_inductors_code(exported: Exported, tmp_path: Path) -> None:
    _, program = recorded(exported, "llama", "ragged", num_hidden_layers=1)
    package = tmp_path / "model.pt2"
    with zipfile.ZipFile(package, "w") as archive:
        archive.writestr("model/data/aotinductor/model/c.wrapper.cpp", CODE)
    operators = {n.name: str(n.target) for n in program.graph.nodes}
    found = [
        (item.name, item.kind, [operators[name].split(".")[1] for name in item.made_from])
        for item in inductor_items(package, program)
    ]
    assert found == [
        ("cpp_fused_add_mean_2", "loop", ["rms_norm"]),
        ("mm_out", "library call", ["linear"]),
        ("cpp_fused_index_1", "loop", ["rope"]),
        ("seekforge.paged_attention", "operator call", ["paged_attention"]),
        ("addmm_out", "library call", ["linear"]),
        ("cpp_fused_mul_silu_3", "loop", ["swiglu"]),
    ]
    assert {item.layer for item in inductor_items(package, program)} == {0}


def test_tensorrts_kernels(exported: Exported) -> None:
    _, program = recorded(exported, "llama", "padded")
    table = {
        "nodes": [
            {"onnx": "a", "operator": "swiglu", "layer": "model.layers.1.mlp", "source": None},
            {"onnx": "b", "operator": None, "layer": None, "source": None},
        ],
        "profiles": [
            {"kernels": [{"name": "k", "kind": "kgen", "nodes": [0, 1]}]},
            {"kernels": [{"name": "j", "kind": "gemm", "nodes": []}]},
        ],
    }
    (first, (item,)), (second, (other,)) = tensorrt_items(table, program)
    assert (first, second) == ("TensorRT kernels, profile 0", "TensorRT kernels, profile 1")
    (made,) = item.made_from
    (swiglu,) = [n for n in program.graph.nodes if n.name == made]
    assert "swiglu" in str(swiglu.target) and "layers.1." in str(swiglu.meta["nn_module_stack"])
    assert other == Lowered("j", "gemm", ())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["inductor", "tensorrt-rtx"])
def test_backends_things_are_tied_to_the_graph(tiny_engine: Engine, backend: str) -> None:
    """Every layer's attention and each of its products has something of the backend's."""
    dtype = "float32" if backend == "inductor" else "float16"
    engine = tiny_engine("llama", backend, dtype=dtype, head_dim=16)  # TensorRT wants multiples
    found, _ = read(engine)
    for kind in found.graphs["kinds"][:-1]:
        final = nodes_after(found.graphs, kind, "final cleanup")
        for lowered in kind["lowered"]:
            tied = [final[at][1] for at, _ in lowered["links"]]
            attention = [name for name in tied if "attention" in name]
            assert attention and tied.count("aten.linear") >= 4, (lowered["title"], tied)


def test_nothing_of_it_is_in_the_list_of_files(tiny_engine: Engine) -> None:
    engine = tiny_engine("llama", "onnxruntime")
    listed = {entry.path for entry in read_manifest(engine).files}
    assert {entry.path for entry in file_entries(engine)} - listed == {REPORT_NAME}
