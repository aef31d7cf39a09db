"""Rows of parameters: C++ reads a row up to its first element other than zero."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..checks import FLOATS
from ..marking import clear_rows, mark_rows
from ..rows import Rows
from .library import NAME, library


@mark_rows.implement(NAME, {"values": FLOATS})
def _mark_rows(values: Tensor, used: Tensor, rows: Rows) -> None:
    library().mark_rows(values, used, *_packed(rows))


@clear_rows.implement(NAME, {"values": FLOATS})
def _clear_rows(values: Tensor, used: Tensor, rows: Rows) -> None:
    library().clear_rows(values, used, *_packed(rows))


@functools.lru_cache(maxsize=1024)
def _packed(rows: Rows) -> tuple[Tensor, int]:
    """Four int64 for each block, and how many blocks there are."""
    blocks = [(block.start, block.rows, block.size, block.number) for block in rows.blocks]
    return torch.tensor(blocks, dtype=torch.int64, device="cpu"), len(blocks)
