"""The interface of all that averages buckets, and our averager, by a compressor's programs."""

from __future__ import annotations

import logging
import os
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ...compress import Compressor, Layout, specification, warm_up
from ...compress.builder.build import fingerprint
from ...compress.builder.sent_in_vain import sent_in_vain
from ...compress.protocol.requests import Op
from ...compress.simulate import operations_of
from ...compress.state.gauge import EVERY
from ...kernels import pool
from ..buckets.assignment import Allocate
from ..buckets.grad_bucket import GradBucket, as_real, axis_order, layout_of
from ..buckets.memory_format import as_form, templates_in, turnable
from ..buckets.protocol import Bucket, LastingBucket
from ..buckets.slices import BucketSlice, Sendable
from ..buckets.sparse import SPARSE_ROUNDS, SparseBucket
from ..engine.engine import FORKED, Engine
from ..engine.lanes import FuturePending
from ..measure.stats import Measured
from ..measure.step import Step
from ..memory.model_memory import ModelMemory, Snapshot
from ..transport.launchers import on_launched_hosts
from ..transport.protocol import Decorator, Pending
from ..transport.same_setup import alike
from .plans import Bound, Plan, ProgramPlan, Route, Sent, SparsePlan, SumPlan, labelled
from .same_kernels import agree_on_kernels, compile_kernels, varies_with_threads
from .segments import program_of, segments_of
from .shown_averages import Parts, parts_of_bucket, parts_of_slice
from .starting_values import StartingValues
from .step_checks import DivergenceCheck, RepeatedAverageCheck, ReplicaCheck
from .steps import SteppedAverager, Steps

logger = logging.getLogger(__name__)


class Averager(Protocol):
    """Averages the buckets of each step over ranks. All ranks make the same calls in the same order."""

    @property
    def scale(self) -> float:
        """The factor of gradients on their way into a bucket of the next step."""

    @property
    def zero_unused_gradients(self) -> bool:
        """True if stale gradients, of parameters unused on every rank, must be excluded: they would be held back."""

    def begin_step(self, step: Step) -> None:
        """Begin a synchronized step, before its first bucket."""

    def average(self, bucket: Sendable) -> Pending:
        """Start to average a bucket, after those before it; waiting for what it returns gives the average."""

    def end_step(self) -> None:
        """End the step: all of its averages have been handed out."""


class CompressedAverager(SteppedAverager):
    """The compression of a model's gradients on this rank.

    `groups`: among which buckets go in turn; empty stands for the default group. `partial`: backwards may leave parameters
    out. `decorate`: what to put around each transport. `undo`: see `StepMemory`.
    """

    def __init__(
        self,
        compressor: Compressor,
        groups: Sequence[dist.ProcessGroup],
        timeout: timedelta | None,
        *,
        partial: bool = False,
        decorate: Decorator | None = None,
        undo: bool = False,
    ) -> None:
        super().__init__(groups, timeout, decorate, Steps())
        self.memory: ModelMemory = ModelMemory(compressor, partial=partial, undo=undo)
        self._trained: Sequence[Tensor] | None = None  # what optimizers step, where buckets have its shards
        self._plans = WeakValueDictionary[int, Plan]()  # by the index of a bucket that keeps it, or of those below
        self._hooked: dict[int, Plan] = {}  # those of what hooks are given
        self._agreed = False  # with the other ranks, since what is known of buckets was forgotten
        self._epoch = object()  # made anew when what is known of buckets is forgotten
        self._diverges, self._replicas = DivergenceCheck(), ReplicaCheck()
        self._repeated, self._process = RepeatedAverageCheck(self.engines.agreement), os.getpid()
        self._loaded_order: list[str] = []
        self.starting_values = StartingValues()
        self._warned: Compressor | None = None  # the compressor of which the log has spoken
        # Fields that others set:
        self.names: dict[Tensor, str] = {}  # by `Handle`
        self.strides: dict[Tensor, tuple[int, ...]] = {}  # by `Handle`: of parameters when they were bound
        self.begun_by_reducer = False  # by `UserHook`: our reducer begins its steps, and calls a hook for each bucket
        self.copies = False  # by `handle_for`: torch's DDP calls a hook, and copies gradients from and to its buckets
        self.sparse = False  # by our own DDP: any bucket of it is; then all go beside backward, in one order
        self.drain: Callable[[], None] = lambda: None  # by `Overlap`: waits for averages that come after backward's end

    @property
    def scale(self) -> float:
        """The factor of gradients on their way into a bucket of the next step: 1 / ranks if they are only averaged."""
        return 1 / self.engines.group.size() if self.memory.averages else 1.0

    @property
    def zero_unused_gradients(self) -> bool:
        """True if stale gradients, of parameters that no rank used, must be excluded: they would be held back."""
        return self.memory.remembers

    def measured(self) -> Measured:
        """Return the records of the last steps."""
        steps, engines = self.totals.recent_and(None if self.under_way else self.step), self.engines
        begun, ranks, on_host = self.steps_begun, engines.group.size(), engines.on_host
        warming = warm_up(self.memory.compressor, self.memory.step)
        return Measured(steps, self.stats(), begun, ranks, on_host=on_host, warm_up=warming)

    def allocator(self, device: torch.device) -> Allocate:
        """Return what allocates the buckets of our own DDP."""
        return self.engines.allocator(self.memory.compressor, device, sums=self.scale != 1.0)

    def look_for_discarded(self, trained: Sequence[Tensor]) -> None:
        """Look for averages of these parameters that are thrown away, where buckets have their shards."""
        self._trained = trained
        self.discarded.watch(trained if self.memory.remembers else ())

    def begin_step(self, step: Step) -> None:
        """Begin a step, before its first bucket."""
        self.steps.begin()
        self.enter_step(step)

    def enter_step(self, step: Step | None = None) -> None:
        """Take part in the step that `steps` has begun, of which this is the record: the step before is committed.

        `begin_step` calls it. Of FSDP2's replicas `Arrivals` begins `steps` itself, then calls it.
        """
        if os.getpid() != self._process:
            raise RuntimeError(FORKED)
        step, memory = step or Step(), self.memory
        if self._replicas.transport is not None:
            plans = [plan for _, plan in sorted(self._plans.items())]
            self._replicas.check(self.steps_begun, [list(plan.bound.named.values()) for plan in plans])
        self.totals.begin(step, memory.step)
        with self.steps.lock:
            if self._repeated.suspected:
                self._repeated.warn(spoken=self.engines.first)
            if self.discarded.parameters:
                self.discarded.check(lambda: memory.counts)
            if memory.step % EVERY == 0:
                self._diverges.check(memory.live)
            self.totals.count(self.step.costs, self.step)
            self.step, step.number = step, memory.begin_step()
            step.setup = memory.compressor, bisect(memory.starts, step.number - 1)
            self.engines.agreement.step += 1
            self.inside = True

    def end_step(self) -> None:
        """End the step that `begin_step` began: all of its averages have been handed out."""
        self.steps.end()

    def step_is_over(self) -> None:
        """Look at gradients where shards of them were averaged: torch has put them into their places now."""
        if self._trained and self.discarded.parameters:
            self.discarded.look()

    def between_steps(self, change: Callable[[], None]) -> None:
        """Change the memory now, or when the step is over that runs on another thread."""
        self.drain()
        super().between_steps(change)

    def average(self, bucket: LastingBucket) -> Pending:
        """Start to average a bucket that keeps its plan in place, after those before it."""
        plan: Plan | None = bucket.plan
        if plan is None or plan.bound.epoch is not self._epoch or plan.bound.scale != bucket.scale:
            plan = bucket.plan = self.bind(bucket, bucket.all_parameters, bucket.scale)
        return plan.start(self.step, bucket)

    def average_hooked(self, bucket: Bucket) -> FuturePending:
        """Start to average a bucket that a hook was given. torch makes a new object for each call, so its index counts."""
        plan, parameters = self._hooked.get(bucket.index()), bucket.parameters()
        known = plan is not None and list(map(id, plan.bound.named.values())) == list(map(id, parameters))
        # torch's DDP makes its buckets anew once, after its first step: in the second one they may have other formats
        may_differ = self.engines.agreement.step == 2
        if plan is None or not known or (may_differ and self._format_changed(plan, bucket)):
            plan = self._hooked[bucket.index()] = self.bind(bucket, parameters)
        pending = plan.start(self.step, bucket)
        assert isinstance(pending, FuturePending)
        return pending

    def bind(self, bucket: Bucket, parameters: Sequence[Tensor], scale: float | None = None) -> Plan:
        """Meet a bucket that was not there before, or not with this scale. All ranks meet the same one at the same time.

        `scale`: of our own DDP's, see `Bound`; None for what a hook of torch's is given, also to average over replicas.
        """
        index, buffer = bucket.index(), bucket.buffer()
        engine, named = self.engines.of(buffer.device, index), {self._name(each): each for each in parameters}
        if isinstance(bucket, SparseBucket):
            engine.prepare(SPARSE_ROUNDS)
            parts: Parts = partial(parts_of_bucket, tuple(named), ())
            bound = Bound(self._epoch, scale, named, Route(engine, needs_future=scale is None), self.shown, parts)
            label, sizes = labelled(index, tuple(named)), (buffer.numel(), buffer.element_size())
            sent = Sent(label, tuple(named), *sizes, nbytes=0)  # of rows that are not known
            return SparsePlan(bound, self.memory, self.engines.group.size(), sent)
        if index == 0 and self.memory.remembers:  # a few parameters suffice
            self.discarded.watch(parameters if self._trained is None else self._trained)
            self._repeated.watch(parameters)
        plan = self._plans[index] = self._bind_dense(bucket, named, engine, scale)
        with self.steps.lock:
            self.memory.arrange(names for _, each in sorted(self._plans.items()) for names in each.bound.buckets)
        return plan

    def _bind_dense(self, bucket: Bucket, named: Mapping[str, Tensor], engine: Engine, scale: float | None) -> Plan:
        """Return the plan of a bucket of dense gradients: one all-reduce where nothing is remembered, else programs.

        The first row that fits holds:

        | `op` | gradients | plan |
        | --- | --- | --- |
        | sum | come divided by the ranks, in our own DDP | an all-reduce adds them up |
        | mean | come whole, as to a hook, and are only averaged | an all-reduce divides, then adds them up |
        | None | are encoded, belong to several loaded buckets, or are none | programs |
        """
        memory, index, buffer = self.memory, bucket.index(), bucket.buffer()
        flat = as_real(buffer)  # first: it refuses sparse gradients
        templates = dict(zip(named, self._templates(bucket, list(named.values())), strict=True))
        layout = self._met(named, templates, flat, engine)
        with self.steps.lock:
            found = segments_of(memory, bucket, templates, layout)
        pool.release()  # of what former buckets and the move of their state took: torch's first one is the whole model
        # before `op` is known: it opens the channels, which sums need as well
        segments = [program_of(each, memory, engine, index, buffer) for each in found]
        op: Op | None = None
        if flat.numel() and scale not in (None, 1.0):
            op = "sum"
        elif flat.numel() and memory.averages and all(places is None for _, places in found):
            op = "mean"
        hooked, sliced = scale is None, isinstance(bucket, BucketSlice)
        forms = list(map(as_form, templates.values()))
        parts: Parts = partial(parts_of_bucket, layout.names, forms)
        if isinstance(bucket, BucketSlice):
            parts = partial(parts_of_slice, bucket.layout(layout))
        may_turn = turnable(named, forms) if self.copies and isinstance(bucket, dist.GradBucket) else {}
        on_wait = op is not None and not (hooked or self.sparse)
        route = Route(engine, needs_future=hooked, on_wait=on_wait, per_host=layout.ranks.per_host)
        names = [*(sent.names for _, sent in segments), layout.names]
        bound = Bound(self._epoch, scale, named, route, self.shown, parts, forms, may_turn, names)
        if op is None:
            return ProgramPlan(bound, memory, segments)
        whole = sliced or len(bucket.parameters()) == len(named)  # and not only what some rank has used in this step
        elements, size = flat.numel() if whole else layout.numel, flat.element_size()
        sent = Sent(labelled(index, layout.names), layout.names, elements, size, elements * size)
        return SumPlan(bound, op, sent, buffer if whole and not hooked else None)

    def _templates(self, bucket: Bucket, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """Tensors in the memory formats of the parameters' gradients in a bucket's buffer."""
        if isinstance(bucket, GradBucket | BucketSlice):
            return bucket.views
        return templates_in(bucket, self.strides) if isinstance(bucket, dist.GradBucket) else parameters

    def _format_changed(self, plan: Plan, bucket: Bucket) -> bool:
        """Return True if gradients have another memory format."""
        now = self._templates(bucket, bucket.parameters())
        return bool(plan.bound.forms) and list(map(axis_order, now)) != list(map(axis_order, plan.bound.forms))

    def _met(
        self, named: Mapping[str, Tensor], templates: Mapping[str, Tensor], flat: Tensor, engine: Engine
    ) -> Layout:
        """Return the layout of a bucket that was not there before.

        At the first one since a change all ranks meet, and compare their setups, then their kernels: collective calls all.
        """
        ranks = self.engines.placed_ranks(self.memory.compressor, flat.device)
        engine.transport.arrange(ranks.per_host)
        layout = layout_of(templates, flat.dtype, flat.device, ranks)
        if not self.memory.averages:
            compile_kernels(self.memory.compressor, layout)
        if not self._agreed:
            self.memory.claims.expect(self.names.values(), self.memory.compressor, ranks.per_host)
            values = self.starting_values.text(named.values()) if self.starting_values.due else None
            self.engines.agreement.barrier(engine.transport, self.engines.timeout)
            engine.agree(setup(self.memory, layout, values))
            operations = operations_of(self.memory.compressor, flat.dtype, ranks)
            dtypes = {flat.dtype, *(each.dtype.to_real() for each in self.names)}
            varies = varies_with_threads(self.memory.compressor, operations, dtypes)
            differ = agree_on_kernels(operations, engine.transport, flat.device, varies_with_threads=varies)
            self._replicas.transport = engine.transport if differ else None
            self._log_warm_up()
            on_hosts = ranks if ranks.per_host > 1 else on_launched_hosts(ranks)
            self.log_advice(sent_in_vain(self.memory.compressor, flat.dtype, on_hosts))
            self._agreed = True
        return layout

    def _log_warm_up(self) -> None:
        """Say once for each compressor, on the first rank, that it does not compress yet."""
        compressor, found = self.memory.compressor, warm_up(self.memory.compressor, self.memory.step - 1)
        if found is not None and compressor is not self._warned and self.engines.first:
            self._warned = compressor
            logger.warning("gradwire: %s", found)

    def _name(self, parameter: Tensor) -> str:
        return self.names.setdefault(parameter, str(len(self.names)))

    def snapshot(self) -> Snapshot:
        """The memory after the last step that came to its end; on any thread, at any time.

        Where the step that is under way on another thread overwrites residuals, the memory after that step.
        """
        self.drain()
        return self.steps.snapshot(lambda: self.memory.snapshot(under_way=self.under_way))

    def load(self, saved: Mapping[str, Any], *, follow: bool = True) -> None:
        """Go on from a saved state, between steps; `follow`: with its order of buckets, if that is not the first step's."""
        self.memory.load_state_dict(saved)
        self.starting_values.expect()
        if follow and saved["step"] > 1:
            self._loaded_order = [name for names in saved["buckets"] for name in names]
        self._forget()

    def loaded_order(self) -> Sequence[str]:
        """The parameters in the order of a state that has just been loaded, if it is not the first step's; told once."""
        order, self._loaded_order = self._loaded_order, []
        return order

    def replace(self, compressor: Compressor) -> None:
        """Go on with another compressor; what is held back is not lost."""
        self.memory.refuse(compressor)  # to whoever asks: another thread may make the change
        self.between_steps(lambda: self._replace(compressor))

    def _replace(self, compressor: Compressor) -> None:
        self.memory.replace(compressor)
        self._forget()

    def _forget(self) -> None:
        """Forget the plans of all buckets, and a step that is under way: before its next bucket a rank meets the others."""
        self.totals.count(self.step.costs, self.step)
        self.step = Step()
        self.steps.leave(self)
        self._plans, self._hooked, self._epoch = WeakValueDictionary(), {}, object()
        self._agreed = False
        self.engines.agreement.due = True
        self.discarded.watch(())
        self._repeated.watch(())

    def close(self) -> None:
        """End the threads and process groups that were made; training with it is over."""
        try:
            self.drain()
        finally:
            super().close()


def setup(memory: ModelMemory, layout: Layout, values: str | None) -> str:
    """Return what ranks must agree on at a first bucket. `values`: of its parameters: see `StartingValues`."""
    bucket = f"{len(layout.names)} parameters, {layout.numel} x {layout.dtype}"
    told = "" if values is None else f", {values}"
    unused = " and find_unused_parameters=True" if memory.partial else ""
    # `begin_step` has counted this step already
    rest = f" at step {memory.step - 1}{unused} with a first bucket of {bucket}{told}"
    return alike(fingerprint(memory.compressor) + rest, specification(memory.compressor) + rest)
