"""The elements above a threshold that a sample says."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ... import kernels
from ...kernels import Residual
from ...kernels.quantization import uniform
from ..algorithms.adapters import gathered
from ..protocol.compressor import Traits
from ..protocol.registry import register
from .capped import COUNT_BYTES, Capped, chosen_places, first_place

FEWEST_SAMPLED = 1024  # elements


@register("dropping", adapter=gathered, traits=Traits(takes_16_bits=True, draws=True))
@dataclass(frozen=True)
class Dropping(Capped):
    """The elements above a threshold found on a random sample, values and indices in one all-gather; the rest waits.

    Aji and Heafield 2017, gradient dropping. `ratio`: the part of a bucket's elements that the threshold aims at; `sample`:
    the part that it is found on, 1024 elements at least. `cap`: the part that the payload has room for; what does not fit
    waits, too.
    """

    ratio: float = 0.01
    sample: float = 0.01
    method: ClassVar[str] = "dropping"
    slot_bytes: ClassVar[int] = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("ratio", self.ratio), ("sample", self.sample)):
            if not 0 < value <= 1:
                raise ValueError(f"dropping:{name} is above 0 and at most 1, got {value}")

    def encode(
        self, grad: Tensor, residual: Residual | None, rows: Tensor, length: int, key: int = 0, counter: int = 0
    ) -> None:
        """Write the elements above the threshold of each row; `residual` keeps the rest."""
        values = grad if residual is None else residual.plus(grad)
        alarm = torch.where(kernels.all_finite(values), 0.0, torch.nan)  # what is not finite may not fit
        for row, part in zip(rows, values.split(length), strict=False):
            count, indices, sent = self._parts(row, length)
            above = ~(part.abs() < self._threshold(part, key, counter)) & (part != 0)
            places, number = chosen_places(above, len(indices), first_place(key, counter, len(part)))
            taken = part.index_select(0, places).mul_(torch.arange(len(places), device=part.device) < number)
            count.copy_(number)
            indices.copy_(places)
            sent.copy_(taken + alarm)
            self._add(part, row, length, -1)

    def _threshold(self, values: Tensor, key: int, counter: int) -> Tensor:
        """The magnitude above which `ratio` of a sample lies."""
        size, device = values.numel(), values.device
        count = max(FEWEST_SAMPLED, math.ceil(self.sample * size))
        if count < size:
            values = values.index_select(0, uniform(key, counter, count, device).mul_(size).long().clamp_(max=size - 1))
        return values.abs().topk(math.ceil(self.ratio * values.numel())).values[-1]

    def _add(self, flat: Tensor, row: Tensor, length: int, factor: int) -> None:
        """Add `factor` times what a row says."""
        count, indices, values = self._parts(row, length)
        there = torch.arange(len(indices), device=flat.device) < count
        flat.index_add_(0, indices, torch.where(there, values, 0).to(flat.dtype), alpha=factor)

    def _parts(self, row: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Views of the count, the indices and the values of an encoded row."""
        middle = COUNT_BYTES + 4 * self.slots(length)
        end = middle + 4 * self.slots(length)
        return (
            row[:COUNT_BYTES].view(torch.int64),
            row[COUNT_BYTES:middle].view(torch.int32),
            row[middle:end].view(torch.float32),
        )
