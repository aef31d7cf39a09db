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
        """Return the state of a bucket.

        Args:
            layout: the parameters of the bucket.

        Returns:
            A dataclass of the leaves of `gradwire.compress.state.tree`, or None.
        """

    def reduce(self, grad: Tensor, state: Any, residual: Residual | None = None) -> Program[Tensor]:
        """Return the program that averages a bucket over ranks.

        Args:
            grad: this rank's gradients, flat. The program may overwrite them, and returns the average in their place
                if it can.
            state: the state that `init` returned. Its numbers change by `update()` of its leaves, so that a step can
                be undone.
            residual: the residual of error feedback; None means no error feedback. The program adds `residual.before`
                to `grad` and writes all of the new residual to `residual.after`. The two may share memory; if not,
                `before` stays as it is. A residual may be wider than `grad`.

        Returns:
            The program, whose result is the average.
        """


@runtime_checkable
class Codec(Protocol):
    """A method of one round: what one rank's numbers look like on the wire.

    The flat vector is cut into rows of `length` elements (the last may be shorter), each encoded by itself into
    `row_bytes(length)` bytes, so that an adapter can send rows to different ranks.
    """

    def row_length(self, numel: int) -> int:
        """Return the smallest row length, at least `numel`, that this codec can encode.

        Args:
            numel: the number of elements.

        Returns:
            Elements per row.
        """

    def row_bytes(self, length: int) -> int:
        """Return the bytes of an encoded row.

        Args:
            length: elements per row.

        Returns:
            Bytes per row.
        """

    def encode(self, grad: Tensor, residual: Residual | None, rows: Tensor, length: int) -> None:
        """Write the codes of `grad` (+ `residual.before`) to `rows`, and what they lack to `residual.after`.

        Args:
            grad: the flat vector, which may be overwritten.
            residual: the residual of error feedback, or None.
            rows: the codes, (rows, bytes) uint8.
            length: elements per row.
        """

    def decode(self, rows: Tensor, out: Tensor, length: int) -> None:
        """Write the mean of several ranks' codes to `out`.

        Args:
            rows: the codes, (ranks, rows, bytes) uint8.
            out: the flat vector.
            length: elements per row.
        """


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
