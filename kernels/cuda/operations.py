"""The operations of CUDA C++: what each passes on to its kernels."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..argument_checks import FLOATS, WIDE
from ..bases import orthogonalize
from ..operands import Factors, Residual
from ..selection import select_largest
from . import module
from .module import FORMATS, addresses, packed

RANKS = (4, 8, 16, 32)  # of which there are kernels
CHUNK_ROWS, MOST_CHUNKS = 256, 128
TILE = 4
TRIANGLE_BYTES = 4488
SELECTION_WARPS = 16  # of a thread block
SEGMENTS = 8192  # of a row, about: enough warps for any GPU
SMALLEST_SEGMENT, LARGEST_SEGMENT = 1 << 8, 1 << 15
THREAD_BLOCKS = 4  # for each multiprocessor
ROW_WORDS = 6  # of 32 bits, which a row's state takes
BINS = 4096 + 1024 + 512  # of a row's histograms
SEGMENT_WORDS = 3
LONGEST = 1 << 32
FORMAT_NUMBERS = {dtype: number for number, dtype in enumerate(FORMATS)}


def _rank(factors: Factors) -> int:
    return max((m.rank for m in factors.matrices), default=0)


def _too_wide(p: Tensor, factors: Factors) -> str:
    return f"ranks above {RANKS[-1]}" if _rank(factors) > RANKS[-1] else ""


@orthogonalize.implement(module.NAME, {"p": WIDE}, unless=_too_wide)
def orthonormal(p: Tensor, factors: Factors) -> None:
    """`orthogonalize`: three kernels, whatever the number of factors."""
    rank = _rank(factors)
    table, chunks = _table(factors, p.device)
    count, tiles = len(factors.matrices), -(-rank // TILE)
    products_size = tiles * (tiles + 1) // 2 * TILE * TILE
    products = torch.empty(chunks * products_size, dtype=torch.float64, device=p.device)
    triangles = torch.empty(count * TRIANGLE_BYTES, dtype=torch.uint8, device=p.device)
    finished = torch.zeros(2 * count, dtype=torch.int32, device=p.device)
    arguments = packed(
        p=p.data_ptr(),
        factors=table.data_ptr(),
        owners=table[6 * count :].data_ptr(),
        products=products.data_ptr(),
        products_size=products_size,
        triangles=triangles.data_ptr(),
        finished=finished.data_ptr(),
    )
    fitting = next(each for each in RANKS if rank <= each)
    kernels = ("basis_gram", f"basis_solve_{fitting}", f"basis_finish_{fitting}")
    module.launch("bases", p.device, arguments, [(kernel, chunks) for kernel in kernels])


@functools.lru_cache(maxsize=1024)
def _table(factors: Factors, device: torch.device) -> tuple[Tensor, int]:
    """Six numbers a factor, then the factor of each chunk; and the number of chunks."""
    numbers: list[int] = []
    owners: list[int] = []
    for owner, (m, offset) in enumerate(zip(factors.matrices, factors.left_offsets, strict=False)):
        rows = max(CHUNK_ROWS, -(-m.rows // MOST_CHUNKS))
        chunks = -(-m.rows // rows)
        numbers += [offset, m.rows, m.rank, len(owners), chunks, rows]
        owners += [owner] * chunks
    return torch.tensor(numbers + owners, dtype=torch.int64, device="cpu").to(device), len(owners)


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
    parts = min(-(-segments // SELECTION_WARPS), max(1, THREAD_BLOCKS * module.processors(grad.device) // max(1, rows)))
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
