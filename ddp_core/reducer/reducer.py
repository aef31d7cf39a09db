"""The reducer (Li et al. 2020, algorithm 1): gradients get ready, buckets leave in order, backward ends with the last."""

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
from . import messages
from .autograd import ParameterHooks, arriving, gradient_node
from .backward_state import Backward, Rules, Usage
from .stray_gradients import Bypass, living, shared

COMPILED = "torch._dynamo.compiled_autograd"  # what runs a backward without Python, where it is in use


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
    ) -> None:
        self.parameters, self.names = list(parameters), list(names)
        self.hooks = ParameterHooks(self.parameters, self.fired, weakref.ref(self))
        self._warned: set[str] = set()
        self.averager, self.transport = averager, transport
        self.rules, self._timeout = rules, timeout
        self._firings: list[int] | None = None  # of each parameter's hook in a step; None until a static graph is known
        self._static_usage: Callable[[], Sequence[int]] | None = None  # see `Backward.used_by_any`; of its first step
        self._backward: Backward | None = None
        self._used = bytearray(len(parameters))  # on this rank, since the last synchronization
        self._over = False  # the averages are there, and no forward has begun since
        self._bypass: Bypass | None = Bypass()  # until the first forward
        living.add(self)
        self.finished = 0
        self.traced: Sequence[int] = ()  # the parameters that the last step reached, in the order they got ready
        self.usage: Usage | None = None  # of the last step
        self._reached_others = False  # two steps have reached different parameters
        self.share = 1.0  # of the ranks that have inputs, where the average is to be over these
        self.at_end: list[Callable[[], None]] = []
        self.optimizers: list[Callable[[], None]] = []  # their steps, at the end of backward
        self.deferred: Any = None  # an Overlap: it takes backwards, whose averages it hands out after their end
        self.timeline = Timeline(names)
        self.assignment = assignment
        self.anchor = torch.zeros((), requires_grad=True, device="cpu")
        self._anchor_node = gradient_node(self.anchor)

    @property
    def device(self) -> torch.device:
        """The device of the parameters; of several devices, that of the first parameter."""
        return self.parameters[0].device

    def names_of(self, indices: Iterable[int]) -> list[str]:
        """Return the names of parameters."""
        return [self.names[index] for index in indices]

    def _failure(self, text: str) -> RuntimeError:
        """Return the error to raise. This reducer averages no more; another one may."""
        self.hooks.detach()
        return RuntimeError(text)

    def _warn(self, reason: str, text: str) -> None:
        """Warn once for each reason."""
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(text, stacklevel=3)

    def begin(self) -> None:
        """The end of a forward whose backward is to be synchronized."""
        self.require_finished()
        self._over, self._bypass = False, None
        self._backward = self._opened(Step(forward=self.timeline.forward, now=self.timeline.now))
        for index, firings in enumerate(self._firings or ()):
            if not firings:
                self._pass_over(self._backward, index)

    def _opened(self, step: Step) -> Backward:
        scale = self.averager.scale
        for bucket in self.assignment.buckets:
            bucket.open(scale)
        counts = self.counts
        return Backward(
            missing=[1] * len(self.parameters) if self._firings is None else list(self._firings),
            counts=counts,
            started=not (counts or self.rules.dynamic),
            asks=self.rules.dynamic or (self.rules.static_graph and self._static_usage is None),
            skips=self.rules.skip_all_reduce_unused_params,
            leaves_out=self.leaves_out,
            used_by_any=self._static_usage,
            step=step,
        )

    def pause(self) -> None:
        """A forward whose backward is not synchronized."""
        self.require_finished()
        self._over, self._bypass = False, None

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

    def start(self) -> None:
        """The beginning of a backward, told by a sink or the first gradient: what it will not reach is ready."""
        with self.hooks.lock:
            backward = self._backward
            if backward is None or backward.started:
                return
            comes = arriving(self.hooks.nodes, self._anchor_node)
            if comes is None:
                return
            backward.started = True
            Variable._execution_engine.queue_callback(self._flush)
            if backward.counts:
                return
            for index in range(len(comes)):
                if not comes[index]:
                    self._pass_over(backward, index)
            if backward.leaves_out:
                self._ask(backward, [a or b for a, b in zip(comes, self._used, strict=True)])
            else:
                self._launch(backward)

    @property
    def unfinished(self) -> bool:
        """True if the last synchronized backward brought some gradients, and not all."""
        return self._backward is not None and self._backward.under_way

    def require_finished(self) -> None:
        """Raise RuntimeError where the last synchronized backward did not come to its end."""
        backward = self._backward
        if backward is None or not self.unfinished:
            return
        if backward.broken:
            raise self._failure(messages.broken(backward.broken))
        static, watched, rank = self._firings is not None, self.rules.find_unused_parameters, self.transport.ranks.rank
        raise self._failure(messages.unfinished(backward.absent(self.names), rank, static=static, watched=watched))

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
                self._apart(index)
            return
        if not backward.order and getattr(sys.modules.get(COMPILED), "in_compiled_autograd_region", False):
            raise RuntimeError(messages.COMPILED_AUTOGRAD)  # nothing has begun: the next backward may do without
        if not defined:
            backward.undefined.add(index)
        if not backward.started:
            self.start()
        backward.missing[index] -= 1
        if backward.missing[index] or backward.counts:
            self._await_others(backward, index)
            return
        backward.order.append(index)
        bucket = self.assignment.bucket_of[index]
        bucket.waiting -= 1
        if not bucket.waiting:
            backward.step.ready[bucket.number] = backward.step.now()
            self._launch(backward)
        elif defined and index in bucket.large:  # now it is in the cache; the others are copied together
            undifferentiated(bucket.copy, index)

    def _apart(self, index: int) -> None:
        """A gradient came outside of a synchronized backward."""
        if self._over:
            self._warn_unless_shared("late", index, messages.late(self.names[index]))
        elif (
            self._bypass is not None
            and self._bypass.trains(index, self.parameters[index])
            and self.transport.ranks.world_size > 1
        ):
            self._warn_unless_shared("bypassed", index, messages.BYPASSED)

    def _warn_unless_shared(self, reason: str, index: int, text: str) -> None:
        """Warn once, unless another wrapper has the parameter, too, and averages its gradients."""
        if reason in self._warned:
            return
        if shared(self.parameters[index], self):
            self._warned.add(reason)
        else:
            self._warn(reason, text)

    def _await_others(self, backward: Backward, index: int) -> None:
        """A firing that is not the last one of its parameter, or none that was expected."""
        if backward.counts:
            backward.order.append(index)
        elif backward.missing[index] < 0:
            passed_over = index not in backward.order
            static = self._firings is not None
            backward.order.append(index)  # it is under way, and will not come to its end
            raise self._failure(messages.twice(self.names[index], static=static, passed_over=passed_over))

    def _pass_over(self, backward: Backward, index: int) -> None:
        """Count a parameter as ready: its hook will fire no more."""
        backward.missing[index] = 0
        bucket = self.assignment.bucket_of[index]
        bucket.waiting -= 1
        if not bucket.waiting:
            backward.step.ready[bucket.number] = backward.step.now()

    def _launch(self, backward: Backward) -> None:
        """Send the buckets that are complete, in order; with the last one, ask for the end of backward."""
        sending = self.assignment.sending
        while backward.launched < len(sending) and not sending[backward.launched].waiting:
            bucket = sending[backward.launched]
            backward.launched += 1
            self._send(backward, bucket)
            if backward.launched == len(sending):
                if backward.usage is None and backward.asks:
                    self._ask(backward, self._used)
                backward.step.last_launch = time.perf_counter()
                if not backward.ending:
                    Variable._execution_engine.queue_callback(self._finish)

    def _send(self, backward: Backward, bucket: Sendable, *, zeros: bool = False) -> None:
        """Give the averager a bucket of gradients; or of `zeros`, on a rank without inputs."""
        if backward.leaves_out and not backward.needs(bucket):
            return
        if zeros:
            bucket.clear()
        else:
            if create_graph := torch.is_grad_enabled():
                self._warn("create_graph", messages.CREATE_GRAPH)
            used = (backward.used_by_any and backward.used_by_any()) or self._used
            try:
                undifferentiated(bucket.fill, used) if create_graph else bucket.fill(used)
            except RuntimeError as error:
                if sparse := bucket.sparse_members():
                    raise self._failure(messages.sparse(self.names_of(sparse))) from error
                raise
        if bucket.absent:
            self._refuse_taken(backward, bucket.absent)
        if not backward.step.number:
            self.averager.begin_step(backward.step)
        backward.step.launched[bucket.number] = time.perf_counter()
        bucket.pending = self.averager.average(bucket)

    def _refuse_taken(self, backward: Backward, absent: Sequence[int]) -> None:
        """Raise RuntimeError where a gradient of a parameter without one came in this backward: zeros would stand for it."""
        if came := set(absent).intersection(backward.order) - backward.undefined:
            raise self._failure(messages.removed(self.names_of(sorted(came))))

    def _ask(self, backward: Backward, used: Sequence[int]) -> None:
        """Have the ranks tell each other which parameters they used."""
        backward.usage = Usage(used, self.transport, self.device, self._timeout)
        backward.used_by_any = backward.usage.by_any

    @torch._disable_dynamo
    def _flush(self) -> None:
        """The end of a backward: what it did not reach was not used."""
        backward = self._backward
        if backward is None or not backward.started or backward.launched == len(self.assignment.sending):
            return
        if backward.counts:
            self._firings = backward.firings()
        backward.ending = True
        for index in range(len(backward.missing)):
            if backward.missing[index] > 0:
                self._pass_over(backward, index)
        self._launch(backward)
        backward.ending = False
        if backward.launched == len(self.assignment.sending):
            self._finish()

    @torch._disable_dynamo
    def _finish(self) -> None:
        """Wait for the buckets, in order, and hand out the averages; or leave that to whoever hands them out later."""
        backward = self._backward
        if backward is None or backward.over:
            return
        backward.over = True
        backward.step.computed = time.perf_counter()
        self.assignment.traces.append(backward.order)
        try:
            later = self.deferred if self.deferred is not None and self.deferred.takes(backward) else None
            if later is None:
                with torch.no_grad():
                    for bucket in self.assignment.buckets:
                        if (average := self.average_of(bucket, backward)) is not None:
                            average = average if self.share == 1.0 else average.div_(self.share)
                            bucket.deliver(average, backward.used_by_any and backward.used_by_any())
        except BaseException as error:
            backward.fails(error)
            raise
        self._backward = None
        self._over = True
        self._end_step(backward)
        if later is None:
            self.delivered(backward)
        else:
            later.hold(backward)
        for end in (*self.at_end, *self.optimizers):
            end()

    def average_of(self, bucket: GradBucket, backward: Backward) -> Tensor | None:
        """Wait for a bucket's average; None where it was not sent."""
        if bucket.pending is None:
            return None
        try:
            average = bucket.pending.wait(self._timeout)
        except Exception as error:
            names = self.names_of(bucket.members)
            raise self._failure(messages.failed(bucket.number, names, error)) from error
        bucket.pending = None
        backward.step.done.setdefault(bucket.number, time.perf_counter())
        return average

    def _end_step(self, backward: Backward) -> None:
        """This rank has given what it has to give."""
        if backward.order:  # not where this rank had no inputs
            before, self.traced = self.traced or backward.order, backward.order
            if before != self.traced and set(before) != set(self.traced):
                self._reached_others = True
        self.usage = backward.usage
        if self.rules.static_graph:
            self._static_usage = backward.used_by_any
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

    def fail(self, backward: Backward, why: str) -> None:
        """Averages of a step that was handed over did not come: the next iteration is told."""
        backward.broken, self._backward = why, backward
