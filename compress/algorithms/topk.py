"""The largest elements only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ... import kernels
from ...kernels import Residual
from ..protocol.compressor import Traits
from ..protocol.registry import register
from .adapters import Scope, check_scope, gathered
from .payload import padded, rounded_once

VALUE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


@register("topk", adapter=gathered, traits=Traits(takes_16_bits=True))
@dataclass(frozen=True)
class TopK:
    """The elements of largest magnitude, values and indices in one all-gather; the rest waits in the residual.

    Aji and Heafield 2017; Lin et al. 2018 without momentum correction. `ratio`: the part of a bucket's elements that is
    sent, rounded up; `k`: their number a bucket instead. `value_dtype`: fp32 or fp16; what fp16 rounds away waits too.
    `scope`: the largest of the bucket, or of each tensor in it. Exact, ties go to the lower index. A row on the wire: its
    indices, then its values.
    """

    ratio: float = 0.01
    k: int | None = None
    value_dtype: Literal["fp32", "fp16"] = "fp32"
    scope: Scope = "bucket"

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"topk:ratio is above 0 and at most 1, got {self.ratio}")
        if self.k is not None and self.k < 1:
            raise ValueError(f"topk:k is at least 1, got {self.k}")
        check_scope("topk", self.scope)

    def row_length(self, numel: int) -> int:
        """Any length will do."""
        return numel

    def selected(self, length: int) -> int:
        """Return how many of `length` elements are sent."""
        return min(length, self.k or math.ceil(self.ratio * length))

    def row_bytes(self, length: int) -> int:
        """Indices of 4 bytes (8 beyond 2^31 elements) and values, padded as rows are."""
        return padded(self.selected(length) * (_index_dtype(length).itemsize + VALUE_DTYPES[self.value_dtype].itemsize))

    def encode(self, grad: Tensor, residual: Residual | None, rows: Tensor, length: int) -> None:
        """The largest elements of each row; `residual` keeps the rest."""
        kernels.select_largest(grad, residual, *self._parts(rows, length), length)

    def decode(self, rows: Tensor, out: Tensor, length: int, residual: Tensor | None = None) -> None:
        """The mean over voters, zero where no one sent; what `out` rounds away is added to `residual`."""

        def write(wide: Tensor) -> None:  # several voters may meet at an element
            kernels.scatter_mean(*self._parts(rows, length), wide, length, ascending=True)

        rounded_once(out, residual, write)

    def indices(self, rows: Tensor, length: int) -> Tensor:
        """Return the indices in encoded rows of `length`, all in one, counted from the first row's first."""
        indices = self._parts(rows, length)[0].long()
        return indices.add_(torch.arange(len(rows), device=rows.device).unsqueeze(1) * length).view(-1)

    def _parts(self, rows: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Views of the indices and the values of encoded rows."""
        index, value = _index_dtype(length), VALUE_DTYPES[self.value_dtype]
        middle = self.selected(length) * index.itemsize
        end = middle + self.selected(length) * value.itemsize
        return rows[..., :middle].view(index), rows[..., middle:end].view(value)


def _index_dtype(length: int) -> torch.dtype:
    return torch.int32 if length <= torch.iinfo(torch.int32).max else torch.int64
