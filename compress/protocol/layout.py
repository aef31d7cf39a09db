"""The layout of parameters in a flat buffer; the ranks of a training, their hosts, and those that take part in a request."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Literal, TypeAlias

import torch
from torch import Tensor

# All ranks; those of this host; those of one place on every host; this rank alone.
Scope: TypeAlias = Literal["all", "host", "across", "self"]


@dataclass(frozen=True)
class Ranks:
    """The ranks of a training. Ranks of a host have consecutive numbers.

    Attributes:
        world_size: the number of ranks.
        rank: this rank's number.
        per_host: the number of ranks on each host.

    Raises:
        ValueError: `per_host` does not divide `world_size`.

    >>> ranks = Ranks(world_size=8, rank=5, per_host=2)
    >>> [ranks.members(scope) for scope in ("all", "host", "across")]
    [range(0, 8), range(4, 6), range(1, 8, 2)]
    """

    world_size: int = 1
    rank: int = 0
    per_host: int = 1

    def __post_init__(self) -> None:
        if self.per_host < 1 or self.world_size % self.per_host:
            raise ValueError(f"per_host divides the number of ranks, {self.world_size}; got {self.per_host}")

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return self.world_size // self.per_host

    @property
    def place(self) -> int:
        """The place of this rank in its host."""
        return self.rank % self.per_host

    def members(self, scope: Scope) -> range:
        """Return the ranks that take part in this rank's requests of a scope.

        Args:
            scope: "all" ranks, those of this "host", those of the same place on each host ("across"), or "self".

        Returns:
            The ranks' numbers.
        """
        if scope == "self":
            return range(self.rank, self.rank + 1)
        if scope == "host":
            first = self.rank - self.place
            return range(first, first + self.per_host)
        if scope == "across":
            return range(self.rank % self.per_host, self.world_size, self.per_host)
        return range(self.world_size)


@dataclass(frozen=True)
class Layout:
    """The places of parameters' gradients in a flat buffer, one behind the other.

    Attributes:
        names: the parameters' names.
        shapes: the parameters' shapes in memory order: a channels-last convolution (out, in, k, k) has (out, k, k,
            in).
        dtype: the dtype of the buffer.
        device: the device of the buffer.
        ranks: the ranks that share the bucket.
        starts: if an entry is only a part of its parameter, the parameter's element that it starts with, per entry.
        row_sizes: if given, the elements in a row of the whole parameter, per entry.

    Raises:
        ValueError: `starts` does not fit `names`.

    >>> layout = Layout(("bias", "weight"), ((3,), (2, 3)), torch.float32, torch.device("cpu"))
    >>> layout.numel, layout.offsets
    (9, (0, 3))
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device: torch.device
    ranks: Ranks = Ranks()
    starts: tuple[int, ...] = ()
    row_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.starts and (len(self.starts) != len(self.names) or min(self.starts) < 0):
            raise ValueError(
                f"starts has an element, 0 or above, for each of {len(self.names)} names; got {self.starts}"
            )
        if self.starts and len(set(self.names)) < len(self.names):
            raise ValueError(f"a layout has one part of a parameter at most, got {self.names}")

    def select(self, indices: Iterable[int]) -> Layout:
        """Return the layout of some entries.

        Args:
            indices: the entries' places.

        Returns:
            A layout in which these entries lie one behind the other.
        """
        places = tuple(indices)
        names = tuple(self.names[i] for i in places)
        shapes = tuple(self.shapes[i] for i in places)
        starts = tuple(self.starts[i] for i in places) if self.starts else ()
        row_sizes = tuple(self.row_sizes[i] for i in places) if self.row_sizes else ()
        return dataclasses.replace(self, names=names, shapes=shapes, starts=starts, row_sizes=row_sizes)

    def start(self, name: str) -> int | None:
        """Return the first element of a parameter in its entry.

        Args:
            name: the parameter's name.

        Returns:
            The element; None if the entry is the whole parameter.
        """
        return self.starts[self.names.index(name)] if self.starts else None

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Elements of a row of each parameter, along its first dimension; 0 for vectors, which count as one."""
        return self.row_sizes or tuple(prod(shape[1:]) if len(shape) > 1 else 0 for shape in self.shapes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each parameter."""
        return tuple(prod(shape) for shape in self.shapes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First element of each parameter in the flat buffer."""
        return tuple(accumulate(self.sizes, initial=0))[:-1]

    @cached_property
    def numel(self) -> int:
        """Elements of the flat buffer."""
        return sum(self.sizes)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return each parameter's part of a buffer.

        Args:
            flat: the buffer.

        Returns:
            {name: view in the parameter's shape}, sharing memory with `flat`.
        """
        parts = flat.split(self.sizes) if self.names else ()
        return {name: part.view(shape) for name, shape, part in zip(self.names, self.shapes, parts, strict=True)}

    def widened(self) -> Layout:
        """Return the same layout in the dtype of arithmetic: float32 for 16-bit types."""
        return dataclasses.replace(self, dtype=working_dtype(self.dtype))


@functools.cache
def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for 16-bit types, else the type itself."""
    return torch.float32 if dtype.itemsize < 4 else dtype
