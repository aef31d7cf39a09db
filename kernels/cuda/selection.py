"""`select_largest` on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import FLOATS, WIDE
from ..residual import Residual
from ..selection import select_largest
from . import module
from .module import FORMATS, addresses, packed

WARPS = 16  # of a thread block
SEGMENTS = 8192  # of a row, about: enough warps for any GPU
SMALLEST_SEGMENT, LARGEST_SEGMENT = 1 << 8, 1 << 15
THREAD_BLOCKS = 4  # for each multiprocessor
ROW_WORDS = 6  # of 32 bits, which a row's state takes
BINS = 4096 + 1024 + 512  # of a row's histograms
SEGMENT_WORDS = 3
LONGEST = 1 << 32
FORMAT_NUMBERS = {dtype: number for number, dtype in enumerate(FORMATS)}


def _too_long(grad: Tensor, residual: Residual | None, indices: Tensor, values: Tensor, length: int) -> str:
    return "rows of 2^32 elements or more" if length >= LONGEST else ""


@select_largest.implement(module.NAME, {"grad": FLOATS, "residual": WIDE, "values": FLOATS}, unless=_too_long)
def select(grad: Tensor, residual: Residual | None, indices: Tensor, values: Tensor, length: int) -> None:
    """`select_largest`: two passes over the vector, and three over the few elements that may be selected.

    Takes 2 bytes an element of memory while it runs.
    """
    rows, k = values.shape
    segment = segment_of(length)
    segments = -(-length // segment)
    parts = min(-(-segments // WARPS), max(1, THREAD_BLOCKS * module.processors(grad.device) // max(1, rows)))
    zeros = torch.zeros(rows * (ROW_WORDS + BINS), dtype=torch.int32, device=grad.device)
    counts = torch.empty(rows * segments * SEGMENT_WORDS, dtype=torch.int32, device=grad.device)
    survivors = torch.empty(grad.numel(), dtype=torch.int16, device=grad.device)
    arguments = packed(
        grad=grad.data_ptr(),
        **addresses(residual),
        indices=indices.data_ptr(),
        wide_indices=indices.dtype == torch.int64,
        indices_stride=indices.stride(0),
        values=values.data_ptr(),
        value_format=FORMAT_NUMBERS[values.dtype],
        values_stride=values.stride(0),
        numel=grad.numel(),
        length=length,
        k=k,
        segment=segment,
        segments=segments,
        parts=parts,
        rows=zeros.data_ptr(),
        histograms=zeros[rows * ROW_WORDS :].data_ptr(),
        counts=counts.data_ptr(),
        survivors=survivors.data_ptr(),
    )
    stages = ("add", "collect", "refine", "count", "write")
    number = FORMATS[grad.dtype]
    kernels = [(f"select_{stage}_{number}", rows * parts) for stage in stages]
    module.launch("selection", grad.device, arguments, kernels)


def segment_of(length: int) -> int:
    """Elements of a segment, a power of two: a warp has one at a time."""
    wanted = 1 << ((length - 1) // SEGMENTS).bit_length()
    return min(max(wanted, SMALLEST_SEGMENT), LARGEST_SEGMENT)
