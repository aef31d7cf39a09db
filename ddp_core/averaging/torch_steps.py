"""Guess when the steps of torch's DDP begin and end: it tells communication hooks neither."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from ..measure.step import Step
from .averager import CompressedAverager


class TorchSteps:
    """Begins a step of `averager` with the first bucket of each, unless somebody else has begun it.

    `before_bucket`: looks at a bucket before it is averaged.
    """

    def __init__(self, averager: CompressedAverager) -> None:
        self._averager = averager
        self.before_bucket: Callable[[dist.GradBucket], None] | None = None
        self._step: Step | None = None  # of the last bucket
        self._last_index = -1  # of the last bucket
        self._expected = False  # the next bucket is the first of a step, whatever its index
        self._announced = False  # `expect` is called before each step; else indices alone show where one begins
        self._in_first_step: set[int] | None = set()  # identities of the parameters that it has brought; None after it

    def expect(self) -> None:
        """Note that the next bucket is the first of a step, where indices do not show it, such as with a static graph."""
        self._expected = self._announced = True

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Average a bucket, and begin a step before the first one of each. The future holds the bucket's buffer."""
        if self.before_bucket is not None:
            self.before_bucket(bucket)
        averager, index = self._averager, bucket.index()
        begins = averager.step.number == 0
        if not begins and averager.step is self._step:  # nobody else has begun it
            begins = self._expected or (index <= self._last_index and not (self._announced and self._is_new(bucket)))
        if begins:
            self._in_first_step = self._in_first_step if self._step is None else None
            averager.begin_step(Step())
            if self._announced:
                self._note_end(averager.step)
        self._step, self._last_index, self._expected = averager.step, index, False
        if self._announced and self._in_first_step is not None:
            self._in_first_step.update(map(id, bucket.parameters()))
        average = averager.average_for_hook(bucket)
        if not self._announced:
            self._step.sent = bucket.is_last()
        return average

    def _is_new(self, bucket: dist.GradBucket) -> bool:
        """Return True for another bucket of the first step of a static graph, which has all its buckets at index 0."""
        first = self._in_first_step
        return first is not None and id(bucket.parameters()[0]) not in first

    def _note_end(self, step: Step) -> None:
        """Have the end of backward end the step, where no index shows which bucket is the last one."""
        if torch._C._current_graph_task_id() == -1:
            step.sent = True
        else:
            Variable._execution_engine.queue_callback(partial(setattr, step, "sent", True))
