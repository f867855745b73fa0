"""Penalties for tokens that a request has seen, from counts kept on the device.

    logits      [rows, vocab]    float32, bfloat16 or float16
    counts      [slots, vocab]   int32: how often the request of a slot has produced each token,
                                 plus PROMPT where its prompt has the token
    slots       [rows] int64     each row's slot in counts; negative: the row is left as it is
    repetition, presence, frequency  [rows] fp32   1, 0 and 0 change nothing
    y           [rows, vocab] fp32

    y = x / repetition where x > 0, else x * repetition       for tokens of the prompt or the output
    y = y - frequency * count - presence * (count > 0)        for tokens of the output
Source: Keskar et al., "CTRL", 2019 (repetition); OpenAI's API (the others).
"""

from __future__ import annotations

import torch
from torch import Tensor

from seekforge.kernels.triton_support import jit, tl
from seekforge.kernels.tuning import overlaps_launches

PROMPT = 1 << 30


def penalise_reference(
    logits: Tensor, counts: Tensor, slots: Tensor, repetition: Tensor, presence: Tensor,
    frequency: Tensor,
) -> Tensor:  # fmt: skip
    x = logits.to(torch.float32)
    seen = counts[slots.clamp_min(0)] * (slots >= 0)[:, None]
    count = seen % PROMPT
    by = repetition[:, None]
    y = torch.where(seen > 0, torch.where(x > 0, x / by, x * by), x)
    return y - frequency[:, None] * count - presence[:, None] * (count > 0)


def count_tokens_reference(counts: Tensor, slots: Tensor, tokens: Tensor, prompt: bool) -> None:
    kept = (slots >= 0) & (tokens >= 0)
    for slot, token in zip(slots[kept].tolist(), tokens[kept].tolist(), strict=True):
        if prompt:
            counts[slot, token] |= PROMPT
        else:
            counts[slot, token] += 1


@jit
def penalise_kernel(  # type: ignore[no-untyped-def]
    logits, counts, slots, repetition, presence, frequency, y, vocab, row_stride, slot_stride,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    r = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    slot = tl.load(slots + r)
    x = tl.load(logits + r * row_stride + token, mask=inside, other=0.0).to(tl.float32)
    if slot >= 0:
        seen = tl.load(counts + slot * slot_stride + token, mask=inside, other=0)
        count = (seen & 0x3FFFFFFF).to(tl.float32)
        by = tl.load(repetition + r)
        x = tl.where(seen > 0, tl.where(x > 0, x / by, x * by), x)
        x -= tl.load(frequency + r) * count
        x -= tl.where(count > 0, tl.load(presence + r), 0.0)
    tl.store(y + r * vocab + token, x, mask=inside)


def penalise_triton(
    logits: Tensor, counts: Tensor, slots: Tensor, repetition: Tensor, presence: Tensor,
    frequency: Tensor,
) -> Tensor:  # fmt: skip
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    rows, vocab = logits.shape
    y = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    block = 2048
    if rows:
        overlap = overlaps_launches(logits.device)
        penalise_kernel[(-(-vocab // block), rows)](
            logits, counts, slots, repetition, presence, frequency, y, vocab, logits.stride(0),
            counts.stride(0), BLOCK=block, OVERLAP=overlap, num_warps=8,
            enable_fp_fusion=False, **({"launch_pdl": True} if overlap else {}),
        )  # fmt: skip
    return y


@jit
def count_tokens_kernel(  # type: ignore[no-untyped-def]
    counts, slots, tokens, n, slot_stride, PROMPT: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + i, mask=i < n, other=-1)
    token = tl.load(tokens + i, mask=i < n, other=-1)
    at = counts + slot * slot_stride + token
    if PROMPT:
        tl.atomic_or(at, 1073741824, mask=(slot >= 0) & (token >= 0))
    else:
        tl.atomic_add(at, 1, mask=(slot >= 0) & (token >= 0))


def count_tokens_triton(counts: Tensor, slots: Tensor, tokens: Tensor, prompt: bool) -> None:
    """Adds tokens [n] int64 of the requests at slots [n] int64 to counts, as the prompt's or as
    produced ones; pairs with a negative slot or token are skipped."""
    n, block = tokens.numel(), 256
    if n:
        count_tokens_kernel[(-(-n // block),)](
            counts, slots, tokens, n, counts.stride(0), PROMPT=prompt, BLOCK=block, num_warps=4
        )
