"""Requests and programs: what a compressor asks the ranks for.

A compressor is a generator. It yields what this rank gives to a collective and is sent what the collective
returns, so a method of several rounds reads from top to bottom like its paper. Nothing here communicates: the engine
(`gradwire.ddp_core`), the simulator and the dry run (`gradwire.compress.simulate`) each drive the same programs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import torch
from torch import Tensor

from .layout import Scope

T = TypeVar("T")
Op: TypeAlias = Literal["mean", "sum"]
AnyOp: TypeAlias = Literal["mean", "sum", "max"]  # of an all-reduce
OPS, ALL_OPS, SCOPES = get_args(Op), get_args(AnyOp), get_args(Scope)


class Checked:
    """A request, which raises ValueError for an operation or a scope that there is not."""

    def __post_init__(self) -> None:
        """Check a new request."""
        operations = ALL_OPS if isinstance(self, AllReduce) else OPS
        for name, allowed in (("op", operations), ("scope", SCOPES)):
            if (value := getattr(self, name, allowed[0])) not in allowed:
                kind = type(self).__name__
                raise ValueError(f"the {name} of {kind} is {' or '.join(map(repr, allowed))}, got {value!r}")


@dataclass(frozen=True)
class AllReduce(Checked):
    """The sum, mean or maximum over ranks of `tensor`, element by element; the reply may be `tensor` itself.

    A mean is divided before it is summed, so it overflows only where the mean itself does. `exact`: first and last element,
    by place, of parts that nobody may cut to the range of fewer bits: what would be cut is held back nowhere.
    """

    tensor: Tensor
    op: AnyOp = "mean"
    scope: Scope = "all"
    exact: tuple[tuple[int, int], ...] = ()

    def sent_bytes(self, members: int) -> float:
        """Bytes that one of so many ranks sends in a ring all-reduce: a reduce-scatter, then an all-gather."""
        return 2 * (members - 1) / members * self.tensor.nbytes


@dataclass(frozen=True)
class ReduceScatter(Checked):
    """Each rank gets the sum or mean of its row: `tensor` has shape (members, ...), the reply that of a row.

    Rows are in the order of the ranks. A mean is divided before it is summed. `sizes`: of rows that differ, in elements;
    then `tensor` is flat, and the reply may be a part of it.
    """

    tensor: Tensor
    op: Op = "mean"
    scope: Scope = "all"
    sizes: tuple[int, ...] = ()

    def sent_bytes(self, members: int) -> float:
        """Bytes that one rank sends in a ring: every row but one's own."""
        return (members - 1) / members * self.tensor.nbytes


@dataclass(frozen=True)
class AllGather(Checked):
    """Every rank's `tensor`; the reply has shape (members, *tensor.shape), in rank order.

    `sizes`: of the members' tensors where they differ, in elements; then these are flat, and so is the reply.
    `within`: the tensor whose parts the members have summed and give back, which then may be the reply.
    """

    tensor: Tensor
    scope: Scope = "all"
    sizes: tuple[int, ...] = ()
    within: Tensor | None = None

    def sent_bytes(self, members: int) -> float:
        """Bytes that one rank sends when each payload visits every other rank once."""
        return (members - 1) * float(self.tensor.nbytes)


@dataclass(frozen=True)
class AllToAll(Checked):
    """Row j of `tensor` goes to member j; row i of the reply came from member i. Shape (members, ...), both ways."""

    tensor: Tensor
    scope: Scope = "all"

    def sent_bytes(self, members: int) -> float:
        """Bytes that one rank sends: every row but its own."""
        return (members - 1) / members * self.tensor.nbytes


@dataclass(frozen=True)
class Broadcast(Checked):
    """The `tensor` of member `source`, on every member; the reply may be `tensor` itself."""

    tensor: Tensor
    source: int = 0
    scope: Scope = "all"

    def sent_bytes(self, members: int) -> float:
        """Bytes that one rank sends where each passes the tensor on."""
        return (members - 1) / members * self.tensor.nbytes


@dataclass(frozen=True)
class Gather(Checked):
    """Every rank's `tensor` on member `target`: a reply of shape (members, *tensor.shape), elsewhere (0, *tensor.shape)."""

    tensor: Tensor
    target: int = 0
    scope: Scope = "all"

    def sent_bytes(self, members: int) -> float:
        """Bytes that a rank other than the target sends."""
        return float(self.tensor.nbytes)


@dataclass(frozen=True)
class Scatter(Checked):
    """Row j of the `tensor` of member `source` goes to member j; all members give one of this shape, (members, ...)."""

    tensor: Tensor
    source: int = 0
    scope: Scope = "all"

    def sent_bytes(self, members: int) -> float:
        """Bytes that the source sends: every row but its own."""
        return (members - 1) / members * self.tensor.nbytes


Request: TypeAlias = AllReduce | ReduceScatter | AllGather | AllToAll | Broadcast | Gather | Scatter
Program: TypeAlias = Generator[Request, Tensor, T]


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


BY_ROW = (AllToAll, ReduceScatter, Scatter)  # their tensors have a row for each member


def next_request(program: Program[Any], reply: Tensor | None) -> tuple[Request | None, Any]:
    """Run a program on to its next request, or to its end: then None, and what it returned.

    `reply` answers its last request (None at the start).
    """
    try:
        asked: Any = next(program) if reply is None else program.send(reply)
    except StopIteration as stop:
        return None, stop.value
    if not isinstance(asked, Request):
        raise TypeError(
            f"a program yields {', '.join(each.__name__ for each in get_args(Request))}, as `yield from all_reduce(tensor)` "
            f"does; got {asked!r}"
        )
    return asked, None


def after_first(program: Program[Any], act: Callable[[], None]) -> Program[Any]:
    """Run a program, and call `act` once it has made its first request, or has ended without one."""
    try:
        request, result = next_request(program, None)
        act()
        while request is not None:
            reply = [(yield request)]
            del request  # payload and reply go as soon as the program lets them go
            request, result = next_request(program, reply.pop())
    finally:
        program.close()
    return result


def together(*programs: Program[Any]) -> Program[list[Any]]:
    """Run programs in lock step. Requests of one round that are alike (kind, operation, scope, dtype) become one collective.

    Args:
        programs: the programs, in the same order on all ranks.

    Returns:
        The program, whose result is the list of their results.
    """
    asked: list[tuple[Request | None, Any]] = []  # the request of each program now, and what it returned
    try:
        for program in programs:
            asked.append(next_request(program, None))
        while any(request is not None for request, _ in asked):
            for group in _alike([request for request, _ in asked]):
                reply = yield _merged(list(group.values()))
                for place, part in zip(group, _parted(list(group.values()), reply), strict=True):
                    asked[place] = next_request(programs[place], part)
    finally:
        for program in programs:
            program.close()
    return [result for _, result in asked]


def _alike(requests: Sequence[Request | None]) -> list[dict[int, Request]]:
    """The requests that travel as one collective, by place; None stands for a program that has ended."""
    groups: dict[object, dict[int, Request]] = {}
    for place, request in enumerate(requests):
        if request is not None:
            alone = place if getattr(request, "sizes", ()) else None  # rows that differ travel by themselves
            key = (type(request), mode(request), request.scope, request.tensor.dtype, alone)
            groups.setdefault(key, {})[place] = request
    return list(groups.values())


def _merged(requests: Sequence[Request]) -> Request:
    if len(requests) == 1:
        return requests[0]
    if isinstance(requests[0], BY_ROW):
        rows = [request.tensor.reshape(len(request.tensor), -1) for request in requests]
        return dataclasses.replace(requests[0], tensor=torch.cat(rows, dim=1))
    merged = dataclasses.replace(requests[0], tensor=torch.cat([request.tensor.reshape(-1) for request in requests]))
    if isinstance(merged, AllReduce):
        starts = accumulate((request.tensor.numel() for request in requests), initial=0)
        placed = zip(starts, requests, strict=False)
        exact = [(at + a, at + b) for at, each in placed for a, b in getattr(each, "exact", ())]
        merged = dataclasses.replace(merged, exact=tuple(exact))
    return merged


def _parted(requests: Sequence[Request], reply: Tensor) -> list[Tensor]:
    """The reply to merged requests, cut into one reply a request."""
    if len(requests) == 1:
        return [reply]
    shapes = [request.tensor.shape[isinstance(request, BY_ROW) :] for request in requests]
    parts = reply.split([prod(shape) for shape in shapes], dim=-1)
    return [part.reshape((*reply.shape[:-1], *shape)) for part, shape in zip(parts, shapes, strict=True)]
