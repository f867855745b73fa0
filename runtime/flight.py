"""A step whose tokens are on their way from the device, while the host prepares the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from seekforge.runtime.sequence import Sequence as Running


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched step: the sequences that get a token of it, and these tokens on the device.

    host: their copy, complete when `event` has happened (None: it is already).
    """

    sequences: Sequence[Running]
    tokens: Tensor
    host: Tensor
    event: torch.cuda.Event | None

    @classmethod
    def of(cls, sequences: Sequence[Running], tokens: Tensor) -> Flight:
        """Queues the copy to the host."""
        if tokens.device.type == "cpu":
            return cls(sequences, tokens, tokens, None)
        host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        host.copy_(tokens, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return cls(sequences, tokens, host, event)

    def read(self) -> list[int]:
        if self.event is not None:
            self.event.synchronize()
        tokens: list[int] = self.host.tolist()
        return tokens
