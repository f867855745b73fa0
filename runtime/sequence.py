"""What the runtime knows about a text being generated, and the forms it is handed out in.

A request has `n` sequences: same prompt, own tokens, own random numbers. Nothing here acts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Literal

import torch

from seekforge.runtime.detokenizer import TextStream
from seekforge.runtime.sampling import SamplingParams

# "error": the engine gave logits that are no distribution (NaN). "abort": taken back by the caller.
FinishReason = Literal["stop", "length", "error", "abort"]


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one choice; `finish_reason` is set on a choice's last delta only.

    `token_ids` come as they are sampled, `text` when it is final: the two need not correspond.
    """

    request_id: int
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Choice:
    """One continuation. `token_ids` has the token that ended it, `text` does not."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt (None where it came as token ids) and its `n` continuations."""

    prompt: str | None
    prompt_token_ids: list[int]
    choices: list[Choice]


@dataclass(slots=True, eq=False)
class Sequence:
    """One continuation while it runs; `id` is unique and names it to the block manager."""

    id: int
    request_id: int
    index: int
    token_ids: list[int]  # prompt, then what was sampled
    num_prompt: int
    max_tokens: int
    params: SamplingParams
    key: int  # of its random numbers on a GPU; `generator` has those on the CPU
    generator: torch.Generator
    stream: TextStream
    num_computed: int = (
        0  # tokens whose K and V are in the cache, or will be after the step running
    )
    num_unread: int = 0  # 1 while its next token is sampled but still on the device
    text: str = ""
    finish_reason: FinishReason | None = None

    @property
    def num_pending(self) -> int:
        """Tokens still to compute: 1 while decoding, more in a prompt or after a preemption."""
        return self.num_tokens - self.num_computed

    @property
    def num_tokens(self) -> int:
        """Prompt and output, the token that was not read yet included."""
        return len(self.token_ids) + self.num_unread

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]


@dataclass(slots=True, eq=False)
class Request:
    """A prompt with its sequences, and what its reader has not collected yet."""

    id: int
    prompt: str | None
    sequences: Items[Sequence]
    deltas: deque[Delta] = field(default_factory=deque)

    @property
    def finished(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    def output(self) -> RequestOutput:
        first = self.sequences[0]
        choices = []
        for sequence in self.sequences:
            assert sequence.finish_reason is not None, f"request {self.id} is not finished"
            choices.append(Choice(sequence.text, sequence.output_ids, sequence.finish_reason))
        return RequestOutput(self.prompt, first.token_ids[: first.num_prompt], choices)
