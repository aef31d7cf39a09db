"""Payloads whose length depends on values: as many elements as they have, up to a cap that all ranks know beforehand."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..algorithms.adapters import Scope, check_scope
from ..algorithms.payload import padded, rounded_once

COUNT_BYTES = 8


@dataclass(frozen=True)
class Capped:
    """A row on the wire: how many elements are sent, then room for `cap` of all elements, rounded up.

    What is chosen beyond the cap waits in the residual; each step begins at another element, so that none waits forever.
    `scope`: the bucket, or each tensor in it by itself.
    """

    cap: float = 0.02
    scope: Scope = "bucket"
    method: ClassVar[str]
    slot_bytes: ClassVar[int]

    def __post_init__(self) -> None:
        if not 0 < self.cap <= 1:
            raise ValueError(f"{self.method}:cap is above 0 and at most 1, got {self.cap}")
        check_scope(self.method, self.scope)

    def row_length(self, numel: int) -> int:
        """Any length that an index of 4 bytes reaches."""
        if numel > torch.iinfo(torch.int32).max:
            raise ValueError(f"{self.method} takes buckets of up to 2^31 - 1 elements, got {numel}")
        return numel

    def slots(self, length: int) -> int:
        """Return how many of `length` elements are sent at most."""
        return math.ceil(self.cap * length)

    def row_bytes(self, length: int) -> int:
        """Return the bytes of the count and of all slots, used or not."""
        return padded(COUNT_BYTES + self.slots(length) * self.slot_bytes)

    def decode(self, rows: Tensor, out: Tensor, length: int, residual: Tensor | None = None) -> None:
        """The mean over voters, zero where no one sent; what `out` rounds away is added to `residual`."""

        def write(wide: Tensor) -> None:
            wide.zero_()
            for voter in rows:
                for row, part in zip(voter, wide.split(length), strict=False):
                    self._add(part, row, length, 1)
            wide.div_(len(rows))

        rounded_once(out, residual, write)

    def _add(self, flat: Tensor, row: Tensor, length: int, factor: int) -> None:
        """Add `factor` times what a row of `length` elements says."""
        raise NotImplementedError


def first_place(key: int, counter: int, size: int) -> int:
    """One of `size` places, drawn by SplitMix64 (Steele, Lea, Flood 2014)."""
    state = (key + (counter >> 32) * 0x9E3779B97F4A7C15) % 2**64
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
    return (state ^ state >> 31) % size


def chosen_places(chosen: Tensor, slots: int, start: int) -> tuple[Tensor, Tensor]:
    """The indices of up to `slots` elements that are `chosen`, going round from `start`, and how many they are.

    Without a wait of the host. Slots beyond the number are `start`.
    """
    turned = chosen.roll(-start)
    order = turned.cumsum(0)
    slot = torch.where(turned & (order <= slots), order - 1, slots)
    places = torch.arange(len(chosen), device=chosen.device)
    found = places.new_zeros(slots + 1).scatter_(0, slot, places)[:slots]
    return (found + start) % len(chosen), order[-1].clamp(max=slots)
