"""Moves of residuals and other state with their parameters, from any order of axes in memory to another."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ...compress.protocol.compressor import Compressor
from ...compress.protocol.layout import Layout
from ...compress.state.tensors import FIRST, PART
from .bucket_memory import CARRIED_OVER, BucketMemory

COMPLEX = -1  # the axis of real and imaginary parts, behind all others


@dataclass(frozen=True)
class Move:
    """A parameter's way from one memory order of its axes into another: `before` and `after`, of more than one element.

    `shape`: in memory, afterwards.
    """

    shape: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int], before: Sequence[int], after: Sequence[int]) -> Move:
        """Return the way of a parameter, whose axis of real and imaginary parts no order lists."""
        pairs = (COMPLEX,) * (sum(size > 1 for size in shape) - len(after))
        return cls(tuple(shape), (*before, *pairs), (*after, *pairs))

    @property
    def shape_before(self) -> tuple[int, ...]:
        """The sizes of the axes in memory, before."""
        sizes = dict(zip(self.after, (size for size in self.shape if size > 1), strict=True))
        before = (sizes[axis] for axis in self.before)
        return tuple(1 if size == 1 else next(before) for size in self.shape)  # those of one element stay in place

    def follow(self, numbers: Tensor) -> Tensor:
        """Return numbers, one for each element, as they lie afterwards; all else as it is."""
        count = 1
        for size in self.shape:
            count *= size
        if numbers.numel() != count or not count:
            return numbers
        longer = [size for size in self.shape_before if size > 1]
        permuted = numbers.reshape(longer).permute([self.before.index(axis) for axis in self.after])
        return permuted.reshape(self.shape if numbers.dim() > 1 else (-1,))


def moved(
    fields: Mapping[str, Tensor], move: Move, compressor: Compressor, layout: Layout, step: int
) -> dict[str, Tensor]:
    """Return the saved fields of a parameter as they lie after a move.

    Numbers of single elements follow these; what ranks share of a matrix stays, as the start of the next iteration. A part
    of the parameter that this rank alone serves is no part of it afterwards: what it holds back is carried to the next
    average.

    Args:
        fields: {field: numbers}.
        move: of the parameter.
        compressor: whose fields they are.
        layout: of the parameter alone.
        step: the steps before.
    """
    if not any(PART in field or field.endswith(FIRST) for field in fields):
        return {field: move.follow(numbers) for field, numbers in fields.items()}
    (name,) = layout.names
    former = BucketMemory(compressor, dataclasses.replace(layout, shapes=(move.shape_before,)), step)
    former.load({name: fields})
    found = {field: each for field, each in former.leaves.averaged().get(name, {}).items() if PART not in field}
    return {field: move.follow(each) for field, each in {**found, CARRIED_OVER: former.held_back()[name]}.items()}
