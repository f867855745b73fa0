"""An engine that answers: prompts in, texts out. The loop is schedule -> run -> sample -> append.

Where tokens are sampled on the device, a step is launched before the tokens of the one before it
have been read: their values are not needed to launch it, and the host's work hides behind it. What
it computed for a sequence that turns out to have ended is dropped.

It checks requests before anything runs, so that a refused one leaves no trace, and it is the only
place where tokenizer, scheduler, session and sampler meet. Not safe for several threads at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

from seekforge.kernels.errors import InputError
from seekforge.runtime.blocks import BlockManager
from seekforge.runtime.detokenizer import TextStream
from seekforge.runtime.device_sampling import DeviceSampler
from seekforge.runtime.fit import resolve_engine
from seekforge.runtime.flight import Flight
from seekforge.runtime.manifest import Manifest
from seekforge.runtime.prompt import Prompt, chat_ids, check_ids, load_tokenizer, prompt_ids
from seekforge.runtime.sampling import Sampler, SamplingParams, make_generator, make_key
from seekforge.runtime.scheduler import Scheduler
from seekforge.runtime.sequence import Delta, FinishReason, Request, RequestOutput
from seekforge.runtime.sequence import Sequence as Running
from seekforge.runtime.session import Chunk, Session, open_session

GREEDY = SamplingParams()


class LLM:
    """The engine at `path` (an engine directory or a bundle of them), ready to generate.

    `session` and `tokenizer` replace those of the directory. `max_batch` and `max_chunk` may be
    smaller than the engine's; `block_size` may differ from the engine's where that is dynamic.
    `overlap`: launch a step before the one before it has been read; None: on a GPU.
    `num_blocks` None: room for `max_batch` sequences of full length, as far as memory allows.
    Raises `EngineError` for the engine, `InputError` for the options.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        session: Session | None = None,
        tokenizer: Any = None,
        block_size: int | None = None,
        num_blocks: int | None = None,
        max_batch: int | None = None,
        max_chunk: int | None = None,
        overlap: bool | None = None,
    ) -> None:
        directory = Path(path)
        if session is None:
            directory = resolve_engine(directory)
            session = open_session(directory)
        self.session = session
        self.manifest = session.manifest
        self.tokenizer = load_tokenizer(directory) if tokenizer is None else tokenizer
        limits, kv = self.manifest.limits, self.manifest.kv
        block_size = _option("block_size", block_size, kv.block_size, None)
        if block_size != kv.block_size and not kv.dynamic_block_size:
            raise InputError(
                f"block_size is {block_size}; this engine was built for {kv.block_size} only"
            )
        max_batch = _option("max_batch", max_batch, limits.max_batch, limits.max_batch)
        max_chunk = _option("max_chunk", max_chunk, limits.max_chunk, limits.max_chunk)
        if num_blocks is None:
            memory = session.pool_bytes(max_batch, max_chunk, block_size)
            num_blocks = default_blocks(self.manifest, block_size, max_batch, memory)
        num_blocks = _option("num_blocks", num_blocks, 1, None)
        session.allocate(num_blocks, block_size)
        self.blocks = BlockManager(num_blocks, block_size)
        self.scheduler = Scheduler(self.blocks, max_batch, max_chunk)
        known, device = self.tokenizer.get_vocab().values(), session.logits_device
        self.sampler: Sampler | DeviceSampler = Sampler(self.manifest.vocab_size, known)
        if device.type == "cuda":
            self.sampler = DeviceSampler(self.manifest.vocab_size, known, max_batch, device)
        self._overlap = device.type == "cuda" if overlap is None else overlap
        self._flight: Flight | None = None  # a step whose tokens have not been read
        # The last token of a sequence is never computed, so it needs no place in the pool.
        self.max_len = min(limits.max_len, num_blocks * block_size + 1)
        self._eos = frozenset(self.manifest.generation.eos_token_ids)
        self._requests: dict[int, Request] = {}
        self._request_ids = itertools.count()
        self._sequence_ids = itertools.count()

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
    ) -> list[RequestOutput]:
        """Continues each prompt (text, or token ids); the outputs are in the order of the prompts.

        Raises `InputError` before anything runs if any of the prompts cannot be served.
        """
        items = [prompts] if isinstance(prompts, str) else list(prompts)
        each = [params] * len(items) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(items):
            raise InputError(f"{len(each)} sampling params for {len(items)} prompts; one each")
        requests = [
            self._request(prompt, wanted, f"prompt {i}: " if len(items) > 1 else "")
            for i, (prompt, wanted) in enumerate(zip(items, each, strict=True))
        ]
        try:
            for request in requests:
                self._enqueue(request)
            while any(request.id in self._requests for request in requests):
                self.step()
        finally:  # only after an exception is there anything left to abort
            for request in requests:
                self.abort(request.id)
        return [request.output() for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams = GREEDY) -> Iterator[Delta]:
        """The same text as `generate`, as it comes. Leaving the iterator aborts the request.

        Raises `InputError` here, not at the first delta.
        """
        return self._deltas(self._request(prompt, params))

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams = GREEDY
    ) -> RequestOutput:
        """The assistant's next message, by the tokenizer's chat template."""
        return self.generate([self.chat_prompt(messages)], params)[0]

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Messages {"role", "content"} -> the prompt's token ids; for `stream` and `generate`."""
        return chat_ids(self.tokenizer, messages)

    def score(self, token_ids: Sequence[int], chunk: int | None = None) -> Tensor:
        """Logits of every position, float32 [len(token_ids), V], computed `chunk` tokens a step.

        Goes through the paged cache as generation does. Raises `InputError` for ids the model does
        not have, for more tokens than the engine takes, and if too few blocks are free.
        """
        check_ids(token_ids, self.manifest.vocab_size)
        limits = self.manifest.limits
        size = _option("chunk", chunk, self.scheduler.max_chunk, limits.max_chunk)
        if not 0 < len(token_ids) <= limits.max_len:
            raise InputError(
                f"{len(token_ids)} tokens to score; 1 to {limits.max_len} are possible"
            )
        owner = next(self._sequence_ids)
        if not self.blocks.allocate(owner, len(token_ids)):
            raise InputError(
                f"{len(token_ids)} tokens to score need {self.blocks.blocks_for(len(token_ids))} "
                f"blocks of {self.blocks.block_size}; {self.blocks.num_free} of "
                f"{self.blocks.num_blocks} are free: give num_blocks"
            )
        table, rows = list(self.blocks.table(owner)), []
        try:
            for start in range(0, len(token_ids), size):
                tokens = list(token_ids[start : start + size])
                blocks = table[: self.blocks.blocks_for(start + len(tokens))]
                piece = Chunk(tokens, start, blocks, range(len(tokens)))
                rows.append(self.session.step([piece]).float().cpu())
        finally:
            if not all(bool(row.isfinite().all()) for row in rows):
                self.session.clear(table)
            self.blocks.free(owner)
        return torch.cat(rows)

    def capture(self) -> None:
        """Captures the decode steps of all batch sizes now, with a progress bar, instead of each
        when it first comes up (a fraction of a second)."""
        self.session.capture_all(partial(track, description="capturing decode steps"))

    def add_request(self, prompt: Prompt, params: SamplingParams = GREEDY) -> int:
        """Queues a request and returns its id; `step` then serves it. Raises `InputError`."""
        return self._enqueue(self._request(prompt, params))

    def abort(self, request_id: int) -> None:
        """Ends a request and frees its blocks; an unknown or finished id is fine."""
        request = self._requests.pop(request_id, None)
        for sequence in request.sequences if request else ():
            if sequence.finish_reason is None:
                sequence.finish_reason = "abort"
                self.session.clear(self.blocks.table(sequence.id))
                self.scheduler.remove(sequence)

    def step(self) -> list[Delta]:
        """Runs one step for all requests: what it added to each sequence that got a token.

        With `overlap` that is what the step before added, and this one is on its way.
        """
        flight = self._launch()
        if self._overlap:
            flight, self._flight = self._flight, flight
        return [] if flight is None else self._read(flight)

    def _launch(self) -> Flight | None:
        """Starts the next step; None where there is nothing to do."""
        scheduled = self.scheduler.schedule()
        if not scheduled:
            return None
        last = self._flight
        sources = {} if last is None else {id(s): row for row, s in enumerate(last.sequences)}
        chunks, sampled = [], []
        for item in scheduled:
            sequence, start = item.sequence, item.sequence.num_computed
            final = item.num_tokens == sequence.num_pending
            tokens: Sequence[int] = sequence.token_ids[start : start + item.num_tokens]
            source = -1
            if not tokens:  # it is on the device still
                tokens, source = [0], sources[id(sequence)]
            rows = [item.num_tokens - 1] if final else []
            chunks.append(Chunk(tokens, start, list(self.blocks.table(sequence.id)), rows, source))
            if final:
                sampled.append(sequence)
        logits = self.session.step(chunks, None if last is None else last.tokens)
        for item in scheduled:
            item.sequence.num_computed += item.num_tokens
        tokens_there = self.sampler.draw(logits, sampled) if sampled else torch.empty(0).long()
        for sequence in sampled:
            sequence.num_unread += 1
        return Flight.of(sampled, tokens_there)

    def _read(self, flight: Flight) -> list[Delta]:
        """Waits for a step's tokens and hands them to their sequences."""
        deltas = []
        for sequence, token in zip(flight.sequences, flight.read(), strict=True):
            sequence.num_unread -= 1
            if sequence.finish_reason is None:  # else it had ended before, or was aborted
                deltas.append(self._append(sequence, None if token < 0 else token))
        return deltas

    def _append(self, sequence: Running, token: int | None) -> Delta:
        """The sampled token -> text, and whether the sequence ends with it."""
        reason: FinishReason | None = "error"
        if token is None:
            text = sequence.stream.finish()
            self.session.clear(self.blocks.table(sequence.id))
        else:
            sequence.token_ids.append(token)
            text, reason = self._text(sequence, token)
        sequence.text += text
        new = () if token is None else (token,)
        delta = Delta(sequence.request_id, sequence.index, text, new, reason)
        request = self._requests[sequence.request_id]
        request.deltas.append(delta)
        if reason is not None:
            sequence.finish_reason = reason
            self.scheduler.remove(sequence)
            if request.finished:
                del self._requests[request.id]
        return delta

    def _text(self, sequence: Running, token: int) -> tuple[str, FinishReason | None]:
        params = sequence.params
        wanted = token in params.stop_token_ids
        if wanted or (token in self._eos and not params.ignore_eos):
            if not (wanted and params.include_stop):
                return sequence.stream.finish(stop_token=token), "stop"
            text, stopped = sequence.stream.push(token)
            return text if stopped else text + sequence.stream.finish(), "stop"
        text, stopped = sequence.stream.push(token)
        if stopped:
            return text, "stop"
        if len(sequence.token_ids) - sequence.num_prompt == sequence.max_tokens:
            return text + sequence.stream.finish(), "length"
        return text, None

    def _deltas(self, request: Request) -> Iterator[Delta]:
        self._enqueue(request)
        try:
            while request.id in self._requests or request.deltas:
                if not request.deltas:
                    self.step()
                while request.deltas:
                    yield request.deltas.popleft()
        finally:
            self.abort(request.id)

    def _enqueue(self, request: Request) -> int:
        self._requests[request.id] = request
        for sequence in request.sequences:
            self.scheduler.add(sequence)
        return request.id

    def _request(self, prompt: Prompt, params: SamplingParams, where: str = "") -> Request:
        """Checks a prompt against the engine; nothing is queued yet."""
        token_ids = prompt_ids(self.tokenizer, prompt, self.manifest.vocab_size, where)
        room = self.max_len - len(token_ids)
        wanted = params.max_tokens
        if room < 1 or (wanted is not None and wanted > room):
            more = "" if wanted is None else f" + max_tokens {wanted}"
            raise InputError(
                f"{where}{len(token_ids)} prompt tokens{more}, and a sequence may have "
                f"{self.max_len} with at least one of them new (engine's max_len "
                f"{self.manifest.limits.max_len}, {self.blocks.num_blocks} blocks of "
                f"{self.blocks.block_size}): shorten the request, or build with a larger --max-len"
            )
        request_id = next(self._request_ids)
        sequences = [
            Running(
                id=next(self._sequence_ids),
                request_id=request_id,
                index=index,
                token_ids=list(token_ids),
                num_prompt=len(token_ids),
                max_tokens=room if wanted is None else wanted,
                params=params,
                key=make_key(params.seed, index),
                generator=make_generator(params.seed, index),
                stream=TextStream(self.tokenizer, params.stop, params.include_stop),
            )
            for index in range(params.n)
        ]
        return Request(request_id, prompt if isinstance(prompt, str) else None, sequences)


def default_blocks(manifest: Manifest, block_size: int, max_batch: int, memory: int) -> int:
    """Blocks for `max_batch` sequences of full length, or as many as `memory` bytes hold of them.

    Never fewer than one such sequence needs on the CPU; on a GPU that much may not be there.
    """
    one = -(-manifest.limits.max_len // block_size)
    fits = min(one * max_batch, memory // (block_size * manifest.kv.token_bytes))
    return max(one if manifest.device == "cpu" else 1, fits)


def _option(name: str, value: int | None, default: int, most: int | None) -> int:
    if value is None:
        return default
    if not isinstance(value, int) or value < 1 or (most is not None and value > most):
        expected = "at least 1" if most is None else f"1 to {most} (what the engine was built for)"
        raise InputError(f"{name} is {value!r}; {expected} was expected")
    return value
