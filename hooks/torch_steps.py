"""The steps of torch's DDP, which tells a hook neither when one begins nor when it ends: three ways to find out."""

# torch compares the annotations of a hook themselves, so files of hooks do not postpone them.

import sys
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd import Variable

from ..ddp_core.averaging.steps import Steps
from ..ddp_core.buckets.protocol import Bucket
from .backwards import Backwards


class StepDetector(Protocol):
    """Finds the first bucket of each step, and the step's end. `last_ends`: the last bucket shows that."""

    last_ends: bool

    def begins(self, bucket: Bucket) -> bool:
        """Return True for the first bucket of a step. It is asked once for each bucket."""

    def begun(self, steps: Steps) -> None:
        """Find the end of a step that begins, in the backward that has brought its first bucket."""
        return None


class ByIndex(StepDetector):
    """A bucket whose index does not rise begins a step.

    torch hands over the buckets of a backward in the order of their indices, each of them once: those without a gradient
    come at the end of backward, before those behind them. So the last index shows that all were sent. A backward that broke
    off is followed by one whose first index is 0.
    """

    last_ends = True

    def __init__(self) -> None:
        self._last = sys.maxsize  # the first bucket begins one

    def begins(self, bucket: Bucket) -> bool:
        """Return True if the index is not above the one before."""
        before, self._last = self._last, bucket.index()
        return self._last <= before


class ByForward(StepDetector):
    """A forward announces a step, where indices do not show one.

    With a static graph torch hands over all buckets of the first step as number 0, at the end of backward. With
    skip_all_reduce_unused_params any of a step's buckets may be missing, the first and the last one, too. A second backward
    of one forward, or a step in which this rank only mirrors the others' inside `join`, is announced by no forward: there an
    index that does not rise counts, but for those parameters that the first step has not brought yet.

    The backward from the model's outputs ends the step, and not one inside it, as of reentrant checkpoints.
    """

    last_ends = False

    def __init__(self) -> None:
        self._announced, self._indices = False, ByIndex()
        # Identities of the parameters that the first step has brought: none before its first bucket, more with each of its
        # buckets. None once the second step has begun.
        self._in_first: set[int] | None = set()
        self._backwards = Backwards()

    def __reduce__(self) -> tuple[type["ByForward"], tuple[()]]:
        """Anew in copies, which have steps of their own."""
        return ByForward, ()

    def announce(self, *_: Any) -> None:
        """Have the next bucket be the first of a step: a forward pre-hook."""
        self._announced = True

    def watch(self, _model: nn.Module, _inputs: Any, outputs: Any) -> None:
        """Note where a backward from the outputs of a forward begins: a forward hook."""
        if not torch.compiler.is_compiling():
            self._backwards.watch(outputs)

    def begins(self, bucket: Bucket) -> bool:
        """Return True if a forward has announced it, or no index and no new parameter contradicts."""
        announced, self._announced = self._announced, False
        again, parameters = self._indices.begins(bucket), set(map(id, bucket.parameters()))
        new = self._in_first is not None and self._in_first.isdisjoint(parameters)
        begins = announced or (again and not new)
        if begins and self._in_first:  # the second step begins
            self._in_first = None
        elif self._in_first is not None:
            self._in_first |= parameters
        return begins

    def begun(self, steps: Steps) -> None:
        """Have the end of backward end the step."""
        backward = self._backwards.now()
        if backward is not None:
            backward.at_end = steps.all_sent
        elif torch._C._current_graph_task_id() == -1:  # no backward runs: `join` mirrors the step of other ranks
            steps.all_sent()
        else:  # one whose outputs no forward hook saw
            Variable._execution_engine.queue_callback(steps.all_sent)


class ByReducer(StepDetector):
    """gradwire's own DDP begins and ends the steps, around the calls of its hook."""

    last_ends = False

    def begins(self, bucket: Bucket) -> bool:
        """Return False."""
        return False


BY_REDUCER = ByReducer()
