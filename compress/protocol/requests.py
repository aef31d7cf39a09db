"""Requests and programs: what a compressor asks the ranks for.

A compressor is a generator. It yields what this rank gives to a collective and is sent what the collective
returns, so a method of several rounds reads from top to bottom like its paper. Nothing here communicates: the engine
(`gradwire.ddp_core`), the simulator and the dry run (`gradwire.compress.simulate`) each drive the same programs.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar, get_args

from torch import Tensor

from .ranks import Scope

T = TypeVar("T")
Op: TypeAlias = Literal["mean", "sum"]
AnyOp: TypeAlias = Literal["mean", "sum", "max"]  # of an all-reduce
OPS, ALL_OPS, SCOPES = get_args(Op), get_args(AnyOp), get_args(Scope)


@dataclass(frozen=True)
class AllReduce:
    """The sum, mean or maximum over ranks of `tensor`, element by element; the reply may be `tensor` itself.

    A mean is divided before it is summed, so it overflows only where the mean itself does. `exact`: first and last element,
    by place, of parts that nobody may cut to the range of fewer bits: what would be cut is held back nowhere.
    """

    tensor: Tensor
    op: AnyOp = "mean"
    scope: Scope = "all"
    exact: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.scope not in SCOPES or self.op not in ALL_OPS:
            _refuse("an all-reduce", self.scope, self.op, ALL_OPS)

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
        if self.scope not in SCOPES or self.op not in OPS:
            _refuse("a reduce-scatter", self.scope, self.op)

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
        if self.scope not in SCOPES:
            _refuse("an all-gather", self.scope)

    def sent_bytes(self, members: int) -> float:
        """Bytes that one rank sends when each payload visits every other rank once."""
        return (members - 1) * float(self.tensor.nbytes)


@dataclass(frozen=True)
class AllToAll:
    """Row j of `tensor` goes to member j; row i of the reply came from member i. Shape (members, ...), both ways."""

    tensor: Tensor
    scope: Scope = "all"

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            _refuse("an all-to-all", self.scope)

    def sent_bytes(self, members: int) -> float:
        """Bytes that one rank sends: every row but its own."""
        return (members - 1) / members * self.tensor.nbytes


@dataclass(frozen=True)
class Broadcast:
    """The `tensor` of member `source`, on every member; the reply may be `tensor` itself."""

    tensor: Tensor
    source: int = 0
    scope: Scope = "all"

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            _refuse("a broadcast", self.scope)

    def sent_bytes(self, members: int) -> float:
        """Bytes that one rank sends where each passes the tensor on."""
        return (members - 1) / members * self.tensor.nbytes


@dataclass(frozen=True)
class Gather:
    """Every rank's `tensor` on member `target`: a reply of shape (members, *tensor.shape), elsewhere (0, *tensor.shape)."""

    tensor: Tensor
    target: int = 0
    scope: Scope = "all"

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            _refuse("a gather", self.scope)

    def sent_bytes(self, members: int) -> float:
        """Bytes that a rank other than the target sends."""
        return float(self.tensor.nbytes)


@dataclass(frozen=True)
class Scatter:
    """Row j of the `tensor` of member `source` goes to member j; all members give one of this shape, (members, ...)."""

    tensor: Tensor
    source: int = 0
    scope: Scope = "all"

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            _refuse("a scatter", self.scope)

    def sent_bytes(self, members: int) -> float:
        """Bytes that the source sends: every row but its own."""
        return (members - 1) / members * self.tensor.nbytes


Request: TypeAlias = AllReduce | ReduceScatter | AllGather | AllToAll | Broadcast | Gather | Scatter
Program: TypeAlias = Generator[Request, Tensor, T]


def _refuse(kind: str, scope: str, op: str = "mean", ops: Sequence[str] = OPS) -> None:
    for name, value, allowed in (("op", op, ops), ("scope", scope, SCOPES)):
        if value not in allowed:
            raise ValueError(f"the {name} of {kind} is {' or '.join(map(repr, allowed))}, got {value!r}")


def mode(request: Request) -> object:
    """Return the operation, the source or the target of a request, alike on all ranks that take part."""
    return next((getattr(request, name) for name in ("op", "source", "target") if hasattr(request, name)), None)


def all_reduce(tensor: Tensor, op: AnyOp = "mean", scope: Scope = "all", *, exact: bool = False) -> Program[Tensor]:
    """Yield one all-reduce round. Nothing is sent for an empty tensor.

    Args:
        tensor: this rank's numbers. The reply may be the same tensor.
        op: "mean", "sum" or "max".
        scope: the ranks that take part: see `Ranks.members`.
        exact: True forbids a wrapper such as `fp16` to cut numbers to its range: no residual would keep the
            difference.

    Returns:
        The program, whose result has the tensor's shape.
    """
    if not tensor.numel():
        return tensor
    return (yield AllReduce(tensor, op, scope, ((0, tensor.numel()),) if exact else ()))


def reduce_scatter(tensor: Tensor, op: Op = "mean", scope: Scope = "all") -> Program[Tensor]:
    """Yield one reduce-scatter round over the rows of a tensor. Nothing is sent for empty rows.

    Args:
        tensor: a row for each rank that takes part, (members, ...).
        op: "mean" or "sum".
        scope: the ranks that take part: see `Ranks.members`.

    Returns:
        The program, whose result is this rank's row, reduced.
    """
    return (yield ReduceScatter(tensor, op, scope)) if tensor.numel() else tensor.new_empty(tensor.shape[1:])


def all_gather(tensor: Tensor, scope: Scope = "all") -> Program[Tensor]:
    """Yield one all-gather round.

    Args:
        tensor: this rank's numbers, of the same shape on all ranks.
        scope: the ranks that take part: see `Ranks.members`.

    Returns:
        The program, whose result has the tensors of all members, in a new first dimension.
    """
    return (yield AllGather(tensor, scope))


def all_to_all(tensor: Tensor, scope: Scope = "all") -> Program[Tensor]:
    """Yield one all-to-all round over the rows of a tensor.

    Args:
        tensor: a row for each rank that takes part, (members, ...).
        scope: the ranks that take part: see `Ranks.members`.

    Returns:
        The program, whose result has a row from each member.
    """
    return (yield AllToAll(tensor, scope))
