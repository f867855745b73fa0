"""Routing of a mixture of experts: which experts a token goes to, and with which weights.

    logits   [..., experts]  any float dtype; computed in fp32
    bias     [experts]       fp32, or None; added to the scores to choose by (V3's correction bias)
    weights  [..., top_k]    fp32
    indices  [..., top_k]    int64

    score   = softmax(logits) or sigmoid(logits), over all experts
    chosen  = the top_k experts by score + bias, from the top_groups best groups only
    weights = score[chosen] (without the bias), / their sum where `normalise`, * scale

groups: the experts lie in so many groups of equal size; 1 for none. A group's score is the best
score + bias in it ("max", DeepSeek-V2) or the sum of its two best ("top2", V3). Experts of the
other groups get -inf: with 0, as V2 masks its positive scores, they would win over experts whose
biased score is negative. Under V2's mask the two differ only where softmax underflows to 0, and
there the weight is 0 whichever expert has it. Of equal scores torch.topk's choice counts on the
CPU, the lower expert and the lower group on a GPU; the order of the chosen experts is free. The sum
is divided with 1e-20 added, as V3 does; Qwen3-MoE adds nothing, which is the same number unless all
chosen scores are below 1e-13.
Sources: DeepSeek-AI, "DeepSeek-V2" (2405.04434) and "DeepSeek-V3 Technical Report" (2412.19437).

No data-dependent Python: a compiler may inline the reference. The kernel gives one warp to a token:
scores lie in its registers, and each of the top_k steps is two warp reductions of integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seekforge.kernels.ops import register
from seekforge.kernels.triton_support import jit, next_power_of_2, tl
from seekforge.kernels.tuning import overlaps_launches

SCORINGS = ("softmax", "sigmoid")
GROUP_SCORES = ("max", "top2")
EPSILON = 1e-20


def moe_route_reference(
    logits: Tensor, bias: Tensor | None, top_k: int, scoring: str, groups: int, top_groups: int,
    group_score: str, normalise: bool, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert scoring in SCORINGS and group_score in GROUP_SCORES, (scoring, group_score)
    scores = logits.float().softmax(-1) if scoring == "softmax" else logits.float().sigmoid()
    choice = scores if bias is None else scores + bias
    if groups > 1:
        grouped = choice.view(*choice.shape[:-1], groups, -1)
        best = 1 if group_score == "max" else min(2, grouped.shape[-1])
        group = grouped.topk(best, -1).values.sum(-1)
        kept = group.topk(top_groups, -1, sorted=False).indices
        excluded = torch.ones_like(group, dtype=torch.bool).scatter(-1, kept, False)
        choice = grouped.masked_fill(excluded[..., None], float("-inf")).flatten(-2)
    indices = choice.topk(top_k, -1, sorted=False).indices
    weights = scores.gather(-1, indices)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + EPSILON)
    return weights * scale, indices


@jit
def ordered(x):  # type: ignore[no-untyped-def]
    """Integers in the order of these fp32 numbers; NaN is the largest, as in torch.topk."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@jit
def moe_route_kernel(  # type: ignore[no-untyped-def]
    logits, bias, weights, indices, token_stride, expert_stride, scale,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, TOP_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr, PADDED_GROUPS: tl.constexpr, PADDED_SIZE: tl.constexpr,
    PADDED_K: tl.constexpr, SOFTMAX: tl.constexpr, BIAS: tl.constexpr, TOP2: tl.constexpr,
    NORMALISE: tl.constexpr, EPS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    LOWEST: tl.constexpr = -0x80000000
    NOBODY: tl.constexpr = 0x7FFFFFFF
    group = tl.arange(0, PADDED_GROUPS)
    member = tl.arange(0, PADDED_SIZE)
    expert = group[:, None] * SIZE + member[None, :]
    valid = (group < GROUPS)[:, None] & (member < SIZE)[None, :]
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = logits + token * token_stride + expert * expert_stride
    score = tl.load(at, mask=valid, other=float("-inf")).to(tl.float32)
    if SOFTMAX:
        score = tl.exp(score - tl.max(tl.max(score, axis=1), axis=0))
        score = score / tl.sum(tl.sum(score, axis=1), axis=0)
    else:
        score = 1.0 / (1.0 + tl.exp(-score))
    choice = score
    if BIAS:
        choice += tl.load(bias + expert, mask=valid, other=0.0)
    key = tl.where(valid, ordered(choice), LOWEST)
    if GROUPS > 1:
        best = tl.max(key, axis=1)
        total = tl.max(tl.where(valid, choice, float("-inf")), axis=1)
        if TOP2 and SIZE > 1:
            first = tl.min(tl.where(key == best[:, None], expert, NOBODY), axis=1)
            rest = tl.where(valid & (expert != first[:, None]), choice, float("-inf"))
            total += tl.max(rest, axis=1)
        left = tl.where(group < GROUPS, ordered(total), LOWEST)
        kept = group < 0
        for _ in tl.static_range(TOP_GROUPS):
            top = tl.min(tl.where(left == tl.max(left, axis=0), group, NOBODY), axis=0)
            kept = kept | (group == top)
            left = tl.where(group == top, LOWEST, left)
        excluded = ordered(tl.full((1, 1), float("-inf"), tl.float32))
        key = tl.where(valid & ~kept[:, None], excluded, key)
    slot = tl.arange(0, PADDED_K)
    chosen = tl.zeros((PADDED_K,), tl.int32)
    weight = tl.zeros((PADDED_K,), tl.float32)
    for i in tl.static_range(TOP_K):
        highest = tl.max(tl.max(key, axis=1), axis=0)
        top = tl.min(tl.min(tl.where(key == highest, expert, NOBODY), axis=1), axis=0)
        mine = tl.sum(tl.sum(tl.where(expert == top, score, 0.0), axis=1), axis=0)
        chosen = tl.where(slot == i, top, chosen)
        weight = tl.where(slot == i, mine, weight)
        key = tl.where(expert == top, LOWEST, key)
    if NORMALISE:
        weight = weight / (tl.sum(weight, axis=0) + EPS)
    inside = slot < TOP_K
    tl.store(weights + token * TOP_K + slot, weight * scale, mask=inside)
    tl.store(indices + token * TOP_K + slot, chosen.to(tl.int64), mask=inside)


def moe_route_triton(
    logits: Tensor, bias: Tensor | None, top_k: int, scoring: str, groups: int, top_groups: int,
    group_score: str, normalise: bool, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert scoring in SCORINGS and group_score in GROUP_SCORES, (scoring, group_score)
    experts = logits.shape[-1]
    rows = logits.reshape(-1, experts)
    tokens, size = rows.shape[0], experts // groups
    weights = logits.new_empty((*logits.shape[:-1], top_k), dtype=torch.float32)
    indices = logits.new_empty((*logits.shape[:-1], top_k), dtype=torch.int64)
    if not tokens:
        return weights, indices
    overlap = overlaps_launches(logits.device)
    moe_route_kernel[(tokens,)](
        rows, rows if bias is None else bias.contiguous(), weights, indices, *rows.stride(), scale,
        GROUPS=groups, SIZE=size, TOP_GROUPS=top_groups, TOP_K=top_k,
        PADDED_GROUPS=next_power_of_2(groups), PADDED_SIZE=next_power_of_2(size),
        PADDED_K=next_power_of_2(top_k), SOFTMAX=scoring == "softmax", BIAS=bias is not None,
        TOP2=group_score == "top2", NORMALISE=normalise, EPS=EPSILON, OVERLAP=overlap,
        num_warps=1, **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip
    return weights, indices


def _fake(
    logits: Tensor, bias: Tensor | None, top_k: int, scoring: str, groups: int, top_groups: int,
    group_score: str, normalise: bool, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    shape = (*logits.shape[:-1], top_k)
    return (
        logits.new_empty(shape, dtype=torch.float32),
        logits.new_empty(shape, dtype=torch.int64),
    )


moe_route = register(
    "moe_route(Tensor logits, Tensor? bias, int top_k, str scoring, int groups, int top_groups, "
    "str group_score, bool normalise, float scale) -> (Tensor weights, Tensor indices)",
    reference=moe_route_reference,
    fake=_fake,
    cuda=moe_route_triton,
)
