"""Profiles, their choice by shape, and bindings: pure, no TensorRT needed."""

from __future__ import annotations

import pytest
import torch

from seekforge.compile.profiles import make_profiles
from seekforge.kernels.errors import BuildError, EngineError
from seekforge.runtime.bindings import bindings
from seekforge.runtime.manifest import KVLayout, Limits, TensorSpec
from seekforge.runtime.profiles import (
    Profile,
    ShapeRange,
    profile_from_json,
    profile_to_json,
    select_profile,
)

CPU = torch.device("cpu")


def kv(block_size: int = 16, layers: int = 2) -> KVLayout:
    return KVLayout(layers, block_size, {"k": (3, 64), "v": (3, 64)}, "float16", False)


def shapes(profile: Profile, b: int, s: int, m: int = 1, n: int = 1) -> dict[str, list[int]]:
    given = {name: list(sizes.opt) for name, sizes in profile.items()}
    return given | {
        "token_ids": [b, s], "positions": [b, s], "block_tables": [b, m], "past_lens": [b],
        "logits_rows": [n],
    }  # fmt: skip


def test_two_profiles_of_the_default_limits() -> None:
    context, generation = make_profiles(Limits(max_len=1000, max_batch=8, max_chunk=256), kv())
    assert str(context["token_ids"]) == "[1, 1..256]"
    assert str(context["logits_rows"]) == "[1..256]"
    assert str(generation["token_ids"]) == "[1..8, 1]"
    assert str(generation["logits_rows"]) == "[1..8]"
    assert str(generation["block_tables"]) == "[1..8, 1..63]"  # ceil(1000 / 16)
    assert context["v_pool_1"].min == (1, 16, 3, 64)
    assert context["v_pool_1"].opt == (8 * 63, 16, 3, 64)
    names = ["token_ids", "positions", "block_tables", "past_lens", "logits_rows"]
    assert list(context)[:7] == [*names, "k_pool_0", "v_pool_0"]


@pytest.mark.parametrize("limits", [(1, 1, 1), (64, 1, 64), (1, 8, 1), (4, 4, 4), (1200, 1000, 9)])
def test_b43_min_opt_max_are_ordered_at_every_edge(limits: tuple[int, int, int]) -> None:
    max_len, max_batch, max_chunk = limits
    for block_size in (1, 16):
        made = make_profiles(Limits(max_len, max_batch, max_chunk), kv(block_size))
        for profile in made:
            for name, sizes in profile.items():
                for low, opt, high in zip(sizes.min, sizes.opt, sizes.max, strict=True):
                    assert 1 <= low <= opt <= high, f"{name} {limits=} {block_size=}"
    assert made[0]["token_ids"].max == (1, min(max_chunk, max_len))
    assert made[1]["token_ids"].max == (max_batch, 1)


def test_a_pool_that_32_bits_cannot_index_is_refused() -> None:
    with pytest.raises(BuildError, match=r"max_batch 4096 x max_len 1000000.*lower --max-batch"):
        make_profiles(Limits(1_000_000, 4096, 8), kv())


@pytest.mark.parametrize("sizes", [((2,), (1,), (3,)), ((1,), (4,), (3,)), ((0,), (1,), (1,))])
def test_a_range_out_of_order_is_refused(sizes: tuple[tuple[int], tuple[int], tuple[int]]) -> None:
    with pytest.raises(EngineError, match="1 <= min <= opt <= max was expected"):
        ShapeRange(*sizes)


def test_profiles_survive_the_manifest() -> None:
    for profile in make_profiles(Limits(64, 4, 8), kv()):
        assert profile_from_json(profile_to_json(profile)) == profile
    with pytest.raises(EngineError, match="malformed"):
        profile_from_json({"token_ids": {"min": [1], "max": [2]}})


def test_the_profile_is_chosen_by_shape() -> None:
    profiles = make_profiles(Limits(max_len=64, max_batch=4, max_chunk=8), kv())
    assert select_profile(profiles, shapes(profiles[0], b=1, s=8, m=4, n=8)) == 0
    assert select_profile(profiles, shapes(profiles[0], b=4, s=1, m=4, n=4)) == 1
    assert select_profile(profiles, shapes(profiles[0], b=1, s=1)) == 1  # both fit: the special one


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": 2, "s": 5}, r"token_ids \[2, 5\] is outside \[1, 1..8\]"),
        ({"b": 1, "s": 9}, r"token_ids \[1, 9\] is outside \[1, 1..8\]"),
        ({"b": 5, "s": 1}, r"token_ids \[5, 1\] is outside \[1..4, 1\]"),
        ({"b": 1, "s": 1, "m": 5}, r"block_tables \[1, 5\] is outside \[1, 1..4\]"),
    ],
)
def test_shapes_outside_all_profiles_are_named(change: dict[str, int], message: str) -> None:
    profiles = make_profiles(Limits(max_len=64, max_batch=4, max_chunk=8), kv())
    with pytest.raises(EngineError, match=message):
        select_profile(profiles, shapes(profiles[0], **change))


def test_b49_indices_become_the_engines_integer_type() -> None:
    ids = torch.tensor([[5, 7]])
    for dtype in ("int32", "int64"):
        bound = bindings([TensorSpec("token_ids", dtype, ("B", "S"))], {"token_ids": ids}, CPU)
        assert str(bound["token_ids"].dtype) == f"torch.{dtype}"
        assert bound["token_ids"].tolist() == [[5, 7]]
    with pytest.raises(EngineError, match=r"'token_ids' holds values from 5 to 2147483648"):
        bindings(
            [TensorSpec("token_ids", "int32", ("S",))], {"token_ids": torch.tensor([5, 2**31])}, CPU
        )
    with pytest.raises(EngineError, match="'k_pool_0' is float32; float16 was expected"):
        bindings([TensorSpec("k_pool_0", "float16", ("S",))], {"k_pool_0": torch.zeros(2)}, CPU)


def test_b47_strided_inputs_are_made_contiguous() -> None:
    base = torch.arange(24).view(4, 6)
    for tensor in (base.t(), base[:, 1:3], base[:1].expand(4, 6), base[1]):
        spec = TensorSpec("x", "int64", tuple(tensor.shape))
        bound = bindings([spec], {"x": tensor}, CPU)["x"]
        assert bound.is_contiguous()
        assert torch.equal(bound, tensor)


def test_inputs_that_contradict_the_specs_are_refused() -> None:
    specs = [TensorSpec("token_ids", "int64", ("B", "S")), TensorSpec("past_lens", "int64", ("B",))]
    ids, lens = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    bindings(specs, {"token_ids": ids, "past_lens": lens}, CPU)
    with pytest.raises(EngineError, match=r"'past_lens' has shape \[1\]; \[2\] was expected"):
        bindings(specs, {"token_ids": ids, "past_lens": lens[:1]}, CPU)
    with pytest.raises(EngineError, match=r"'token_ids' has shape \[3\]"):
        bindings(specs, {"token_ids": ids[0], "past_lens": lens}, CPU)
    with pytest.raises(EngineError, match="differ in past_lens, typo"):
        bindings(specs, {"token_ids": ids, "typo": lens}, CPU)
