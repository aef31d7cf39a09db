"""Several programs that share their rounds: one collective where there would be several."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor

from .requests import AllReduce, AllToAll, Program, ReduceScatter, Request

BY_ROW = (AllToAll, ReduceScatter)  # their tensors have a row for each member


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
            "a program yields AllReduce, ReduceScatter, AllGather or AllToAll, as `yield from all_reduce(tensor)` does; got "
            f"{asked!r}"
        )
    return asked, None


class Running:
    """A program, what it asks for now, and in the end what it returned."""

    def __init__(self, program: Program[Any]) -> None:
        self.program = program
        self.request: Request | None = None
        self.result: Any = None
        self.advance(None)

    def advance(self, reply: Tensor | None) -> None:
        """Run on to the next request; `reply` answers the last one (None at the start)."""
        self.request, self.result = next_request(self.program, reply)


def together(*programs: Program[Any]) -> Program[list[Any]]:
    """Run programs in lock step and return their results in order.

    Requests of one round that are alike (kind, operation, scope, dtype) travel as one collective, in the order in which the
    programs were given.
    """
    running: list[Running] = []
    try:
        for program in programs:
            running.append(Running(program))
        while any(member.request is not None for member in running):
            for group in _alike(running):
                requests = [member.request for member in group if member.request is not None]
                reply = yield _merged(requests)
                for member, part in zip(group, _parted(requests, reply), strict=True):
                    member.advance(part)
    finally:
        for program in programs:
            program.close()
    return [member.result for member in running]


def _alike(running: Sequence[Running]) -> list[list[Running]]:
    groups: dict[object, list[Running]] = {}
    for member in running:
        if (request := member.request) is not None:
            alone = id(member) if getattr(request, "sizes", ()) else None  # rows that differ travel by themselves
            key = (type(request), getattr(request, "op", None), request.scope, request.tensor.dtype, alone)
            groups.setdefault(key, []).append(member)
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
