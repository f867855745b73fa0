"""The compiled layers of a TensorRT engine, read from its build log.

With detailed profiling verbosity the builder logs every layer of the finished engine. Reading that
needs no GPU, while the engine inspector does. In: the log's text. Out: layers with the ONNX nodes
they were made from, and counts for the manifest.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_LAYER = re.compile(
    r"^Name: (?P<name>.*?), LayerType: (?P<kind>[^,]+), .*?Metadata: (?P<nodes>.*)$", re.M
)
# Several names have the ASCII unit separator between them, which terminals do not show.
_NODE = re.compile(r"\[ONNX Layer: (.*?)\](?=\x1f?\[ONNX Layer: |$)")
_GROUP = re.compile(r"_myl(\d+)_\d+$")  # compiled subgraph and position within it
_PROFILE = re.compile(r"\[profile (\d+)\]")  # of a layer outside the subgraphs
_ACTIVATION = re.compile(r"Total Activation Memory: (\d+)")
HEADING = "Layers:"


@dataclass(frozen=True, slots=True)
class CompiledLayer:
    """`kind` is the backend's word (gemm, kgen, …); `nodes` are names of ONNX nodes."""

    profile: int
    name: str
    kind: str
    nodes: tuple[str, ...]

    @property
    def is_fused_attention(self) -> bool:
        """The builder's attention kernels are `_gemm_mha_…` (many queries), `_gemv_mha_…` (one)."""
        return "mha" in self.name


def parse_nodes(metadata: str) -> tuple[str, ...]:
    """`[ONNX Layer: a]<unit separator>[ONNX Layer: b]` -> ("a", "b")"""
    return tuple(_NODE.findall(metadata.strip()))


def compiled_layers(messages: Iterable[str], num_profiles: int) -> list[CompiledLayer]:
    """The layers of the first listing among the log's messages; empty where there is none."""
    listing = next((text for text in messages if text.startswith(HEADING)), "")
    found = list(_LAYER.finditer(listing))
    groups = sorted({int(g[1]) for m in found if (g := _GROUP.search(m["name"]))})
    # The profiles are compiled one after the other, each into the same number of subgraphs.
    per_profile = max(1, len(groups) // num_profiles)
    layers = []
    for match in found:
        group = _GROUP.search(match["name"])
        profile = groups.index(int(group[1])) // per_profile if group else 0
        if group is None and (said := _PROFILE.search(match["name"])):
            profile = int(said[1])
        nodes = parse_nodes(match["nodes"])
        layers.append(CompiledLayer(profile, match["name"], match["kind"], nodes))
    return layers


def activation_bytes(messages: Iterable[str]) -> list[int]:
    """What the temporary tensors of a step take on the GPU, for each profile."""
    found = (_ACTIVATION.search(text) for text in messages)
    return [int(match[1]) for match in found if match]


def unfused_attention(
    layers: Sequence[CompiledLayer], attention: Sequence[str], profile: int
) -> list[str]:
    """Which of the attention nodes have no fused kernel in the profile."""
    fused = {
        node for layer in layers if layer.profile == profile and layer.is_fused_attention
        for node in layer.nodes
    }  # fmt: skip
    return [name for name in attention if name not in fused]


def layer_counts(
    network: Counter[str], layers: Sequence[CompiledLayer], attention: Sequence[str], profiles: int
) -> dict[str, Any]:
    """The manifest's `layers`: the parsed network by layer type, each profile by compiled kind.

    `fused_attention` is None where the backend listed no compiled layers.
    """
    return {
        "network": dict(sorted(network.items())),
        "profiles": [
            {
                "compiled": dict(sorted(Counter(x.kind for x in layers if x.profile == p).items())),
                "fused_attention": len(attention) - len(unfused_attention(layers, attention, p))
                if layers
                else None,
            }
            for p in range(profiles)
        ],
    }
