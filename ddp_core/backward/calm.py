"""Steps that go as those before need to hear of few gradients: Python is slow, and compressing threads want it, too."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import repeat
from operator import is_
from typing import Any

from torch import Tensor
from torch.autograd import Variable

from ..buckets.assignment import BucketPlan
from ..buckets.grad_bucket import GRADIENT, GradBucket
from .graph import Nodes
from .progress import Backward

NOBODY: Sequence[frozenset[int]] = ()  # is asleep
PATIENCE = 2  # steps that must have gone alike; twice as many after each one that did not


class Hooks:
    """Hooks on gradient nodes: `fired(index, ...)` is called after the node of parameter `index` has run.

    `lock`: to hold meanwhile, where several threads run nodes.
    """

    def __init__(self, nodes: Nodes, fired: Callable[..., None], lock: AbstractContextManager[Any] | None) -> None:
        self._nodes, self._fired = nodes, _locked(fired, lock) if lock else fired
        self._handles: dict[int, Any] = {}
        self.keep(range(len(nodes)))

    def keep(self, wanted: Collection[int]) -> None:
        """Have hooks on these parameters and no others."""
        for index in self._handles.keys() - set(wanted):
            self._handles.pop(index).remove()
            self._nodes.release(index)
        for index in wanted:
            self.add(index)

    def add(self, index: int) -> None:
        """Have one on this parameter, too; a backward that has not come to it yet will call it."""
        if index not in self._handles:
            self._handles[index] = self._nodes.hold(index).register_hook(partial(self._fired, index))


def _locked(fired: Callable[..., None], lock: AbstractContextManager[Any]) -> Callable[..., None]:
    def alone(*arguments: Any) -> None:
        with lock:
            fired(*arguments)

    return alone


class Calm:
    """Which parameters need no hooks in a step, as their gradients are there when that of another one comes.

    In each bucket that is every parameter but the last one to come and the very first one, by which a backward is known to
    be under way. Nothing is taken for granted: a bucket looks at the gradients themselves before it leaves, and wakes those
    that are late; before an average is handed out, it looks whether a parameter has got a second one.
    """

    def __init__(self, plan: BucketPlan, parameters: Sequence[Tensor], hooks: Hooks) -> None:
        self._plan, self._parameters, self._hooks = plan, parameters, hooks
        self._patience, self._alike = PATIENCE, 0
        self._built = 0  # which of the plan's buckets `_sleepers` is for
        self._sleepers = NOBODY
        self._sleeping: Sequence[Tensor] = ()  # the same as parameters
        self._hookless: Sequence[frozenset[int]] | None = NOBODY  # None after some were woken

    def falls_asleep(self, *, allowed: bool) -> Sequence[frozenset[int]]:
        """The members of each bucket that have no hooks in the step that begins; NOBODY where all have some."""
        asleep = self._able() if allowed else NOBODY
        if asleep is not self._hookless:
            self._hookless = asleep
            without = {index for members in asleep for index in members}
            self._hooks.keep([index for index in range(len(self._parameters)) if index not in without])
        return asleep

    def _able(self) -> Sequence[frozenset[int]]:
        """Those that may sleep. They must not have a gradient yet: that it comes is how they are heard of."""
        if self._alike < self._patience or self._plan.traced_alike is None:
            return NOBODY
        if self._built != self._plan.built:
            self._choose(self._plan.traced_alike)
        return self._sleepers if all(map(is_, map(GRADIENT, self._sleeping), repeat(None))) else NOBODY

    def _choose(self, order: Sequence[int]) -> None:
        place = {index: position for position, index in enumerate(order)}
        loud = {order[0], *(max(bucket.members, key=place.__getitem__) for bucket in self._plan.buckets)}
        members = [frozenset(bucket.members) - loud for bucket in self._plan.buckets]
        self._built, self._sleepers = self._plan.built, members if any(members) else NOBODY
        self._sleeping = [self._parameters[index] for index in sorted(set().union(*members))]

    def late(self, backward: Backward, bucket: GradBucket, used: bytearray) -> list[int]:
        """The sleepers of a bucket whose gradients are not there, now awake; the others count as ready and `used`."""
        late = self._asleep_still(backward, bucket, used)
        if late:
            backward.orderly, self._hookless = False, None
            bucket.waiting += len(late)
        for index in late:
            self._hooks.add(index)
        return late

    def listen(self, backward: Backward, used: bytearray) -> None:
        """A pass of autograd has begun: at its end, see who has come."""
        backward.listens = True
        Variable._execution_engine.queue_callback(partial(self.look_over, backward, used))

    def look_over(self, backward: Backward, used: bytearray) -> None:
        """The end of a pass: note who has come, for the error of a backward that has not brought all."""
        backward.listens = False
        for bucket in self._plan.buckets[backward.launched :]:  # nobody is late any more in those that have left
            self._asleep_still(backward, bucket, used)

    def _asleep_still(self, backward: Backward, bucket: GradBucket, used: bytearray) -> list[int]:
        late, missing = [], backward.missing
        for index in backward.asleep[bucket.number] if backward.asleep else ():
            if missing[index] > 0:
                if self._parameters[index].grad is None:
                    late.append(index)
                else:
                    missing[index] = 0
                    used[index] = 1
                    backward.seen = True
        return late

    def end(self) -> None:
        """Take all hooks off."""
        self._hooks.keep([])

    def went(self, *, alike: bool) -> None:
        """A step is over: its gradients came as in the one before, and its buckets in their order, or not."""
        if alike:
            self._alike += 1
        elif self._alike >= self._patience:
            self._alike, self._patience = 0, 2 * self._patience
        else:
            self._alike = 0
