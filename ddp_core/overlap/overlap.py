"""Communication that goes on while the next forward runs (Jayarajan et al. 2019), for our DistributedDataParallel.

Backward returns when gradients have left. Each bucket then is a `PendingUpdate`, and its parameters wait for it where they
are used: see `pending_parameter.py`. What leaves when is `slice_order.py`'s.

Nothing hangs, whatever waits when. Backward submits all programs of a step, in an order that the ranks have agreed on. It
starts plain sums itself; lanes start all else in the same order, perhaps during forward (on CUDA backward's end queues
it). Who waits starts nothing: no rank's progress depends on where another one waits, only on its running the same
backwards. So ranks may wait in any order, one may read a gradient that others do not, and a rank that waits in a barrier
holds up nobody. A wait ends with the error of whatever has failed; lanes keep the model's time limit in each round.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ..averaging.averager import CompressedAverager
from ..buckets.assignment import allocate_own
from ..buckets.sparse import SparseBucket
from ..reducer.autograd import compiles, scripted, weak_call
from ..reducer.backward import Backward
from ..reducer.bucket_order import BucketOrder
from ..reducer.reducer import Delivery, Reducer
from . import error_messages
from .early_reads import EarlyReadWarning
from .measured_step import noted
from .partial_step import PartialStep
from .pending_parameter import PendingParameter, clear
from .pending_update import PendingUpdate, clear_now
from .slice_order import SliceOrder, slice_bytes


@dataclass(frozen=True)
class OverlapReport:
    """The report of an overlapped model, on this rank.

    `step`: the last one whose updates were all made; 0 before the first. `exposed`: seconds that its communication held up
    training; None if it waited at backward's end. On CUDA, where the host does not know, those of the last measured step:
    None before there is one, and with parameters on several GPUs. `order`: "backward", "priority" where the plan in use
    differs from backward's order, or "synchronous". `bound`: seconds of the shortest step that any order allows on this
    link (T*), and `synchronous_bound` of one that waits at backward's end, both computed from measured times; None before
    these are there. `readers`: how many steps were made to wait between backward and the next forward, by the line of code
    that did so.
    """

    step: int
    exposed: float | None
    order: str
    bound: float | None
    synchronous_bound: float | None
    readers: Mapping[str, int]

    def __str__(self) -> str:
        """A few lines for people."""
        bounds = (
            f"at best {self.bound:.4f} s per step, {self.synchronous_bound:.4f} s without overlap"
            if self.bound is not None and self.synchronous_bound is not None
            else "no bounds yet"
        )
        exposed = "nothing measured yet" if self.exposed is None else f"{self.exposed:.4f} s exposed"
        lines = [f"step {self.step}: order {self.order}, {exposed}; {bounds}"]
        return "\n".join(
            [*lines, *(f"waited for early by {where}: {count} steps" for where, count in self.readers.items())]
        )


class Overlap(Delivery):
    """The updates of one model that are under way, and who waits for them.

    `steppers`: of its optimizers, which are checked here, and hand them to `step`.
    """

    def __init__(self, module: nn.Module, steppers: Iterable[PartialStep], order: str, slice_mb: float | None) -> None:
        for stepper in steppers:
            stepper.check_parameters(module)
        self._module, self._wanted, self._slice_mb = module, order, slice_mb
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._pending: dict[PendingUpdate, None] = {}
        self._updates: list[PendingUpdate] = []  # all of the last step's
        # Of an optimizer's groups, by bucket, and the buckets and groups that they were found for.
        self._members: dict[PartialStep, tuple[object, dict[int, list[list[Tensor]]]]] = {}
        self._began, self._in_forward, self._joins = 0.0, False, False
        self._forward_now = time.perf_counter  # the clock of a forward: that of the step before it, until it ends
        self._measuring = False  # True from the backward of a step that is measured to the end of the next forward
        self._unseen: set[int] = set()  # members of the buckets that the last forward was not seen to use
        self._step_number = 0
        self._exposed: float | None = None
        self._warned: set[str] = set()
        self._early_reads = EarlyReadWarning()

    def bind(self, reducer: Reducer, averager: CompressedAverager, buckets: BucketOrder) -> None:
        """Take over a model's reducer: slices for buckets, and averages that come later. A collective call."""
        self._reducer, self._averager = reducer, averager
        device = reducer.device
        averager.drain, self._buckets = weak_call(self.drain), buckets
        self._members = {}
        self._updates, self._measuring, self._forward_now = [], False, time.perf_counter
        self._slice()
        devices = list(dict.fromkeys(each.device for each in reducer.parameters))
        self.order = SliceOrder(self._wanted, reducer.assignment, reducer.transport, devices)
        self._marks_late = not self.order.clock.at_once
        self._refuses_capture = device.type == "cuda" and self._wanted != "synchronous"
        self.now: Callable[[], float] = time.perf_counter

    def update(self) -> None:
        """Between steps, where all ranks are: see `SliceOrder`. After a swap the slices are made anew."""
        memory = self._averager.memory
        if self._sliced_for != (memory.compressor, memory.any_rank_owes):
            self._slice()
        finished = self._reducer.finished
        self.order.update(finished)
        if self._marks_late:  # which costs something, where an order is looked for
            self.now = self.order.clock.now if self.order.measures(finished) else time.perf_counter

    def _slice(self) -> None:
        """Make buckets of the size of slices, and cut what is larger, where that is of use and what is remembered allows."""
        averager, device, rules = self._averager, self._reducer.device, self._reducer.rules
        allocate = averager.allocator(device)
        in_parts = rules.dynamic or rules.skip_all_reduce_unused_params or rules.static_graph
        cut = allocate is allocate_own and averager.memory.may_be_cut and not in_parts
        whole = sum(parameter.nbytes for parameter in self._reducer.parameters)
        self._buckets.resize(slice_bytes(averager, whole, self._slice_mb), allocate, cut=cut)
        # while anything is carried over, gradients come whole, and sums have no buckets in shared memory
        self._sliced_for = averager.memory.compressor, averager.memory.any_rank_owes

    @property
    def pending(self) -> bool:
        """True if any update is under way."""
        return bool(self._pending)

    def deliver(self, reducer: Reducer, backward: Backward) -> None:
        """Hand out averages where they are used; at backward's end where these may not come later.

        Raises RuntimeError in a CUDA graph.
        """
        if self._refuses_capture and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(error_messages.CAPTURED)
        if self._unseen and (used := self._reducer.brought_of(self._unseen)):
            self._warn(error_messages.unseen(self._reducer.names_of(used)))
        reason = self._obstacle(backward) if self.order.overlaps else ""
        if reason:
            self._warn(error_messages.synchronous(reason))
        if reason or not self.order.overlaps:
            super().deliver(reducer, backward)
            self._step_number, self._exposed = backward.step.number or self._step_number, None
            return
        reducer.end(backward)
        self._hold(backward)

    def _warn(self, text: str) -> None:
        """Once."""
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=2)

    def _obstacle(self, backward: Backward) -> str:
        """Why a step has to be synchronous."""
        if backward.asks and not self._reducer.rules.static_graph:  # which asks in its first step alone
            return "find_unused_parameters=True"
        if any(isinstance(bucket, SparseBucket) for bucket in self._reducer.assignment.buckets):
            return "sparse gradients"
        if self._joins or self._reducer.share != 1.0:
            return "join()"
        if self._reducer.optimizers:
            return "an optimizer that steps in backward"
        return "create_graph=True" if torch.is_grad_enabled() else ""

    def _hold(self, backward: Backward) -> None:
        """Let the parameters of a step, all of which was sent, wait for its averages."""
        with self._lock:
            self._averager.engines.send_all()
            self._early_reads.next_step()
            buckets = self._reducer.assignment.buckets
            self._updates = [PendingUpdate(self.before_use, bucket, backward) for bucket in buckets]
            self._pending, self._forward_now = dict.fromkeys(self._updates), backward.step.now
            backward.step.overlapped = True
            self._measuring = self._forward_now == self.order.clock.now

    def before_use(self, update: PendingUpdate) -> None:
        """Wait for an update, and make it, unless it was made: somebody uses its parameters."""
        with self._lock:
            if update in self._pending and not self._in_forward:
                self._early_reads.note()
            self._wait_and_make(update)

    def _wait_and_make(self, update: PendingUpdate) -> None:
        with self._lock:
            if update not in self._pending:
                return
            if os.getpid() != self._process:
                raise RuntimeError(error_messages.forked(self._names([update])))
            update.needed = update.needed or update.backward.step.now()
            try:
                average = self._reducer.average_of(update.bucket, update.backward)
                update.arrived = update.backward.step.now()
                update.waited = update.arrived - update.needed
            except Exception as error:
                raise self._failed(update, error) from error
            try:
                update.make(average)
            except Exception as error:
                raise self._failed(update, RuntimeError(error_messages.raised(error, self._names([update])))) from error
            del self._pending[update]
            if not self._pending:
                self._end_step(update.backward)

    def _end_step(self, backward: Backward) -> None:
        waited = sum(update.waited for update in self._updates)
        backward.step.ended = backward.step.computed + waited
        self._reducer.delivered(backward)
        self._step_number = backward.step.number
        # from the last gradient on, as in stats
        self._exposed = waited + backward.step.computed - backward.step.last_launch

    def _failed(self, update: PendingUpdate, error: Exception) -> RuntimeError:
        """An average did not come, or an update raised: nothing else is updated, and training with it is over.

        Each parameter is as before or after its step, except those whose update raised: these may be half changed.
        """
        made = [each for each in self._updates if each not in self._pending and each.steps]
        pending, self._pending = list(self._pending), {}
        for each in pending:
            each.give_up()
        left = [each for each in pending if each is not update or not each.begun]
        told = RuntimeError(error_messages.not_updated(str(error), *(self._names(each) for each in (made, left))))
        self._reducer.break_off(update.backward, told)
        return told

    def _names(self, updates: Iterable[PendingUpdate]) -> list[str]:
        return self._reducer.names_of(chain.from_iterable(update.bucket.members for update in updates))

    def drain(self) -> None:
        """Wait for all updates that are under way; on any thread."""
        with self._lock:
            for update in list(self._pending):
                self._wait_and_make(update)

    def leave(self) -> None:
        """Have nothing more to do with today's buckets, which need their memory for others."""
        self.drain()
        self._updates, self._measuring, self._forward_now = [], False, time.perf_counter

    def step(self, stepper: PartialStep) -> None:
        """An optimizer's step: now for what was handed out, with the same hyperparameters later for what has not."""
        with self._lock:
            members = self._members_of(stepper)
            for update in list(self._pending):
                # this step takes a late gradient, too; an earlier step that was asked for comes before this one
                if update.added_to or update.precedes(stepper, chain.from_iterable(members[update.bucket.number])):
                    self._wait_and_make(update)
            if not self._pending:
                return stepper.whole()
            settings, pending = stepper.settings(), list(self._pending)
            waiting = list(chain.from_iterable(update.parameters for update in pending))
            stepper.run(settings, stepper.others(waiting))
            for update in pending:
                update.steps[stepper] = partial(stepper.run, settings, members[update.bucket.number])
            increment_version(waiting)  # a graph that has saved them is not to be gone through any more

    def _members_of(self, stepper: PartialStep) -> Mapping[int, list[list[Tensor]]]:
        """Return by pending bucket the parameters that an optimizer has, by group; these may be others than before."""
        now = self._reducer.assignment.builds, stepper.identity()
        known, members = self._members.get(stepper, (None, {}))
        if known != now:
            known, members = self._members[stepper] = now, {}
        for update in self._pending:
            if (number := update.bucket.number) not in members:
                members[number] = stepper.members(update.parameters)
        return members

    def clear(self, parameters: Iterable[Tensor], *, to_none: bool) -> None:
        """Clear gradients: of what is under way once it was used. Nothing is waited for."""
        with self._lock:
            for parameter in parameters:
                if type(parameter) is PendingParameter:
                    clear(parameter, to_none=to_none)
                else:
                    clear_now(parameter, to_none=to_none)

    def report(self) -> OverlapReport:
        """Return the report of the steps so far."""
        exposed = self._exposed if self.order.clock.at_once else self.order.measurements.exposed
        counts = dict(self._early_reads.counts)
        return OverlapReport(self._step_number, exposed, self.order.name, *self.order.bounds, counts)

    def forward_begins(self, *, joins: bool) -> None:
        """Begin a forward of our DistributedDataParallel. `joins`: ranks may run out of inputs."""
        self._joins, self._in_forward, self._began = joins, True, self._forward_now()
        if not self._pending:
            return
        if unnoticed := torch.is_grad_enabled() and (compiles() or scripted(self._module)):
            self._warn(error_messages.COMPILED)
        if unnoticed or not torch.is_grad_enabled():
            self._measuring = False
            self.drain()

    def forward_ends(self) -> float:
        """Wait for all that is still under way and that forward has not used. Return the seconds that forward waited."""
        if not self._updates:
            self._in_forward, self._unseen = False, set()
            return 0.0
        unused, end = list(self._pending), self._forward_now()
        self.drain()
        self._in_forward = False
        self._unseen = {index for update in unused for index in update.bucket.members}
        waited = sum(update.waited for update in self._updates if update.needed >= self._began)
        if self._measuring:
            self._measuring = False
            self.order.measurements.add(noted(self._updates, (self._began, end)))
        self._forward_now = time.perf_counter
        return waited
