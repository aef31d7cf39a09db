"""The elements that come up to the largest of their bin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...kernels import Residual
from ..algorithms.adapters import gathered
from ..protocol.compressor import Traits
from ..protocol.layout import working_dtype
from ..protocol.registry import register
from .capped import COUNT_BYTES, Capped, chosen_places, first_place


@register("adacomp", adapter=gathered, traits=Traits(takes_16_bits=True, draws=True))
@dataclass(frozen=True)
class AdaComp(Capped):
    """The elements that one more gradient would lift to the largest of their bin, as signs times one scale; the rest waits.

    Chen et al. 2018, AdaComp, algorithm 2. With the residual G, this gradient d in it, an element is sent where `|G + d|` is
    at least the largest `|G|` of its bin. All are sent as the mean over bins of those largest, with their signs. `bin`:
    elements of each (the paper: 50 for convolutions, 500 for the rest). `cap`: the part of a bucket that the payload has
    room for; what does not fit waits, too. An index of 4 bytes an element has its sign.
    """

    bin: int = 500
    method: ClassVar[str] = "adacomp"
    slot_bytes: ClassVar[int] = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bin < 1:
            raise ValueError(f"adacomp:bin is at least 1, got {self.bin}")

    def encode(
        self, grad: Tensor, residual: Residual | None, rows: Tensor, length: int, key: int = 0, counter: int = 0
    ) -> None:
        """Signed indices and the scale of each row; `residual` keeps the rest."""
        values = grad.to(working_dtype(grad.dtype), copy=True) if residual is None else residual.plus(grad)
        for row, part, new in zip(rows, values.split(length), grad.split(length), strict=False):
            head, indices = self._parts(row, length)
            chosen, scale = self._chosen(part, new)
            places, number = chosen_places(chosen, len(indices), first_place(key, counter, len(part)))
            negative = part.index_select(0, places) < 0
            head.copy_(torch.stack([number.to(torch.int32), scale.view(torch.int32)]))
            indices.copy_(torch.where(negative, ~places, places))
            self._add(part, row, length, -1)

    def _chosen(self, values: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the elements to send, those that are not finite first of all; the scale in float32."""
        size = values.numel()
        bins = pad(values, (0, -size % self.bin)).view(-1, self.bin)
        largest = bins.abs().amax(1, keepdim=True)
        below = (values + grad).abs() < largest.expand_as(bins).reshape(-1)[:size]
        return ~below & (values != 0), largest.mean().float()

    def _add(self, flat: Tensor, row: Tensor, length: int, factor: int) -> None:
        """Add `factor` times what a row says."""
        head, indices = self._parts(row, length)
        number, scale = head[0], head[1:].view(torch.float32)
        there = torch.arange(len(indices), device=flat.device) < number
        signed = torch.where(indices < 0, -factor * scale, factor * scale)
        flat.index_add_(0, torch.where(indices < 0, ~indices, indices), torch.where(there, signed, 0).to(flat.dtype))

    def _parts(self, row: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Views of the count with the scale's bits behind it, and of the indices of an encoded row."""
        end = COUNT_BYTES + 4 * self.slots(length)
        return row[:COUNT_BYTES].view(torch.int32), row[COUNT_BYTES:end].view(torch.int32)
