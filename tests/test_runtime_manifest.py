"""The manifest: round trip, every check of a damaged engine, and the choice within a bundle."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest

from seekforge.kernels.errors import EngineError
from seekforge.runtime.fit import resolve_engine
from seekforge.runtime.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    FileEntry,
    Generation,
    KVLayout,
    Limits,
    Manifest,
    TensorSpec,
    file_entries,
    hash_files,
    read_manifest,
    write_manifest,
)


def example(**overrides: object) -> Manifest:
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        seekforge_version="0.1.0",
        backend="inductor",
        backend_version="2.13.0",
        device="cpu",
        compute_capability=None,
        form="ragged",
        dtype="float32",
        model={"family": "llama", "vocab_size": 101},
        limits=Limits(max_len=32, max_batch=4, max_chunk=16),
        kv=KVLayout(2, 16, {"k": (1, 8), "v": (1, 8)}, "float32", True),
        inputs=(TensorSpec("token_ids", "int64", ("tokens",)),),
        outputs=(TensorSpec("logits", "float32", ("rows", 101)),),
        profiles=({"token_ids": {"min": [1, 1], "opt": [1, 8], "max": [1, 16]}},),
        generation=Generation((7, 9), None, None),
        quantization=None,
        passes=({"name": "rope", "fired": 2},),
        receipt={"max_error": 1e-5},
        steps=({"name": "export", "seconds": 1.5, "peak_bytes": 10},),
        layers=None,
        memory=None,
        files=(),
    )
    return dataclasses.replace(manifest, **overrides)  # type: ignore[arg-type]


def write_engine(directory: Path, **overrides: object) -> Path:
    directory.mkdir(parents=True)
    (directory / "model.pt2").write_bytes(b"package" * 100)
    (directory / "weights.safetensors").write_bytes(b"weights" * 100)
    write_manifest(directory, example(files=file_entries(directory), **overrides))
    return directory


def edit(directory: Path, **changes: object) -> None:
    path = directory / MANIFEST_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_round_trip(tmp_path: Path) -> None:
    engine = write_engine(tmp_path / "inductor")
    manifest = read_manifest(engine)
    assert manifest == example(files=file_entries(engine))
    assert [entry.path for entry in manifest.files] == ["model.pt2", "weights.safetensors"]
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.kv.token_bytes == 2 * 2 * 1 * 8 * 4


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    engine = write_engine(tmp_path / "inductor")
    good = read_manifest(engine)
    for name in ("model.pt2", "weights.safetensors", MANIFEST_NAME):
        path = engine / name
        content = path.read_bytes()
        for at in range(0, len(content), 11 if name == MANIFEST_NAME else 97):
            path.write_bytes(content[:at] + bytes([content[at] ^ 0x01]) + content[at + 1 :])
            try:
                found = read_manifest(engine)
            except EngineError as error:
                assert f"seekforge build CHECKPOINT -o {tmp_path} --backend inductor" in str(error)
            else:  # only in the manifest, and only in white space between its keys
                assert name == MANIFEST_NAME and found == good, f"{name=} {at=}"
        path.write_bytes(content)
    assert read_manifest(engine) == good


def test_each_damage_has_its_reason(tmp_path: Path) -> None:
    def refusal(name: str) -> str:
        with pytest.raises(EngineError) as caught:
            read_manifest(tmp_path / name)
        assert caught.value.exit_code == 2
        return str(caught.value)

    assert "is no engine" in refusal("absent")

    edit(write_engine(tmp_path / "version"), format_version=FORMAT_VERSION + 1, later_key=True)
    newer = f"format version {FORMAT_VERSION + 1}; this seekforge reads {FORMAT_VERSION}"
    assert newer in refusal("version")
    edit(write_engine(tmp_path / "unknown"), surprise=1)
    assert "unknown key 'surprise'" in refusal("unknown")
    path = write_engine(tmp_path / "missing") / MANIFEST_NAME
    path.write_text(
        json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "kv"})
    )
    assert "key 'kv' is missing" in refusal("missing")
    edit(write_engine(tmp_path / "type"), limits={"max_len": "32", "max_batch": 4, "max_chunk": 16})
    assert "key 'limits.max_len': int was expected, not '32'" in refusal("type")
    edit(
        write_engine(tmp_path / "edited"),
        generation=dataclasses.asdict(Generation((3,), None, None)),
    )
    assert "'sha256'" in refusal("edited")
    (write_engine(tmp_path / "json") / MANIFEST_NAME).write_text('{"format_version": 1,')
    assert "not JSON" in refusal("json")
    (write_engine(tmp_path / "binary") / MANIFEST_NAME).write_bytes(b"\xff\xfe{}")
    assert "cannot be read" in refusal("binary")

    (write_engine(tmp_path / "gone") / "model.pt2").unlink()
    assert "model.pt2: listed in manifest.json but missing" in refusal("gone")
    (write_engine(tmp_path / "cut") / "weights.safetensors").write_bytes(b"weights" * 99)
    assert "weights.safetensors: 693 bytes, manifest.json says 700" in refusal("cut")
    (write_engine(tmp_path / "same_size") / "model.pt2").write_bytes(b"Package" * 100)
    assert "model.pt2: sha256" in refusal("same_size")


def test_large_files_are_hashed_by_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of one piece has its plain sha256; in others every byte and every length counts."""
    monkeypatch.setattr("seekforge.runtime.manifest.HASH_PIECE", 1000)
    contents = [b"", b"x" * 1000, b"x" * 1001, b"x" * 2000, b"x" * 1999 + b"y", b"y" + b"x" * 1999]
    paths = [tmp_path / str(i) for i in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    digests = hash_files(paths)
    assert digests[:2] == [hashlib.sha256(content).hexdigest() for content in contents[:2]]
    pieces = [hashlib.sha256(piece).digest() for piece in (b"x" * 1000, b"x")]
    assert digests[2] == hashlib.sha256(b"".join(pieces)).hexdigest()
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", ""])
def test_listed_paths_stay_inside(path: str) -> None:
    with pytest.raises(EngineError, match="leaves the engine directory"):
        FileEntry(path, "00", 1)


@pytest.mark.parametrize(
    "change",
    [{"backend": "tvm"}, {"device": "tpu"}, {"form": "dense"}, {"dtype": "int8"}, {"model": {}}],
)
def test_values_are_checked(change: dict[str, object]) -> None:
    with pytest.raises(EngineError, match=next(iter(change))):
        example(**change)


def test_bundle_gives_the_first_engine_that_runs_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(EngineError, match="no such engine directory"):
        resolve_engine(tmp_path / "absent")
    with pytest.raises(EngineError, match="is no engine"):
        resolve_engine(tmp_path)
    write_engine(tmp_path / "inductor", device="cuda", compute_capability="9.0")
    with pytest.raises(EngineError, match=r"no engine of this bundle can run here .*sees none"):
        resolve_engine(tmp_path)
    write_engine(tmp_path / "onnxruntime", backend="onnxruntime", form="padded")
    assert resolve_engine(tmp_path) == tmp_path / "onnxruntime"
    # Named directly it is not resolved further; what does not fit is said when it is opened.
    assert resolve_engine(tmp_path / "inductor") == tmp_path / "inductor"


def test_another_gpu_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    write_engine(tmp_path / "inductor", device="cuda", compute_capability="8.9")
    with pytest.raises(EngineError, match=r"compute capability 8\.9 and this GPU has 9\.0"):
        resolve_engine(tmp_path)
