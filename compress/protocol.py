"""The vocabulary of compressors: requests, programs, layouts.

A compressor is a generator. It yields what this rank gives to a collective and is sent what the collective
returns, so a method of several rounds reads from top to bottom like its paper. Nothing here communicates: the engine
(`gradwire.ddp_core`), the simulator and the dry run (`gradwire.compress.simulate`) each drive the same programs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, get_args, runtime_checkable

import torch
from torch import Tensor

from ..kernels import Residual
from .scopes import Scope, members

T = TypeVar("T")
Op: TypeAlias = Literal["mean", "sum"]
OPS, SCOPES = get_args(Op), get_args(Scope)


@dataclass(frozen=True)
class AllReduce:
    """The sum or mean over ranks of `tensor`, element by element; the reply has its shape and may be `tensor` itself.

    A mean is divided before it is summed, so it overflows only where the mean itself does. `exact`: first and last element,
    by place, of parts that nobody may cut to the range of fewer bits: what would be cut is held back nowhere.
    """

    tensor: Tensor
    op: Op = "mean"
    scope: Scope = "all"
    exact: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        _check("an all-reduce", self.scope, self.op)

    def sent_bytes(self, members: int) -> float:
        """Bytes that one of so many ranks sends in a ring all-reduce: a reduce-scatter, then an all-gather."""
        return 2 * (members - 1) / members * self.tensor.nbytes


@dataclass(frozen=True)
class ReduceScatter:
    """Each rank gets the sum or mean of its row: `tensor` has shape (members, ...), the reply that of a row.

    Rows are in the order of the ranks. A mean is divided before it is summed. `sizes`: of rows that differ, in elements;
    then `tensor` is flat, and the reply may be a part of it.
    """

    tensor: Tensor
    op: Op = "mean"
    scope: Scope = "all"
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check("a reduce-scatter", self.scope, self.op)

    def sent_bytes(self, members: int) -> float:
        """Bytes that one rank sends in a ring: every row but one's own."""
        return (members - 1) / members * self.tensor.nbytes


@dataclass(frozen=True)
class AllGather:
    """Every rank's `tensor`; the reply has shape (members, *tensor.shape), in rank order.

    `sizes`: of the members' tensors where they differ, in elements; then these are flat, and so is the reply.
    """

    tensor: Tensor
    scope: Scope = "all"
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check("an all-gather", self.scope)

    def sent_bytes(self, members: int) -> float:
        """Bytes that one rank sends when each payload visits every other rank once."""
        return (members - 1) * float(self.tensor.nbytes)


@dataclass(frozen=True)
class AllToAll:
    """Row j of `tensor` goes to member j; row i of the reply came from member i. Shape (members, ...), both ways."""

    tensor: Tensor
    scope: Scope = "all"

    def __post_init__(self) -> None:
        _check("an all-to-all", self.scope)

    def sent_bytes(self, members: int) -> float:
        """Bytes that one rank sends: every row but its own."""
        return (members - 1) / members * self.tensor.nbytes


Request: TypeAlias = AllReduce | ReduceScatter | AllGather | AllToAll
Program: TypeAlias = Generator[Request, Tensor, T]


def _check(kind: str, scope: str, op: str = "mean") -> None:
    for name, value, allowed in (("op", op, OPS), ("scope", scope, SCOPES)):
        if value not in allowed:
            raise ValueError(f"the {name} of {kind} is {' or '.join(map(repr, allowed))}, got {value!r}")


def all_reduce(tensor: Tensor, op: Op = "mean", scope: Scope = "all", *, exact: bool = False) -> Program[Tensor]:
    """One all-reduce round; nothing is sent for an empty tensor. `exact`: see AllReduce; here all of it or nothing."""
    if not tensor.numel():
        return tensor
    return (yield AllReduce(tensor, op, scope, ((0, tensor.numel()),) if exact else ()))


def reduce_scatter(tensor: Tensor, op: Op = "mean", scope: Scope = "all") -> Program[Tensor]:
    """One reduce-scatter round over the rows of `tensor`: tensor.shape[1:]; nothing is sent for empty rows."""
    return (yield ReduceScatter(tensor, op, scope)) if tensor.numel() else tensor.new_empty(tensor.shape[1:])


def all_gather(tensor: Tensor, scope: Scope = "all") -> Program[Tensor]:
    """One all-gather round: (members, *tensor.shape)."""
    return (yield AllGather(tensor, scope))


def all_to_all(tensor: Tensor, scope: Scope = "all") -> Program[Tensor]:
    """One all-to-all round over the rows of `tensor`."""
    return (yield AllToAll(tensor, scope))


@dataclass(frozen=True)
class Layout:
    """How the gradients of some parameters lie, one behind the other, in a flat buffer; and whose buffer it is.

    `shapes` are in memory order: a channels-last convolution of (out, in, k, k) lies as (out, k, k, in). `starts`, where
    given, says that each entry is only a part of the parameter of that name: from this element of it on; `row_sizes`, where
    given, the elements of a row of the whole parameter, see `rows`. Ranks 0 to `ranks_per_host` - 1 share a host, and so on;
    with 1 every rank is a host of its own.

    >>> layout = Layout(("bias", "weight"), ((3,), (2, 3)), torch.float32, torch.device("cpu"))
    >>> layout.numel, layout.offsets
    (9, (0, 3))
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device: torch.device
    world_size: int = 1
    rank: int = 0
    ranks_per_host: int = 1
    starts: tuple[int, ...] = ()
    row_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.ranks_per_host < 1 or self.world_size % self.ranks_per_host:
            raise ValueError(
                f"ranks_per_host divides the number of ranks, {self.world_size}; got {self.ranks_per_host}"
            )
        if self.starts and (len(self.starts) != len(self.names) or min(self.starts) < 0):
            raise ValueError(
                f"starts has an element, 0 or above, for each of {len(self.names)} names; got {self.starts}"
            )
        if self.starts and len(set(self.names)) < len(self.names):
            raise ValueError(f"a layout has one part of a parameter at most, got {self.names}")

    def members(self, scope: Scope) -> range:
        """The ranks that take part in this rank's requests of a scope."""
        return members(scope, self.rank, self.world_size, self.ranks_per_host)

    def select(self, indices: Iterable[int]) -> Layout:
        """The layout of some of the entries alone, one behind the other."""
        places = tuple(indices)
        names = tuple(self.names[i] for i in places)
        shapes = tuple(self.shapes[i] for i in places)
        starts = tuple(self.starts[i] for i in places) if self.starts else ()
        row_sizes = tuple(self.row_sizes[i] for i in places) if self.row_sizes else ()
        return dataclasses.replace(self, names=names, shapes=shapes, starts=starts, row_sizes=row_sizes)

    def start(self, name: str) -> int | None:
        """The element of the parameter that its entry begins with; None where the entry is all of it."""
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
        """Each parameter's part of `flat`, in its shape, sharing memory."""
        parts = flat.split(self.sizes) if self.names else ()
        return {name: part.view(shape) for name, shape, part in zip(self.names, self.shapes, parts, strict=True)}

    def widened(self) -> Layout:
        """The same layout in the dtype that arithmetic is done in: 16-bit types widen to float32."""
        return dataclasses.replace(self, dtype=working_dtype(self.dtype))


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for 16-bit types, else the type itself."""
    return torch.float32 if dtype.itemsize < 4 else dtype


@runtime_checkable
class Compressor(Protocol):
    """An algorithm that averages a bucket over ranks. A frozen dataclass of its own options; buckets share it."""

    def init(self, layout: Layout) -> Any:
        """What it will remember of a bucket: a dataclass of `gradwire.compress.state` leaves, or None."""

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


@runtime_checkable
class DrawingCodec(Codec, Protocol):
    """A codec that may draw random numbers: by a key and a counter, so that a step that is done again draws the same."""

    @property
    def draws(self) -> bool:
        """Whether it does."""

    def encode(
        self, grad: Tensor, residual: Residual | None, rows: Tensor, length: int, key: int = -1, counter: int = 0
    ) -> None:
        """As that of a `Codec`, with the random numbers of `key` from `counter` on; those of 2^32 counters are its own."""


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


def marked(compressor: Any, mark: str) -> Any:
    """The first compressor in the tree whose attribute `mark` is true; None where there is none."""
    return next((each for each in inside(compressor) if getattr(each, mark, False)), None)


def _compressors_in(value: Any) -> Iterator[Compressor]:
    if isinstance(value, Compressor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _compressors_in(item)
