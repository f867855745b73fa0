"""How weights are to become INT4, as the user says it. Plain values: needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from seekforge.kernels.errors import InputError
from seekforge.kernels.int4_groups import MIN_GROUP

QUANTISATIONS = ("rtn-int4", "awq-int4")
HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class Int4Options:
    """group_size: wanted; `group_size_of` says which is used where it does not divide. skip:
    modules left as they are, by dotted names or their parts: "lm_head", "mlp.down_proj". only:
    checkpoint tensors that are INT4 already; None: any may become so."""

    group_size: int = 128
    symmetric: bool = True
    skip: tuple[str, ...] = (HEAD,)
    only: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if self.group_size < MIN_GROUP or self.group_size % 2:
            raise InputError(
                f"--group-size {self.group_size}: an even number from {MIN_GROUP} on was expected; "
                "32, 64 and 128 are usual"
            )
