"""transformers' own decode steps as peers of an engine: eager, and compiled with a static cache in
the manner of gpt-fast (a captured step, greedy choice on the device, nothing crosses to the host).

Both run on the checkpoint's weights in the engine's dtype, with scaled-dot-product attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache


class Peer:
    """`batch` sequences of `context` random tokens in the cache; each `step` adds one token.

    room: tokens of a static cache behind the context. compiled: through torch.compile, which the
    first step then waits for.
    """

    def __init__(
        self, model: nn.Module, batch: int, context: int, room: int, *, compiled: bool
    ) -> None:
        self._model: Any = model
        parameters = inspect.signature(model.forward).parameters
        self._word = "cache" if "cache" in parameters else "past_key_values"  # by release
        config: Any = model.config
        random = torch.Generator().manual_seed(0)
        ids = torch.randint(0, config.vocab_size, (batch, context), generator=random).cuda()
        self._cache: Any = DynamicCache(config=config)
        if compiled:
            self._cache = StaticCache(config=config, max_cache_len=context + room)
        with torch.inference_mode(not compiled), torch.no_grad():
            self._token = self._next(ids)
        self._run: Callable[[Tensor], Tensor] = self._next
        if compiled:
            self._run = torch.compile(self._next, mode="reduce-overhead")

    def step(self) -> None:
        with torch.no_grad():
            self._token = self._run(self._token).clone()

    def _next(self, ids: Tensor) -> Tensor:
        out = self._model(ids, use_cache=True, logits_to_keep=1, **{self._word: self._cache})
        token: Tensor = out.logits[:, -1].argmax(-1, keepdim=True)
        return token


def prefill(model: nn.Module, tokens: int) -> Callable[[], None]:
    """Eager prefill of one sequence of random tokens, logits of the last."""
    config: Any = model.config
    ids = torch.randint(0, config.vocab_size, (1, tokens), device="cuda")

    @torch.inference_mode()
    def run() -> None:
        model(ids, use_cache=True, logits_to_keep=1)

    return run
