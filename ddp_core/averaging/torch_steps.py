"""Guess when the steps of torch's DDP begin and end: it tells communication hooks neither."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from ..measure.step import Step
from .averager import CompressedAverager


class TorchSteps:
    """Begins a step of `averager` with the first bucket of each, unless somebody else has begun it."""

    def __init__(self, averager: CompressedAverager) -> None:
        self._averager = averager
        self._step: Step | None = None  # of the last bucket
        self._last_index = -1  # of the last bucket
        self._expected = False  # the next bucket is the first of a step, whatever its index
        self._announced = False  # `expect` is called before each step; else indices alone show where one begins
        self._in_first_step: set[int] = set()  # identities of the parameters that the first step has brought

    def expect(self) -> None:
        """Note that the next bucket is the first of a step, where indices do not show it, such as with a static graph."""
        self._expected = self._announced = True

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Average a bucket, and begin a step before the first one of each. The future holds the bucket's buffer."""
        if self._is_first(bucket):
            self._begin(Step())
        self._step, self._last_index, self._expected = self._averager.step, bucket.index(), False
        if self._averager.steps_begun == 1:
            self._in_first_step.update(map(id, bucket.parameters()))
        average = self._averager.average_for_hook(bucket)
        if not self._announced:
            self._step.sent = bucket.is_last()
        return average

    def _is_first(self, bucket: dist.GradBucket) -> bool:
        """Return True for the first bucket of a step that nobody else has begun."""
        step = self._averager.step
        if step.number == 0 or step is not self._step:
            return step.number == 0
        if (
            self._announced
            and self._averager.steps_begun == 1
            and id(bucket.parameters()[0]) not in self._in_first_step
        ):
            return self._expected  # the first step of a static graph has all its buckets at index 0
        return self._expected or bucket.index() <= self._last_index

    def _begin(self, step: Step) -> None:
        """Begin a step. Where no index shows which bucket is its last one, the end of backward does."""
        self._averager.begin_step(step)
        if self._announced and torch._C._current_graph_task_id() == -1:
            step.sent = True
        elif self._announced:
            Variable._execution_engine.queue_callback(partial(setattr, step, "sent", True))
