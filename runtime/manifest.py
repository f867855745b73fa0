"""The engine directory's manifest: what an engine is, and what is checked before it is loaded.

`compile` writes it last, `runtime` reads it first. In: a directory. Out: a `Manifest`, or one
`EngineError` that says what is wrong and which command repairs it. It knows nothing about how a
backend runs its files.

The file is JSON with one key for each field of `Manifest` and `sha256`, the digest of all the
other keys: a flipped byte in the manifest is found like one in the weights.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from seekforge.kernels.errors import EngineError
from seekforge.runtime.schema import decode
from seekforge.runtime.tensorrt_cache import CACHE_NAME

FORMAT_VERSION = 3
MANIFEST_NAME = "manifest.json"
# Backend -> (module it imports, pip extra that brings it), in a bundle's order of preference.
BACKENDS = {
    "inductor": ("torch", ""),
    "onnxruntime": ("onnxruntime", ""),
    "tensorrt": ("tensorrt", "tensorrt"),
    "tensorrt-rtx": ("tensorrt_rtx", ""),
}
# Larger files are hashed by pieces of this size, side by side: one thread reads some 1.5 GB/s, and
# a 7B model's weights are 15 GB.
HASH_PIECE = 64 << 20
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest step: tokens per sequence, sequences per step, prefill tokens per step."""

    max_len: int
    max_batch: int
    max_chunk: int

    def __post_init__(self) -> None:
        _positive(self, "max_len", "max_batch", "max_chunk")


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The paged cache: each layer's pools, `[blocks, block_size, *shape]` for each of `pools`.

    pools: {"k": (kv_heads, head_dim), "v": (kv_heads, v_head_dim)}, or for multi-head latent
    attention {"latent": (kv_lora_rank + qk_rope_head_dim,)}.
    """

    num_layers: int
    block_size: int
    pools: dict[str, tuple[int, ...]]
    dtype: str
    dynamic_block_size: bool

    def __post_init__(self) -> None:
        _positive(self, "num_layers", "block_size")
        _one_of(self, "dtype", DTYPE_BYTES)
        if not self.pools or any(size < 1 for shape in self.pools.values() for size in shape):
            raise EngineError(f"pools is {self.pools}; a shape of sizes >= 1 for each was expected")

    @property
    def names(self) -> list[str]:
        """Names of all pools in the order of the graph's inputs: k_pool_0, v_pool_0, k_pool_1 …"""
        return [f"{kind}_pool_{layer}" for layer in range(self.num_layers) for kind in self.pools]

    @property
    def token_bytes(self) -> int:
        """Bytes of cache one token takes in all layers."""
        elements = sum(math.prod(shape) for shape in self.pools.values())
        return self.num_layers * elements * DTYPE_BYTES[self.dtype]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape behind [blocks, block_size] of the pool `name`."""
        return self.pools[name.partition("_pool_")[0]]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A graph input or output; a dimension is a size or the name of a dynamic one."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of the engine: path relative to its directory, sha256 in hex (by pieces, see
    `hash_files`), size in bytes."""

    path: str
    sha256: str
    size: int

    def __post_init__(self) -> None:
        path = PurePosixPath(self.path)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise EngineError(f"files: path {self.path!r} leaves the engine directory")


@dataclass(frozen=True, slots=True)
class Generation:
    """Special tokens of the checkpoint: generation stops at any of `eos_token_ids`."""

    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything known about one engine (one backend) without opening its files.

    `profiles`: one mapping for each optimisation profile, input name -> {"min": [2, 1], "opt": …,
    "max": …}. `steps`: the build's {"name", "seconds", "peak_bytes"}. `passes`, `receipt` and
    `layers` are reports; `memory` has the bytes that steps take on a GPU (compile/liveness.py),
    `predicted` what the build was expected to take (compile/check_costs.py), `built_from` what
    decided the engine (compile/build_cache_request.py), `proof` on what the passes' errors were
    found (compile/verify_level.py). `compute_capability`:
    "8.9", or several with commas. `tensorrt`: {"plan": digest of what the plan was built from,
    "stripped": whether the weights lie beside it, "streaming_bytes": weights that stay on the GPU
    or None}.
    """

    format_version: int
    seekforge_version: str
    backend: str
    backend_version: str
    device: str
    compute_capability: str | None
    form: str
    dtype: str
    model: dict[str, Any]
    limits: Limits
    kv: KVLayout
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    profiles: tuple[dict[str, Any], ...]
    generation: Generation
    quantization: dict[str, Any] | None
    passes: tuple[dict[str, Any], ...]
    receipt: dict[str, Any] | None
    steps: tuple[dict[str, Any], ...]
    layers: dict[str, Any] | None
    memory: dict[str, Any] | None
    files: tuple[FileEntry, ...]
    predicted: dict[str, Any] | None = None
    built_from: dict[str, Any] | None = None
    proof: dict[str, Any] | None = None
    tensorrt: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        _one_of(self, "backend", BACKENDS)
        _one_of(self, "device", ("cpu", "cuda"))
        _one_of(self, "form", ("ragged", "padded"))
        _one_of(self, "dtype", DTYPE_BYTES)
        if not isinstance(self.model.get("vocab_size"), int):
            raise EngineError("model: key 'vocab_size' is missing or not an integer")

    @property
    def compute_capabilities(self) -> tuple[str, ...]:
        """Of the GPUs the engine is for; empty: any."""
        return tuple((self.compute_capability or "").replace(",", " ").split())

    @property
    def vocab_size(self) -> int:
        """Width of the logits (the tokenizer may know fewer ids)."""
        return int(self.model["vocab_size"])

    def to_json(self) -> str:
        """The file's text; `from_json` gives back an equal manifest."""
        data = dataclasses.asdict(self)
        return json.dumps(data | {"sha256": _digest(data)}, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Raises `EngineError` for text that is no manifest of this format, naming the key."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise EngineError(f"not JSON ({error})") from None
        if not isinstance(data, dict):
            raise EngineError(f"a JSON object was expected, not {type(data).__name__}")
        # First of all the version: another version may well have other keys.
        version = data.get("format_version", FORMAT_VERSION)
        if version != FORMAT_VERSION:
            raise EngineError(f"format version {version!r}; this seekforge reads {FORMAT_VERSION}")
        digest = data.pop("sha256", None)
        manifest: Manifest = decode(cls, data)
        if digest != _digest(data):
            raise EngineError(
                "its content does not match its own 'sha256': it was changed or damaged"
            )
        return manifest


def hash_files(paths: Sequence[Path]) -> list[str]:
    """sha256 of each file in hex; of one beyond HASH_PIECE bytes, sha256 of its pieces' digests."""
    parts = [
        (path, start)
        for path in paths
        for start in range(0, max(1, path.stat().st_size), HASH_PIECE)
    ]
    with ThreadPoolExecutor() as pool:  # hashlib lets go of the GIL
        digests = list(pool.map(lambda part: _hash_piece(*part), parts))
    found: dict[Path, list[bytes]] = {path: [] for path in paths}
    for (path, _), digest in zip(parts, digests, strict=True):
        found[path].append(digest)
    wholes = (
        pieces[0] if len(pieces) == 1 else hashlib.sha256(b"".join(pieces)).digest()
        for pieces in found.values()
    )
    return [whole.hex() for whole in wholes]


def _hash_piece(path: Path, start: int) -> bytes:
    digest, buffer = hashlib.sha256(), bytearray(1 << 20)
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        left = HASH_PIECE
        while left and (count := file.readinto(memoryview(buffer)[:left])):
            digest.update(memoryview(buffer)[:count])
            left -= count
    return digest.digest()


def file_entries(directory: Path) -> tuple[FileEntry, ...]:
    """Entries for all files below `directory` but the manifest, sorted by path, and but the cache
    that running the engine leaves there."""
    aside = (directory / MANIFEST_NAME, directory / CACHE_NAME)
    paths = sorted(p for p in directory.rglob("*") if p.is_file() and p not in aside)
    return tuple(
        FileEntry(path.relative_to(directory).as_posix(), digest, path.stat().st_size)
        for path, digest in zip(paths, hash_files(paths), strict=True)
    )


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Writes `manifest.json`, whole or not at all; the caller has written the files it lists."""
    path = directory / MANIFEST_NAME
    new = path.with_suffix(f".{os.getpid()}.new")
    try:
        new.write_text(manifest.to_json(), encoding="utf-8")
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def read_manifest(directory: Path, *, check_files: bool = True) -> Manifest:
    """Reads the manifest and checks JSON, format version, keys, its digest, then its files.

    Raises `EngineError` at the first failure. `check_files=False` leaves presence, size and sha256
    of the files unchecked.
    """
    path = directory / MANIFEST_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise EngineError(
            f"{directory} is no engine: it has no {MANIFEST_NAME}; {_fix(directory)}"
        ) from None
    except (OSError, ValueError) as error:
        raise EngineError(f"{path}: cannot be read ({error}); {_fix(directory)}") from None
    try:
        manifest = Manifest.from_json(text)
    except EngineError as error:
        raise EngineError(f"{path}: {error}; {_fix(directory)}") from None
    if check_files:
        _check_files(directory, manifest)
    return manifest


def _check_files(directory: Path, manifest: Manifest) -> None:
    fix = _fix(directory, manifest.backend)
    for entry in manifest.files:
        path = directory / entry.path
        if not path.is_file():
            raise EngineError(f"{path}: listed in {MANIFEST_NAME} but missing; {fix}")
        if path.stat().st_size != entry.size:
            raise EngineError(
                f"{path}: {path.stat().st_size} bytes, {MANIFEST_NAME} says {entry.size}: "
                f"cut or changed; {fix}"
            )
    digests = hash_files([directory / entry.path for entry in manifest.files])
    for entry, digest in zip(manifest.files, digests, strict=True):
        if digest != entry.sha256:
            raise EngineError(
                f"{directory / entry.path}: sha256 {digest[:12]}…, {MANIFEST_NAME} says "
                f"{entry.sha256[:12]}…: the content was changed or damaged; {fix}"
            )


def _fix(directory: Path, backend: str | None = None) -> str:
    name = backend or (directory.name if directory.name in BACKENDS else "BACKEND")
    out = directory.parent if directory.name in BACKENDS else directory
    return f"rebuild it: seekforge build CHECKPOINT -o {shlex.quote(str(out))} --backend {name}"


def _digest(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _positive(value: object, *names: str) -> None:
    for name in names:
        if getattr(value, name) < 1:
            raise EngineError(f"{name} is {getattr(value, name)}; at least 1 was expected")


def _one_of(value: object, name: str, known: Collection[str]) -> None:
    if getattr(value, name) not in known:
        raise EngineError(
            f"{name} is {getattr(value, name)!r}; one of {', '.join(known)} was expected"
        )
