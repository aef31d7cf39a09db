"""The interfaces of compressors and codecs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ...kernels import Residual
from .layout import Layout
from .requests import Program


@runtime_checkable
class Compressor(Protocol):
    """An algorithm that averages a bucket over ranks. A frozen dataclass of its own options; buckets share it."""

    def init(self, layout: Layout) -> Any:
        """Return the state of a bucket: a dataclass of `gradwire.compress.state.tree` leaves, or None."""

    def reduce(self, grad: Tensor, state: Any, residual: Residual | None = None) -> Program[Tensor]:
        """The average over ranks of `grad` (+ `residual.before`), flat, in place of `grad` where it can.

        What this rank holds back now goes to `residual.after`, all of it, which may be the memory of `before`; where it is
        not, `before` stays as it is, so that the step can be taken back. None means no error feedback. A residual may be
        wider than `grad`. The state's own numbers change by `update()` of its leaves, for the same reason.
        """


@runtime_checkable
class Codec(Protocol):
    """A method of one round: what one rank's numbers look like on the wire.

    The flat vector is cut into rows of `length` elements (the last may be shorter), each encoded by itself into
    `row_bytes(length)` bytes, so that an adapter can send rows to different ranks.
    """

    def row_length(self, numel: int) -> int:
        """The smallest length of a row, at least `numel`, that this codec can encode."""

    def row_bytes(self, length: int) -> int:
        """Bytes of an encoded row of `length` elements."""

    def encode(self, grad: Tensor, residual: Residual | None, rows: Tensor, length: int) -> None:
        """Write `grad` (+ `residual.before`) to `rows`, (rows, bytes) uint8, and to `residual.after` what `rows` lacks.

        `grad` may be overwritten.
        """

    def decode(self, rows: Tensor, out: Tensor, length: int) -> None:
        """The mean over voters of `rows`, (voters, rows, bytes), into the flat `out`."""


def children(compressor: Any) -> Iterator[Compressor]:
    """The compressors directly inside a wrapper: its dataclass fields, and tuples in them, that are compressors."""
    if dataclasses.is_dataclass(compressor):
        for field in dataclasses.fields(compressor):
            yield from _compressors_in(getattr(compressor, field.name))


def inside(compressor: Any) -> Iterator[Any]:
    """A compressor and all that are inside of it."""
    yield compressor
    for child in children(compressor):
        yield from inside(child)


def _compressors_in(value: Any) -> Iterator[Compressor]:
    if isinstance(value, Compressor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _compressors_in(item)
