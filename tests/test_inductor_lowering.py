"""The one-token package's own lowerings, compiled: INT4 loops and `in_memory` equal the operators.

One package holds all cases, for a compile takes 10 s.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from seekforge.compile.inductor import ONE_TOKEN, Job, compile_package
from seekforge.kernels.gemv import in_memory, int4_gemv, one_token_int4_linear
from seekforge.kernels.int4 import Int4, quantise
from seekforge.kernels.int4_linear import int4_linear
from seekforge.kernels.int4_moe_experts import int4_moe_experts, one_token_int4_experts
from seekforge.passes.kv_cache import GraphInput

# in_features, out_features, group size, symmetric, bias: one, three and nine groups; 18 bytes of a
# group are no multiple of a vector, 32 are.
LINEARS = {
    "symmetric": (108, 70, 36, True, False),
    "asymmetric": (108, 70, 36, False, True),
    "one-group": (108, 33, 108, True, True),
    "nine-groups": (576, 40, 64, False, False),
}


def packed(*shape: int, group_size: int, symmetric: bool) -> Int4:
    return quantise(0.5 * torch.randn(shape), group_size, symmetric)


class Layers(nn.Module):
    """Each case behind a tanh, which must not be computed once a row, and INT4 experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, (inputs, outputs, size, symmetric, bias) in LINEARS.items():
            self._add(name, packed(outputs, inputs, group_size=size, symmetric=symmetric))
            self.register_buffer(f"{name}_bias", torch.randn(outputs) if bias else None)
        self._add("gate_up", packed(5, 48, 108, group_size=36, symmetric=False))
        self._add("down", packed(5, 108, 24, group_size=24, symmetric=True))

    def _add(self, name: str, weight: Int4) -> None:
        self.register_buffer(f"{name}_q", weight.qweight)
        self.register_buffer(f"{name}_scales", weight.scales)
        self.register_buffer(f"{name}_zeros", weight.zeros)

    def parts(self, name: str) -> tuple[Tensor, Tensor, Tensor | None]:
        q, scales, zeros = (getattr(self, f"{name}_{part}") for part in ("q", "scales", "zeros"))
        return q, scales, zeros

    def forward(self, x: Tensor, weights: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
        x = x.tanh()
        outputs = []
        for name, (inputs, _, size, _, _) in LINEARS.items():
            bias = getattr(self, f"{name}_bias")
            outputs.append(int4_linear(x[:, :inputs], *self.parts(name), bias, size))
        experts = (*self.parts("gate_up"), *self.parts("down"), 36)
        outputs.append(int4_moe_experts(x[:, :108], weights, indices, *experts))
        return tuple(outputs)


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= 1e-5 * expected.abs().max())


def test_compiled_package(tmp_path: Path) -> None:
    layers = Layers()
    job = Job(
        torch.fx.symbolic_trace(layers),
        (
            GraphInput("x", torch.float32, (1, 576)),
            GraphInput("weights", torch.float32, (1, 2)),
            GraphInput("indices", torch.int64, (1, 2)),
        ),
        "cpu",
        tmp_path / "decode.pt2",
        ONE_TOKEN,
    )
    buffers = dict(layers.named_buffers())
    compile_package(job)
    with zipfile.ZipFile(job.path) as file:
        (wrapper,) = (file.read(n) for n in file.namelist() if n.endswith(".wrapper.cpp"))
    assert b"aoti_torch_proxy_executor_call_function(" not in wrapper, "operators are called"
    package = torch._inductor.aoti_load_package(str(tmp_path / "decode.pt2"))
    names = package.get_constant_fqns()
    package.load_constants({n: buffers[n] for n in names}, check_full_update=True)
    inputs = (2 * torch.randn(1, 576), torch.rand(1, 2), torch.tensor([[3, 1]]))
    found, expected = package(*inputs), layers(*inputs)
    for name, a, b in zip([*LINEARS, "experts"], found, expected, strict=True):
        assert close(a, b), f"{name} {(a - b).abs().max()=} {b.abs().max()=}"


@pytest.mark.parametrize("case", LINEARS)
def test_reference(case: str) -> None:
    layers, (inputs, _, size, _, _) = Layers(), LINEARS[case]
    x, bias = torch.randn(1, 1, inputs), getattr(layers, f"{case}_bias")
    found = one_token_int4_linear(x, *layers.parts(case), bias, size)
    expected = int4_linear(x, *layers.parts(case), bias, size)
    assert found.shape == expected.shape and close(found, expected)


def test_experts_take_their_own_matrix() -> None:
    layers = Layers()
    x, chosen = torch.randn(3, 108), torch.tensor([4, 0, 4])
    q, scales, zeros = layers.parts("gate_up")
    assert zeros is not None
    found = int4_gemv(x, q, scales, zeros, chosen)
    for row, e in enumerate(chosen.tolist()):
        expected = int4_linear(x[row], q[e], scales[e], zeros[e], None, 36)
        assert close(found[row], expected), f"{row=} {e=}"
    experts = (*layers.parts("gate_up"), *layers.parts("down"), 36)
    one, weights, indices = x[:1], torch.rand(1, 2), torch.tensor([[0, 3]])
    found = one_token_int4_experts(one, weights, indices, *experts)
    assert close(found, int4_moe_experts(one, weights, indices, *experts))


def test_in_memory_is_a_contiguous_copy() -> None:
    x = torch.randn(3, 5).t()
    y = in_memory(x)
    assert torch.equal(x, y) and y.is_contiguous() and y.data_ptr() != x.data_ptr()
