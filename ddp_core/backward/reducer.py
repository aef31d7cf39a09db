"""The reducer (Li et al. 2020, algorithm 1): gradients get ready, buckets leave in order, backward ends with the last."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from ..buckets.assignment import BucketPlan
from ..buckets.grad_bucket import Average, GradBucket
from ..measure.timeline import Timeline
from . import messages as complaints
from .calm import Calm, Hooks
from .graph import Nodes, arriving, gradient_node, undifferentiated
from .progress import NONE, Backward, Rules, Wishes
from .usage import Usage
from .weak_calls import weakly


class Reducer(complaints.Complainer):
    """Averages the gradients of `parameters` during backward, by `average`, bucket by bucket.

    `names`: of the parameters, for messages. `plan`: their buckets. `timeout`: of waits on the CPU.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        plan: BucketPlan,
        rules: Rules,
        group: dist.ProcessGroup,
        average: Average,
        timeout: timedelta | None = None,
    ) -> None:
        super().__init__()
        self.average, self.group = average, group
        self.rules, self._timeout = rules, timeout
        self._parameters, self._names = list(parameters), list(names)
        self._firings: list[int] | None = None  # of each parameter's hook in a step; None until a static graph is known
        self._static_usage: Sequence[int] | None = None  # by index, not 0 for parameters that any rank uses in it
        self._backward: Backward | None = None
        self._used = bytearray(len(parameters))  # on this rank, since the last synchronization
        self._over = False  # the averages are there, and no forward has begun since
        self.finished = 0
        self.share = 1.0  # of the ranks that have inputs, where the average is to be over these
        self.at_end: list[Callable[[], None]] = []
        self.timeline = Timeline()
        self.plan = plan
        self.anchor = torch.zeros((), requires_grad=True, device="cpu")
        self._anchor_node = gradient_node(self.anchor)
        self._nodes = Nodes(self._parameters)
        self._lock = threading.RLock()  # autograd has a thread for each GPU
        self._several = len({parameter.device for parameter in parameters}) > 1
        hooks = Hooks(self._nodes, weakly(self._fired), self._lock if self._several else None)
        weakref.finalize(self, hooks.keep, ()).atexit = False
        self._calm = Calm(self.plan, self._parameters, hooks)

    def begin(self, wishes: Wishes = NONE) -> None:
        """The end of a forward whose backward is to be synchronized, with gradients as `average` wants them."""
        self.require_finished()
        self._over = False
        self.timeline.step_begins()
        plain = not (self.rules.dynamic or self.rules.static_graph or self._several)
        self._backward = self._opened(wishes, asleep=self._calm.falls_asleep(allowed=plain))
        for index, firings in enumerate(self._firings or ()):
            if not firings:
                self._settle(self._backward, index, brought=False)

    def _opened(self, wishes: Wishes, asleep: Sequence[frozenset[int]] = ()) -> Backward:
        for bucket in self.plan.buckets:
            bucket.open(wishes.scale, asleep[bucket.number] if asleep else ())
        counts = self.counts
        return Backward(
            missing=[1] * len(self._parameters) if self._firings is None else list(self._firings),
            counts=counts,
            started=not (counts or self.rules.dynamic),
            asks=self.rules.dynamic or (self.rules.static_graph and self._static_usage is None),
            skips=self.rules.skip_all_reduce_unused_params,
            fresh=wishes.fresh,
            static_usage=self._static_usage,
            asleep=asleep,
        )

    def pause(self) -> None:
        """A forward whose backward is not synchronized."""
        self.require_finished()
        self._over = False

    @property
    def counts(self) -> bool:
        """Whether this step waits for the end of backward: the first one of a static graph, which it counts."""
        return self.rules.static_graph and self._firings is None

    @property
    def watches(self) -> bool:
        """Whether it has to be told that a backward begins."""
        return self.rules.dynamic or self.counts

    def start(self) -> None:
        """The beginning of a backward, told by a sink or the first gradient: what it will not reach is ready."""
        with self._lock:
            backward = self._backward
            if backward is None or backward.started:
                return
            comes = arriving(self._nodes, self._anchor_node)
            if comes is None:
                return
            backward.started = True
            Variable._execution_engine.queue_callback(self._flush)
            if backward.counts:
                return
            for index in range(len(comes)):
                if not comes[index]:
                    self._settle(backward, index, brought=False)
            if backward.skips or backward.fresh:
                backward.usage = self._ask([a or b for a, b in zip(comes, self._used, strict=True)])
            else:
                self._launch(backward)

    def require_finished(self) -> None:
        """Raise RuntimeError where the last synchronized backward did not come to its end."""
        backward = self._backward
        if backward is None or not backward.under_way:
            return
        if backward.broken:
            raise self._failure(complaints.broken(backward.broken))
        self._calm.look_over(backward, self._used)
        absent = {index: name for index, name in enumerate(self._names) if backward.missing[index] > 0}
        static, watched = self._firings is not None, self.rules.find_unused_parameters
        raise self._failure(complaints.unfinished(absent, self.group.rank(), static=static, watched=watched))

    def _fired(self, index: int, _: Any, gradients: tuple[Tensor | None, ...]) -> None:
        """A parameter's hook: its gradient is there, or undefined, where the loss did not depend on it."""
        if defined := gradients[0] is not None:
            self._used[index] = 1
        if (backward := self._backward) is not None:
            self._mark(backward, index, defined)
        elif self._over:
            self._warn("late", complaints.late(self._names[index]))

    def _mark(self, backward: Backward, index: int, defined: bool) -> None:
        """One firing of a parameter's hook."""
        if not backward.started:
            self.start()
        backward.missing[index] -= 1
        if backward.missing[index] or backward.counts:
            self._await_others(backward, index)
            return
        if backward.asleep and not backward.listens:
            self._calm.listen(backward, self._used)
        backward.order.append(index)
        self._settle(backward, index, brought=defined)
        if not self.plan.bucket_of[index].waiting:
            self._launch(backward)

    def _woken(self, backward: Backward, bucket: GradBucket) -> bool:
        """Whether members without hooks are late: from here on they have some, and the bucket waits for them.

        One that this backward reaches, and that has no gradient at its end, had an undefined one before it was woken.
        """
        if not (late := self._calm.late(backward, bucket, self._used)):
            return False
        come = arriving([self._nodes[index] for index in late], self._anchor_node) or [False] * len(late)
        reached = [index for index, comes in zip(late, come, strict=True) if comes]
        Variable._execution_engine.queue_callback(partial(self._end_without, backward, reached))
        return True

    def _await_others(self, backward: Backward, index: int) -> None:
        """A firing that is not the last one of its parameter, or none that was expected."""
        if backward.counts:
            backward.order.append(index)
        elif backward.missing[index] < 0:
            passed_over = index not in backward.order
            static = self._firings is not None
            backward.order.append(index)  # it is under way, and will not come to its end
            raise self._failure(complaints.twice(self._names[index], static=static, passed_over=passed_over))

    def _settle(self, backward: Backward, index: int, *, brought: bool) -> None:
        """Count a parameter as ready: its gradient is there, or none will come."""
        backward.missing[index] = 0
        bucket = self.plan.bucket_of[index]
        if brought:
            bucket.bring(index)
        else:
            bucket.skip()
        if not bucket.waiting and not (backward.asleep and self._woken(backward, bucket)):
            backward.orderly &= bucket.number == backward.launched
            self.timeline.bucket_ready(bucket.number)

    def _launch(self, backward: Backward) -> None:
        """Send the buckets that are complete, in order; with the last one, ask for the end of backward."""
        while backward.launched < len(self.plan.buckets) and not self.plan.buckets[backward.launched].waiting:
            bucket = self.plan.buckets[backward.launched]
            backward.launched += 1
            self._send(backward, bucket)
            if backward.launched == len(self.plan.buckets):
                if backward.usage is None and backward.asks:
                    backward.usage = self._ask(self._used)
                self.timeline.all_launched()
                if not backward.ending:
                    Variable._execution_engine.queue_callback(self._finish)

    def _send(self, backward: Backward, bucket: GradBucket) -> None:
        """Give a bucket to its average."""
        if torch.is_grad_enabled():
            self._warn("create_graph", complaints.CREATE_GRAPH)
        if backward.needs(bucket):
            try:
                undifferentiated(bucket.fill, backward.used_by_any() or self._used)
            except RuntimeError as error:
                gradients = {self._names[index]: self._parameters[index].grad for index in bucket.members}
                if sparse := [name for name, grad in gradients.items() if grad is not None and grad.is_sparse]:
                    raise self._failure(complaints.sparse(sparse)) from error
                raise
            bucket.average = self.average(bucket)

    def _ask(self, used: Sequence[int]) -> Usage:
        return Usage(used, self.group, self._parameters[0].device, self._timeout)

    def _flush(self) -> None:
        """The end of a backward: what it did not reach was not used."""
        backward = self._backward
        if backward is None or not backward.started or backward.launched == len(self.plan.buckets):
            return
        if backward.counts:
            self._firings = backward.firings()
        self._end_without(backward, range(len(backward.missing)))

    def _end_without(self, backward: Backward, indices: Sequence[int]) -> None:
        """The end of a backward that will bring no gradients for these parameters, if it has not."""
        if self._backward is not backward:
            return
        backward.ending = True
        for index in indices:
            if backward.missing[index] > 0:
                self._settle(backward, index, brought=bool(self._used[index]))
        self._launch(backward)
        backward.ending = False
        if backward.launched == len(self.plan.buckets):
            self._finish()

    def _finish(self) -> None:
        """Wait for the buckets, in order, and hand out the averages."""
        backward = self._backward
        if backward is None or backward.over:
            return
        backward.over = True
        self.timeline.computation_ends()
        with backward:
            undifferentiated(self._hand_out, backward)
        self._backward = None
        if not backward.asleep:
            self.plan.trace(backward.order)
        self._calm.went(alike=backward.orderly and self.plan.traced_alike is not None)
        self._over = True
        self._end_step(backward)
        for end in self.at_end:
            end()

    def _hand_out(self, backward: Backward) -> None:
        for bucket, average in self._averages():
            if (index := bucket.disturbed()) is not None:
                raise self._failure(complaints.twice(self._names[index], static=False, passed_over=False))
            bucket.deliver(average if self.share == 1.0 else average.div_(self.share), backward.used_by_any())

    def _averages(self) -> Iterator[tuple[GradBucket, Tensor]]:
        for bucket in self.plan.buckets:
            if bucket.average is not None:
                try:
                    average = bucket.average.wait()
                except Exception as error:
                    names = [self._names[index] for index in bucket.members]
                    raise self._failure(complaints.failed(bucket.number, names, error)) from error
                bucket.average = None
                self.timeline.bucket_done(bucket.number)
                yield bucket, average

    def _end_step(self, backward: Backward) -> None:
        if self.rules.static_graph:
            self._static_usage = backward.used_by_any()
        self._used = bytearray(len(self._parameters))
        self.finished += 1

    def detach(self) -> None:
        """Take the hooks off the parameters."""
        self._calm.end()

    def _failure(self, text: str) -> RuntimeError:
        self.detach()  # it averages no more; another one may
        return super()._failure(text)
