"""The reducer (Li et al. 2020, algorithm 1) launches each bucket once it is complete and all before it have left."""

from __future__ import annotations

import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from ..averaging.averager import Averager
from ..buckets.assignment import BucketAssignment
from ..buckets.grad_bucket import GradBucket, undifferentiated
from ..buckets.slices import Sendable
from ..measure.step import Step
from ..measure.timeline import Timeline
from ..transport.protocol import Transport
from . import error_messages
from .autograd import ParameterHooks, arriving, gradient_node
from .backward import Backward, Stage
from .stray_gradients import OutsideGradients, SharedParameters, living
from .unused_parameters import Rules, Usage

COMPILED = "torch._dynamo.compiled_autograd"  # what runs a backward without Python, where it is in use


class Delivery:
    """Hands out the averages of a backward that has ended, before it returns; a subclass where they are used."""

    now: Callable[[], float] = staticmethod(time.perf_counter)  # the clock of the next step's marks, see `Step`

    def deliver(self, reducer: Reducer, backward: Backward) -> None:
        """Hand the averages out, or make sure that they will be.

        It calls the reducer's `end` once they are handed out or are sure to be, and its `delivered` after them.
        """
        with torch.no_grad():
            for bucket in reducer.assignment.buckets:
                if (average := reducer.average_of(bucket, backward)) is not None:
                    average = average if reducer.share == 1.0 else average.div_(reducer.share)
                    bucket.deliver(average, None if backward.usage is None else backward.usage.by_any())
        reducer.end(backward)
        reducer.delivered(backward)

    def leave(self) -> None:
        """Wait for what is not handed out yet: the buckets are about to be made anew."""


AT_END = Delivery()


class Reducer:
    """Averages the gradients of `parameters` during backward, by `averager`, bucket by bucket.

    `names`: of the parameters, for messages. `assignment`: their buckets. `timeout`: of waits on the CPU.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        assignment: BucketAssignment,
        rules: Rules,
        transport: Transport,
        averager: Averager,
        timeout: timedelta,
        delivery: Delivery = AT_END,
    ) -> None:
        self.parameters, self.names = list(parameters), list(names)
        self.hooks = ParameterHooks(self.parameters, self.fired, weakref.ref(self))
        self._warned_of_graphs = False
        self.averager, self.transport = averager, transport
        self.rules, self._timeout = rules, timeout
        self._firings: list[int] | None = None  # of each parameter's hook in a step; None until a static graph is known
        self._static_usage: Usage | None = None  # of its first step
        self._backward: Backward | None = None
        self._used = bytearray(len(parameters))  # on this rank, since the last synchronization
        self._outside = OutsideGradients()
        living.add(self)
        self.finished = 0
        # for `TorchReducer`: the parameters that the last step reached, in the order they got ready
        self.traced: Sequence[int] = ()
        self.usage: Usage | None = None  # of the last step
        self._reached_others = False  # two steps have reached different parameters; `TorchReducer` reads it
        self.share = 1.0  # of the ranks that have inputs, where the average is to be over these
        self.optimizers: list[Callable[[], None]] = []  # their steps, at the end of backward
        self.delivery = delivery
        self._shared = SharedParameters()
        self.timeline = Timeline(names)
        self.assignment = assignment
        self.anchor = torch.zeros((), requires_grad=True, device="cpu")  # an input of every `Sink`, see `arriving`
        self._anchor_node = gradient_node(self.anchor)

    @property
    def device(self) -> torch.device:
        """The device of the parameters; of several devices, that of the first parameter."""
        return self.parameters[0].device

    def names_of(self, indices: Iterable[int]) -> list[str]:
        """Return the names of parameters."""
        return [self.names[index] for index in indices]

    def _given_up(self, text: str) -> RuntimeError:
        """Return the error to raise. This reducer averages no more; another one may."""
        self.hooks.detach()
        return RuntimeError(text)

    @property
    def counts(self) -> bool:
        """True if this step waits for the end of backward: the first one of a static graph, which it counts."""
        return self.rules.static_graph and self._firings is None

    @property
    def leaves_out(self) -> bool:
        """True if a step is to know, where it can, what no rank used: that is not sent, or sent as zeros."""
        known = self.rules.dynamic or self._static_usage is not None
        return known and (self.rules.skip_all_reduce_unused_params or self.averager.zero_unused_gradients)

    @property
    def watches(self) -> bool:
        """True if it must hear that a backward begins."""
        return self.rules.dynamic or self.counts

    def expect_backward(self) -> None:
        """Expect a synchronized backward: its forward has ended."""
        self.require_finished()
        self._outside.forward_ends()
        if len(living) > 1:
            self._shared.look(self)
        self._backward = self._opened(Step(forward=self.timeline.forward, now=self.delivery.now))
        for index, firings in enumerate(self._firings or ()):
            if not firings:
                self._pass_over(self._backward, index)

    def _opened(self, step: Step) -> Backward:
        scale, assignment = self.averager.scale, self.assignment
        for bucket in assignment.buckets:
            bucket.open(scale)
        assignment.unready = [len(bucket.members) for bucket in assignment.buckets]
        return Backward(
            step,
            Stage.EXPECTED if self.watches else Stage.SENDING,
            missing=[1] * len(self.parameters) if self._firings is None else list(self._firings),
            asks=self.rules.dynamic or (self.rules.static_graph and self._static_usage is None),
            leaves_out=self.leaves_out,
            usage=self._static_usage,
        )

    def pause(self) -> None:
        """A forward whose backward is not synchronized."""
        self.require_finished()
        self._outside.forward_ends()

    @property
    def unfinished(self) -> bool:
        """True if the last synchronized backward began and brought not all gradients, or an average failed."""
        return self._backward is not None and self._backward.under_way

    def require_finished(self) -> None:
        """Raise RuntimeError where the last synchronized backward did not come to its end."""
        backward = self._backward
        if backward is None or not self.unfinished:
            return
        if backward.stage is Stage.BROKEN:
            raise self._given_up(error_messages.broken(backward.why_broken))
        absent = {index: self.names[index] for index, missing in enumerate(backward.missing) if missing > 0}
        static, watched, rank = self._firings is not None, self.rules.find_unused_parameters, self.transport.ranks.rank
        raise self._given_up(error_messages.unfinished(absent, rank, static=static, watched=watched))

    def start(self) -> None:
        """Begin the backward, at a sink or the first gradient: parameters that it will not reach are ready."""
        with self.hooks.lock:
            backward = self._backward
            if backward is None or backward.stage is not Stage.EXPECTED:
                return
            comes = arriving(self.hooks.nodes, self._anchor_node)
            if comes is None:
                return
            Variable._execution_engine.queue_callback(self._end)
            if self.counts:
                backward.stage = Stage.COUNTING
                return
            backward.stage = Stage.SENDING
            for index, arrives in enumerate(comes):
                if not arrives:
                    self._pass_over(backward, index)
            if backward.leaves_out:
                # no bucket leaves yet: each waits for the answer, which would hold up backward before its first gradient
                self._ask(backward, [a or b for a, b in zip(comes, self._used, strict=True)])
            elif self._launch(backward):
                Variable._execution_engine.queue_callback(self._finish)

    @staticmethod
    def fired(owner: weakref.ref[Reducer], index: int, _: Any, gradients: tuple[Tensor | None, ...]) -> None:
        """A parameter's hook: its gradient is there, or undefined, where the loss did not depend on it."""
        self = owner()
        if self is None:
            return
        if defined := gradients[0] is not None:
            self._used[index] = 1
        backward = self._backward
        if backward is None:
            if defined:
                self._outside.note(index, self)
            return
        if not backward.order and getattr(sys.modules.get(COMPILED), "in_compiled_autograd_region", False):
            raise RuntimeError(error_messages.COMPILED_AUTOGRAD)  # nothing has begun: the next backward may do without
        if not defined:
            backward.undefined.add(index)
        if backward.stage is Stage.EXPECTED:
            self.start()
        backward.missing[index] -= 1
        if backward.missing[index] > 0:
            return
        backward.order.append(index)
        if self._shared.places and self._shared.came_elsewhere(index):
            raise self._given_up(error_messages.shared_view(self.names[index]))
        if backward.stage is Stage.COUNTING:
            return
        if backward.missing[index] < 0:  # this backward does not come to its end
            static, passed_over = self._firings is not None, backward.order.count(index) == 1
            raise self._given_up(error_messages.twice(self.names[index], static=static, passed_over=passed_over))
        bucket, unready = self.assignment.bucket_of[index], self.assignment.unready
        unready[bucket.number] -= 1
        if not unready[bucket.number]:
            backward.step.ready[bucket.number] = backward.step.now()
            if self._launch(backward):
                Variable._execution_engine.queue_callback(self._finish)
        elif defined and index in bucket.large:  # now it is in the cache; the others are copied together
            undifferentiated(bucket.copy, index)

    def _pass_over(self, backward: Backward, index: int) -> None:
        """Count a parameter as ready: its hook will fire no more."""
        backward.missing[index] = 0
        bucket, unready = self.assignment.bucket_of[index], self.assignment.unready
        unready[bucket.number] -= 1
        if not unready[bucket.number]:
            backward.step.ready[bucket.number] = backward.step.now()

    def _launch(self, backward: Backward) -> bool:
        """Send the buckets that are complete, in order. Return True with the last one, after which `_finish` comes."""
        sending, unready = self.assignment.sending, self.assignment.unready
        while backward.stage is Stage.SENDING and not unready[sending[backward.sent].number]:
            bucket = sending[backward.sent]
            backward.sent += 1
            if backward.sent == len(sending):
                backward.stage = Stage.SENT
            self._send(backward, bucket)
        if backward.stage is not Stage.SENT:
            return False
        if backward.asks and backward.usage is None:
            self._ask(backward, self._used)
        backward.step.last_launch = time.perf_counter()
        return True

    def _send(self, backward: Backward, bucket: Sendable, *, zeros: bool = False) -> None:
        """Give the averager a bucket of gradients; or of `zeros`, on a rank without inputs."""
        usage, skips = backward.usage, self.rules.skip_all_reduce_unused_params
        if backward.leaves_out and usage is not None and not usage.keeps(bucket, skips=skips):
            return
        if zeros:
            bucket.clear()
        else:
            if (create_graph := torch.is_grad_enabled()) and not self._warned_of_graphs:
                self._warned_of_graphs = True
                warnings.warn(error_messages.CREATE_GRAPH, stacklevel=2)
            used = self._used if usage is None else usage.by_any()
            try:
                undifferentiated(bucket.fill, used) if create_graph else bucket.fill(used)
            except RuntimeError as error:
                if sparse := bucket.sparse_members():
                    raise self._given_up(error_messages.sparse(self.names_of(sparse))) from error
                raise
        # a gradient that came in this backward, of a parameter without one now: zeros would stand for it
        if bucket.absent and (came := set(bucket.absent).intersection(backward.order) - backward.undefined):
            raise self._given_up(error_messages.removed(self.names_of(sorted(came))))
        if not backward.step.number:  # the first bucket that leaves
            self.averager.begin_step(backward.step)
        backward.step.launched[bucket.number] = time.perf_counter()
        bucket.pending = self.averager.average(bucket)

    def _ask(self, backward: Backward, used: Sequence[int]) -> None:
        """Have the ranks tell each other which parameters they used."""
        backward.usage = Usage(used, self.transport, self.device, self._timeout)

    @torch._disable_dynamo
    def _end(self) -> None:
        """End a backward that `start` began: parameters that it did not reach were not used, and the last bucket leaves."""
        backward = self._backward
        if backward is None or backward.stage not in (Stage.COUNTING, Stage.SENDING):
            return
        if backward.stage is Stage.COUNTING:
            self._firings, backward.stage = backward.firings(), Stage.SENDING
        for index, missing in enumerate(backward.missing):
            if missing > 0:
                self._pass_over(backward, index)
        if self._launch(backward):
            self._finish()

    @torch._disable_dynamo
    def _finish(self) -> None:
        """Have the averages handed out; nothing else of this backward comes.

        Autograd calls it behind the last hook of the backward, where `start` or `fired` has sent the last bucket and queued
        it. In a backward that is watched `start` has queued `_end`, too, which calls this if it sends the last bucket.
        """
        backward = self._backward
        if backward is None or backward.stage is not Stage.SENT:
            return
        backward.stage = Stage.AVERAGING
        backward.step.computed = time.perf_counter()
        self.assignment.traces.append(backward.order)
        self._outside.late = True
        try:
            self.delivery.deliver(self, backward)
        except BaseException as error:
            if self._backward is backward:
                self.break_off(backward, error)
            raise
        for step in self.optimizers:
            step()

    def average_of(self, bucket: GradBucket, backward: Backward) -> Tensor | None:
        """Wait for a bucket's average; None where it was not sent."""
        if bucket.pending is None:
            return None
        try:
            average = bucket.pending.wait(self._timeout)
        except Exception as error:
            names = self.names_of(bucket.members)
            raise self._given_up(error_messages.failed(bucket.number, names, error)) from error
        bucket.pending = None
        backward.step.done.setdefault(bucket.number, time.perf_counter())
        return average

    def end(self, backward: Backward) -> None:
        """End a backward, all of whose averages are there or on their way to whoever uses them."""
        self._backward = None
        if backward.order:  # not where this rank had no inputs
            before, self.traced = self.traced or backward.order, backward.order
            if before != self.traced and set(before) != set(self.traced):
                self._reached_others = True
        self.usage = backward.usage if backward.asks else None
        if self.rules.static_graph:
            self._static_usage = backward.usage
        self._used = bytearray(len(self.parameters))
        self.finished += 1

    def delivered(self, backward: Backward) -> None:
        """End a step: all of its averages have been handed out."""
        backward.step.ended = backward.step.ended or time.perf_counter()
        self.averager.end_step()
        self.timeline.step_ends(backward.step, [bucket.members for bucket in self.assignment.buckets])

    def brought_of(self, indices: Iterable[int]) -> list[int]:
        """Return those of the parameters that have got a gradient on this rank since the last synchronization."""
        return [index for index in indices if self._used[index]]

    def break_off(self, backward: Backward, error: BaseException) -> None:
        """Keep for the next iteration why averages did not come."""
        backward.stage, backward.why_broken = Stage.BROKEN, str(error) or type(error).__name__
        self._backward = backward
