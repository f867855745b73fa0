"""Logits -> the next token of each sequence, on a GPU: neither logits nor tokens cross to the host.

In: logits [R, V] on the GPU in the engine's dtype, the sequences of the rows. Out: token ids there.
Nothing waits for the device. The rules are those of sampling.py; what differs is said here:

    random numbers  Philox with the sequence's key and the token's place in the output, so a seed
                    gives other draws than on the CPU; on both it gives the same ones again,
                    whatever runs beside it, and after a preemption too
    likelihoods     integers of 40 bits (kernels/sampling.py): tokens 10^12 times less likely than
                    the likeliest are never drawn; temperatures and shares are fp32
    penalties       counts of each sequence's tokens stay on the device
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from seekforge.kernels.sampling import sample_triton
from seekforge.kernels.sampling_greedy import greedy_triton
from seekforge.kernels.sampling_penalties import count_tokens_triton, penalise_triton
from seekforge.runtime.decode_inputs import on_device
from seekforge.runtime.sampling import Sampled


class DeviceSampler:
    """Chooses among the ids the tokenizer knows, for up to `max_rows` sequences at a time."""

    def __init__(
        self, vocab_size: int, known_ids: Iterable[int], max_rows: int, device: torch.device
    ) -> None:
        banned = torch.ones(vocab_size, dtype=torch.bool)
        banned[[i for i in known_ids if 0 <= i < vocab_size]] = False
        self.device = device
        self._banned = banned.to(device) if bool(banned.any()) else None
        self._max_rows = max_rows
        self._counts: Tensor | None = None  # [max_rows, vocab], made for the first penalty
        self._slots: dict[Sampled, int] = {}  # a sequence's row of counts
        self._rows: list[Sampled] = []  # the rows that `_columns` are of
        self._columns: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))

    def draw(self, logits: Tensor, sequences: Sequence[Sampled]) -> Tensor:
        """The next token of each sequence, int64 [R]; -1 where the logits are no distribution."""
        params = [sequence.params for sequence in sequences]
        penalties = any(p.penalties for p in params)
        if not penalties and all(p.temperature == 0 for p in params):
            return greedy_triton(logits, self._banned)
        real, whole = self._parameters(sequences)
        temperature, top_p, min_p, *each = real
        if penalties:
            slots = self._assign(sequences, logits.shape[1])
            assert self._counts is not None
            logits = penalise_triton(logits, self._counts, slots, *each)
        positions = on_device(torch.tensor([s.num_output for s in sequences]), self.device)
        tokens = sample_triton(
            logits, temperature, whole[0].int() if any(p.top_k > 0 for p in params) else None,
            top_p, min_p, whole[1], positions, self._banned,
        )  # fmt: skip
        if penalties:
            assert self._counts is not None
            count_tokens_triton(self._counts, slots, tokens, prompt=False)
        return tokens

    def _parameters(self, sequences: Sequence[Sampled]) -> tuple[Tensor, Tensor]:
        """(fp32 [6, R], int64 [2, R]) of the rows, kept while these are the same."""
        if self._rows != list(sequences):
            self._rows = list(sequences)
            params = [sequence.params for sequence in sequences]
            real = [
                (
                    p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty,
                    p.frequency_penalty,
                )
                for p in params
            ]  # fmt: skip
            whole = [
                (min(max(sequence.params.top_k, 0), 1 << 30), sequence.key)
                for sequence in sequences
            ]
            self._columns = self._columns_of(real), self._columns_of(whole)
        return self._columns

    def _columns_of(self, rows: Sequence[tuple[float, ...]]) -> Tensor:
        """The rows' values by column, each from an address that is a multiple of 16: Triton
        compiles a kernel anew for one that is not."""
        columns = torch.tensor(rows).T
        padded = torch.nn.functional.pad(columns, (0, -len(rows) % 4))
        return on_device(padded.contiguous(), self.device)[:, : len(rows)]

    def _assign(self, sequences: Sequence[Sampled], vocab: int) -> Tensor:
        """Each row's slot in the counts, -1 without penalties. A new one is filled with what the
        host knows of the sequence: before its first draw, and after a preemption, that is all."""
        if self._counts is None:
            shape = (self._max_rows, vocab)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
        slots = []
        for sequence in sequences:
            if sequence.params.penalties and sequence not in self._slots:
                self._slots = {s: i for s, i in self._slots.items() if s in sequences}
                taken = set(self._slots.values())
                slot = next(i for i in range(self._max_rows) if i not in taken)
                self._slots[sequence] = slot
                self._counts[slot].zero_()
                for ids, prompt in (
                    (sequence.token_ids[: sequence.num_prompt], True),
                    (sequence.token_ids[sequence.num_prompt :], False),
                ):
                    tokens = on_device(torch.tensor(ids, dtype=torch.int64), self.device)
                    count_tokens_triton(self._counts, torch.full_like(tokens, slot), tokens, prompt)
            slots.append(self._slots.get(sequence, -1))
        return on_device(torch.tensor(slots), self.device)
