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
there the weight is 0 whichever expert has it. Of equal scores torch.topk's choice counts; the order
of the chosen experts is free. The sum is divided with 1e-20 added, as V3 does; Qwen3-MoE adds
nothing, which is the same number unless all chosen scores are below 1e-13.
Sources: DeepSeek-AI, "DeepSeek-V2" (2405.04434) and "DeepSeek-V3 Technical Report" (2412.19437).

No data-dependent Python: a compiler may inline the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seekforge.kernels.ops import register

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
)
