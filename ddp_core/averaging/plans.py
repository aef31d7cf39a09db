"""Plans: what a bucket does in every step. They are bound once, by what it holds and what is sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from ...compress import AllReduce, Program
from ...compress.protocol.requests import Op
from ...compress.state.gauge import Gauge
from ..buckets.grad_bucket import as_real
from ..buckets.memory_format import Turnable, as_torch_reads
from ..buckets.protocol import Bucket
from ..engine.engine import Engine
from ..engine.lanes import FuturePending, Task
from ..measure.step import BucketStats, Step
from ..memory.model_memory import ModelMemory
from ..transport.protocol import Pending
from .shown_averages import Parts, Shown, parts_of_bucket

Reduce: TypeAlias = Callable[[Tensor, int, bool], Program[Tensor]]


@dataclass(frozen=True)
class Sent:
    """The gradients that one program averages: its name in messages, and how many there are of which parameters.

    `nbytes`: of the gradients, where they count as on their way.
    """

    label: str
    names: tuple[str, ...]
    elements: int
    element_bytes: int
    nbytes: int
    gauge: Gauge | None = None

    @classmethod
    def of(cls, label: str, names: tuple[str, ...], flat: Tensor) -> Sent:
        """Return what is sent of a flat tensor."""
        return cls(label, names, flat.numel(), flat.element_size(), flat.nbytes)


@dataclass(frozen=True)
class Route:
    """The way of programs to an engine.

    Attributes:
        engine: what runs them.
        needs_future: a future of torch's has the average: torch's DDP or a user's hook waits for it, or FSDP2's replicas.
        on_wait: the waiting thread runs them, where a thread of its own would have nothing to compute.
        lent: the result is memory of whoever waits.
        gathers: they gather weights, which on a GPU do not wait for what reductions compute.
        per_host: ranks of a host, if they travel in two levels; else 1.
    """

    engine: Engine
    needs_future: bool = False
    on_wait: bool = False
    lent: bool = False
    gathers: bool = False
    per_host: int = 1

    def send(
        self,
        program: Program[Tensor],
        sent: Sent,
        costs: list[BucketStats],
        now: Callable[[], float] = time.perf_counter,
    ) -> Pending:
        """Run a program behind those before it. Its cost goes into `costs`; `now` takes the marks of it."""
        task = Task(program, sent.label, self.needs_future, now=now, nbytes=sent.nbytes, lent=self.lent)
        of_bucket = sent.names, sent.elements, task.record, sent.gauge, sent.element_bytes
        costs.append(BucketStats(*of_bucket, given=now(), per_host=self.per_host))
        return self.engine.submit(task, on_wait=self.on_wait, gathers=self.gathers)


class Plan(Protocol):
    """The plan of a bucket."""

    bound: Bound

    def start(self, step: Step, bucket: Bucket) -> Pending:
        """Start to average a bucket in place, after those before it."""


@dataclass(frozen=True)
class Bound:
    """The knowledge of each plan of a bucket.

    Attributes:
        epoch: the plan holds as long as its averager has this object.
        scale: the plan holds for gradients that come multiplied by this; None where a hook of torch's is given them.
        named: the parameters, by name.
        shown: shows averages to a function of the user's.
        parts: makes the average of each parameter from that of the bucket.
        forms: tensors of no memory, each in the memory format of a gradient in the buffer.
        turnable: where torch reads averages as parameters lie now, those that may have been turned since.
        buckets: the names in each bucket of the memory inside this one, then in all of it.
    """

    epoch: object
    scale: float | None
    named: Mapping[str, Tensor]
    route: Route
    shown: Shown
    parts: Parts
    forms: Sequence[Tensor] = ()
    turnable: Mapping[str, Turnable] = field(default_factory=dict)
    buckets: Sequence[tuple[str, ...]] = ()

    def handed_out(self, program: Program[Tensor], sent: Sent, buffer: Tensor) -> Program[Tensor]:
        """Return a program whose average is shown, if anybody wants to see it, and lies in the buffer as torch reads it."""
        if self.shown.function is not None:
            program = self.shown.average_of(program, self.parts, sent.names)
        if not self.turnable:
            return program
        found = (self.turnable[name].turned(buffer) for name in sent.names if name in self.turnable)
        turned = [both for both in found if both is not None]
        return as_torch_reads(program, turned) if turned else program


class SumPlan:
    """One all-reduce, where nothing is remembered of the gradients.

    `op`: "sum" of gradients that come divided by the ranks, or "mean". `buffer`: where they lie in every step; None where
    each step brings a buffer of its own.
    """

    def __init__(self, bound: Bound, op: Op, sent: Sent, buffer: Tensor | None) -> None:
        self.bound, self._op, self._sent, self._buffer = bound, op, sent, buffer
        self._request = None if buffer is None else AllReduce(as_real(buffer), op)

    def start(self, step: Step, bucket: Bucket) -> Pending:
        """Start to average a bucket in place."""
        buffer, request, bound, sent = bucket.buffer(), self._request, self.bound, self._sent
        if request is None or buffer is not self._buffer:
            request = AllReduce(as_real(buffer), self._op)
            if request.tensor.numel() != sent.elements:
                bound, sent = self._without_some(bucket, request.tensor)
        program = bound.handed_out(in_place(buffer, request), sent, buffer)
        return bound.route.send(program, sent, step.costs, step.now)

    def _without_some(self, bucket: Bucket, flat: Tensor) -> tuple[Bound, Sent]:
        """Return `Bound` of the parameters that are sent in this step, where these are not all."""
        here = set(map(id, bucket.parameters()))
        named = {name: each for name, each in self.bound.named.items() if id(each) in here}
        parts = partial(parts_of_bucket, tuple(named), tuple(named.values()))
        return replace(self.bound, parts=parts), Sent.of(self._sent.label, tuple(named), flat)


class ProgramPlan:
    """The programs of a compressor: one for all of a bucket, or for each bucket of a loaded state inside it."""

    def __init__(self, bound: Bound, memory: ModelMemory, segments: Sequence[tuple[Reduce, Sent]]) -> None:
        self.bound, self._memory, self._segments = bound, memory, segments

    def start(self, step: Step, bucket: Bucket) -> Pending:
        """Start to average a bucket in place."""
        bound, buffer, memory, pendings = self.bound, bucket.buffer(), self._memory, list[Pending]()
        number, watched = memory.step - 1, memory.watched  # `begin_step` has counted this step already
        for reduce, sent in self._segments:
            program = bound.handed_out(reduce(buffer, number, watched), sent, buffer)
            pendings.append(bound.route.send(program, sent, step.costs, step.now))
            if len(self._segments) > 1 and bound.route.needs_future:
                bound.route.engine.send_all()  # see all_done
        if len(pendings) == 1:
            return pendings[0]
        return all_done(pendings, buffer) if bound.route.needs_future else AllPending(pendings)


class SparsePlan:
    """The mean of a sparse gradient, which no compressor sees."""

    def __init__(self, bound: Bound, memory: ModelMemory, ranks: int, sent: Sent) -> None:
        self.bound, self._memory, self._ranks, self._sent = bound, memory, ranks, sent

    def start(self, step: Step, bucket: Bucket) -> Pending:
        """Start to average the rows that any rank has."""
        memory, gradient, bound = self._memory, bucket.buffer(), self.bound
        program = memory.reduce_sparse(self._ranks, gradient, watched=memory.watched)
        program = bound.handed_out(program, self._sent, gradient)
        return bound.route.send(program, self._sent, step.costs, step.now)


def in_place(buffer: Tensor, request: AllReduce) -> Program[Tensor]:
    """Ask for all of a bucket's average at once; return its `buffer`, whose numbers the request has."""
    reply = yield request
    if reply is not request.tensor:
        request.tensor.copy_(reply)
    return buffer


@dataclass(frozen=True)
class AllPending:
    """The averages of a bucket's segments on their way. Each program returns the buffer of the bucket."""

    segments: Sequence[Pending]

    def wait(self, timeout: timedelta) -> Tensor:
        """The buffer, when all have been averaged in it; raises what one of them raised."""
        return [segment.wait(timeout) for segment in self.segments][-1]


def all_done(pendings: Sequence[Pending], buffer: Tensor) -> FuturePending:
    """A future that holds `buffer` once all segments have been averaged in it, or raises what one of them raised."""

    def finished(done: torch.futures.Future[Any]) -> Tensor:
        for future in done.value():
            future.value()
        return buffer

    futures = [pending.future for pending in pendings if isinstance(pending, FuturePending)]
    if buffer.is_cuda:  # each has come to its end before the next was sent
        return FuturePending(futures[-1])
    return FuturePending(torch.futures.collect_all(futures).then(finished))


def labelled(index: int, names: Sequence[str]) -> str:
    """Return the name of a bucket in messages."""
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"bucket {index} (parameters {shown})"
