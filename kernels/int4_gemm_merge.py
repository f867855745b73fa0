"""The sum of the parts of a product whose input features were shared among programs.

    parts [splits, rows, out_features] fp32, bias [out_features] or None -> y [rows, out_features]

In a fixed order, so that a run repeats bit by bit. On Hopper and later the launch overlaps with the
end of the kernel that wrote the parts (programmatic dependent launch).
"""

from __future__ import annotations

from torch import Tensor

from seekforge.kernels.triton_support import jit, tl
from seekforge.kernels.tuning import overlaps_launches

BLOCK = 1024


@jit
def merge_parts_kernel(  # type: ignore[no-untyped-def]
    parts, bias, y, count, out_features, SPLITS: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + split * count + at, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + at % out_features, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=inside)


def merge_parts(parts: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """Fills y, contiguous."""
    overlap = overlaps_launches(y.device)
    merge_parts_kernel[(-(-y.numel() // BLOCK),)](
        parts, parts if bias is None else bias, y, y.numel(), y.shape[-1],
        SPLITS=parts.shape[0], BIAS=bias is not None, BLOCK=BLOCK, OVERLAP=overlap, num_warps=4,
        **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip
