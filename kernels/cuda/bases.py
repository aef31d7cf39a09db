"""`orthogonalize` on a GPU."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..bases import orthogonalize
from ..checks import WIDE
from ..factors import Factors
from . import module
from .module import packed

RANKS = (4, 8, 16, 32)  # of which there are kernels
CHUNK_ROWS, MOST_CHUNKS = 256, 128
TILE = 4
TRIANGLE_BYTES = 4488


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
