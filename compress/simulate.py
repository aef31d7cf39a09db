"""Programs without a process group: all ranks in lock step in one process, or one rank on the meta device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .protocol import AllGather, AllReduce, AllToAll, Compressor, Layout, Program, Request, children
from .state import set_step
from .together import Running
from .wrappers import Switch

STEADY = 1 << 62  # a step after any warm-up


@dataclass(frozen=True)
class Traffic:
    """What one rank gives to collectives in one step: rounds, payload bytes, and bytes it sends to other ranks."""

    rounds: int = 0
    payload_bytes: int = 0
    sent_bytes: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.rounds + other.rounds,
            self.payload_bytes + other.payload_bytes,
            self.sent_bytes + other.sent_bytes,
        )


def traffic(request: Request, world_size: int) -> Traffic:
    """The traffic of one request."""
    return Traffic(1, request.tensor.nbytes, request.sent_bytes(world_size))


def simulate(programs: Sequence[Program[Any]]) -> list[Any]:
    """Run one program a rank to the end, in lock step; returns what each returned, in rank order.

    Raises RuntimeError where the ranks ask for different things, which on a real group would hang or send garbage.
    """
    ranks = [Running(program) for program in programs]
    while any(rank.request is not None for rank in ranks):
        requests = [rank.request for rank in ranks]
        for rank, reply in zip(ranks, _replies(requests), strict=True):
            rank.advance(reply)
    return [rank.result for rank in ranks]


def _replies(requests: Sequence[Request | None]) -> list[Tensor]:
    asked = [(type(r), getattr(r, "op", None), r.tensor.shape, r.tensor.dtype) if r else None for r in requests]
    if any(other != asked[0] for other in asked):
        raise RuntimeError(f"the ranks ask for different collectives: {asked}")
    tensors = [request.tensor for request in requests if request is not None]
    if any(not tensor.numel() for tensor in tensors):
        raise RuntimeError("a program asked for an empty collective")
    match requests[0]:
        case AllReduce(op=op):
            return _reduced(tensors, op)
        case AllGather():
            return [torch.stack(tensors) for _ in tensors]
        case AllToAll():
            if any(len(tensor) != len(tensors) for tensor in tensors):
                raise RuntimeError(f"an all-to-all over {len(tensors)} ranks needs a row for each, got {asked[0]}")
            return [torch.stack([tensor[rank] for tensor in tensors]) for rank in range(len(tensors))]
    raise AssertionError(requests[0])


def _reduced(tensors: Sequence[Tensor], op: str) -> list[Tensor]:
    if op == "mean":
        for tensor in tensors:
            tensor.mul_(1 / len(tensors))
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total.add_(tensor)
    return [tensor.copy_(total) for tensor in tensors]


def dry_run(compressor: Compressor, layout: Layout, step: int = STEADY) -> Traffic:
    """The traffic of one step on a bucket, found by running the program on the meta device: no memory, no arithmetic.

    `step` chooses the stage of a warm-up; by default all warm-ups are over.
    """
    meta = dataclasses.replace(layout, device=torch.device("meta"))
    state = compressor.init(meta)
    set_step(state, step)
    grad = torch.empty(meta.numel, dtype=meta.dtype, device="meta")
    running = Running(compressor.reduce(grad, state))
    total = Traffic()
    while (request := running.request) is not None:
        total += traffic(request, meta.world_size)
        gathered = isinstance(request, AllGather)
        running.advance(torch.stack([request.tensor] * meta.world_size) if gathered else request.tensor)
    return total


def boundaries(compressor: Compressor) -> set[int]:
    """The steps at which a compressor, or one inside it, changes stage."""
    own = set(compressor.starts) if isinstance(compressor, Switch) else {0}
    return own.union(*(boundaries(child) for child in children(compressor)))


def most_rounds(compressor: Compressor, layouts: Sequence[Layout]) -> int:
    """The largest number of rounds that any stage takes for any of the layouts."""
    return max(dry_run(compressor, layout, step).rounds for step in boundaries(compressor) for layout in layouts)


class Simulation:
    """A compressor on one bucket over simulated ranks, step after step: what tests and notebooks use.

    >>> import torch
    >>> from gradwire.compress import compressor
    >>> layout = Layout(("weight",), ((4, 4),), torch.float32, torch.device("cpu"), world_size=2)
    >>> simulation = Simulation(compressor("none"), layout)
    >>> simulation.step([torch.zeros(16), torch.ones(16)])[0].mean()
    tensor(0.5000)
    """

    def __init__(self, compressor: Compressor, layout: Layout) -> None:
        self.compressor = compressor
        self.layouts = [dataclasses.replace(layout, rank=rank) for rank in range(layout.world_size)]
        self.states = [compressor.init(rank) for rank in self.layouts]

    def step(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The averages that each rank gets for the ranks' flat gradients, which are left as they are."""
        return simulate(list(self._programs(gradients)))

    def _programs(self, gradients: Sequence[Tensor]) -> Iterator[Program[Tensor]]:
        for gradient, state in zip(gradients, self.states, strict=True):
            yield self.compressor.reduce(gradient.clone(), state)

    def copy(self) -> Simulation:
        """An independent simulation in the same state."""
        return copy.deepcopy(self)
