"""Several programs that share their rounds: one collective where there would be several."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from typing import Any, get_args

import torch
from torch import Tensor

from .requests import AllReduce, AllToAll, Program, ReduceScatter, Request, Scatter, mode

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
