"""`seekforge inspect` of configurations: sizes, fusions and what is left, without weights."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest

from seekforge.compile.cli import main
from seekforge.compile.inspect import describe
from seekforge.kernels.errors import CheckpointError, InputError

Checkpoint = Callable[..., Path]
CONFIGS = Path(__file__).parent / "configs"


def only_config(folder: Path, target: Path) -> Path:
    copyfile(folder / "config.json", target / "config.json")
    return target


def fusions(graph: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The passes of which a number of matches is expected."""
    return {p["name"]: p for p in graph["passes"] if p["expected"] is not None}


def test_configuration_without_weights(
    tiny_checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = only_config(tiny_checkpoint("llama", num_hidden_layers=4), tmp_path)
    assert main(["inspect", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["config"]
    assert found["num_layers"] == 4
    graph = found["graph"]
    assert graph["kv_token_bytes"] == 4 * 2 * (2 * 8 + 2 * 8)  # layers, bf16, K and V of 2 heads
    table = 2 * 256 * 4 * 4  # cos and sin for 256 positions and half of head_dim 8, fp32
    assert graph["weight_bytes"] == {"bfloat16": 2 * found["parameters"], "float32": table}
    assert all(f["expected"] == f["fired"] for f in fusions(graph).values())
    assert fusions(graph)["swiglu"]["expected"] == 4
    assert [run["layers"] for run in graph["layers"]] == ["0", "1-3", "outside"]
    first, others, outside = (run["operators"] for run in graph["layers"])
    assert (first["rms_norm"], first["add_rms_norm"], first["aten.linear"]) == (1, 1, 4)
    assert (others["add_rms_norm"], others["paged_attention"], others["swiglu"]) == (2, 1, 1)
    assert (outside["aten.embedding"], outside["aten.linear"]) == (1, 1)
    assert sum(others.values()) == graph["layers"][1]["compute"] <= 10
    assert "aten.view" in graph["layers"][1]["views"]
    assert [step["name"] for step in graph["steps"]] == ["export", "passes"]


def test_a_tied_table_is_counted_once(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = only_config(tiny_checkpoint("qwen2", tie_word_embeddings=True), tmp_path)
    found = describe(path / "config.json")["config"]
    assert found["graph"]["weight_bytes"]["bfloat16"] == 2 * found["parameters"]


def test_checkpoint_with_weights(
    tiny_checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_checkpoint("llama", num_hidden_layers=4)
    found = describe(path)["checkpoint"]
    assert "graph" not in found
    assert found["weight_bytes_by_dtype"] == {"F32": 4 * found["parameters"]}
    assert main(["inspect", str(path), "--graph"]) == 0
    text = capsys.readouterr().out
    assert "256 bytes a token in bfloat16" in text and "TOO FEW" not in text
    assert "  1-3 " in text and "add_rms_norm 2" in text


def test_what_cannot_be_inspected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nor a config\.json"):
        describe(tmp_path)
    with pytest.raises(InputError, match=r"nor a config\.json"):
        describe(tmp_path / "config.json")
    content = json.loads((CONFIGS / "deepseek-v3.json").read_text())
    file = tmp_path / "config.json"
    file.write_text(json.dumps(content | {"model_type": "deepseek_v32"}))
    with pytest.raises(CheckpointError, match=r"'deepseek_v32'.*indexer"):
        describe(file)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    file.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="no readable weight_map"):  # not taken for a bare one
        describe(tmp_path)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("deepseek_v3", {"num_hidden_layers": 4, "first_k_dense_replace": 0}),
        ("deepseek_v3", {"num_hidden_layers": 4, "first_k_dense_replace": 3, "q_lora_rank": None}),
        ("deepseek_v3", {"first_k_dense_replace": 2, "rope_interleave": False}),  # no experts
        ("deepseek_v2", {"n_group": None, "topk_group": None}),
        ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),
        ("deepseek_v2", {"q_lora_rank": 24, "first_k_dense_replace": 0}),
        ("qwen3_moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]}),
    ],
)
def test_fusions_found_are_those_expected(
    tiny_checkpoint: Checkpoint, family: str, overrides: dict[str, Any]
) -> None:
    """B21: no count of dense layers or kind of projection is taken for granted."""
    path = tiny_checkpoint(family, **overrides)
    found = fusions(describe(path / "config.json")["config"]["graph"])
    assert {k: f["fired"] for k, f in found.items()} == {
        k: f["expected"] for k, f in found.items()
    }, found
    assert ("moe" in found) == (overrides.get("first_k_dense_replace") != 2)


def check_published(name: str, expected: dict[str, Any], counts: dict[str, int]) -> None:
    # A process of its own: peak memory is that of the process since it began.
    command = [sys.executable, "-m", "seekforge.compile.cli", "inspect", "--json"]
    done = subprocess.run([*command, str(CONFIGS / name)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["config"]
    graph = found["graph"]
    assert {key: found[key] for key in expected} == expected
    weights = graph["weight_bytes"]
    router = found["num_moe_layers"] * found["num_experts"] * found["hidden_size"]
    assert weights["bfloat16"] == 2 * (found["parameters"] - router)
    assert graph["kv_token_bytes"] == found["num_layers"] * 1152  # bf16: 2 * (512 + 64)
    found_counts = {fusion: f["fired"] for fusion, f in fusions(graph).items()}
    assert found_counts == counts
    assert found_counts == {fusion: f["expected"] for fusion, f in fusions(graph).items()}
    for run in graph["layers"][:-1]:
        assert run["compute"] <= 20, run
        assert run["operators"]["paged_mla_attention"] == 1
    assert max(step["peak_bytes"] for step in graph["steps"]) <= 2 * 2**30


@pytest.mark.slow
def test_deepseek_v2_lite() -> None:
    check_published(
        "deepseek-v2-lite.json",
        {"parameters": 15_706_484_224, "num_layers": 27, "num_moe_layers": 26, "head_dim": 192},
        {
            "rms_norm": 3 * 27 + 1, "add_rms_norm": 54, "rope": 27, "qkv": 27, "mla": 27,
            "kv_cache": 27, "swiglu": 27, "moe": 26, "logits_rows": 1,
        },
    )  # fmt: skip


@pytest.mark.slow
def test_deepseek_v3() -> None:
    """The published configuration of V3 and R1, with its FP8 entry."""
    check_published(
        "deepseek-v3.json",
        {"parameters": 671_026_404_352, "num_moe_layers": 58, "q_lora_rank": 1536},
        {
            "rms_norm": 4 * 61 + 1, "add_rms_norm": 122, "rope": 61, "qkv": 61, "mla": 61,
            "kv_cache": 61, "swiglu": 61, "moe": 58, "logits_rows": 1,
        },
    )  # fmt: skip
