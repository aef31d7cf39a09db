"""Steps that go as those before need to hear of few gradients: Python is slow, and compressing threads want it, too."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from .assignment import BucketPlan

NOBODY: Sequence[Sequence[int]] = ()  # is asleep
PATIENCE = 2  # steps that must have gone alike; twice as many after each one that did not


class Hooks:
    """Hooks on gradient nodes: `fired(index, ...)` is called after the node of parameter `index` has run."""

    def __init__(self, nodes: Sequence[Any], fired: Callable[..., None]) -> None:
        self._nodes, self._fired = nodes, fired
        self._handles: dict[int, Any] = {}
        self.keep(range(len(nodes)))

    def keep(self, wanted: Collection[int]) -> None:
        """Have hooks on these parameters and no others."""
        for index in [index for index in self._handles if index not in wanted]:
            self._handles.pop(index).remove()
        for index in wanted:
            self.add(index)

    def add(self, index: int) -> None:
        """Have one on this parameter, too; a backward that has not come to it yet will call it."""
        if index not in self._handles:
            self._handles[index] = self._nodes[index].register_hook(partial(self._fired, index))


class Calm:
    """Which parameters need no hooks in a step, as their gradients are there when that of another one comes.

    In each bucket that is every parameter but the last one to come, those whose large gradients are copied as they come,
    and the very first one, by which a backward is known to be under way. Nothing is taken for granted: a bucket looks at
    the gradients themselves before it leaves, and wakes those that are late.
    """

    def __init__(self, plan: BucketPlan, parameters: Sequence[Tensor]) -> None:
        self._plan, self._parameters = plan, parameters
        self._patience, self._alike = PATIENCE, 0
        self._asleep = NOBODY
        self._buckets: object = None  # those that `_asleep` is for

    def asleep(self) -> Sequence[Sequence[int]]:
        """The members of each bucket that need no hooks in the step that begins; NOBODY where all do.

        They must not have a gradient yet: that it comes is how they are heard of.
        """
        if self._alike < self._patience or self._plan.traced_alike is None:
            return NOBODY
        if self._buckets is not self._plan.buckets:
            self._buckets, self._asleep = self._plan.buckets, self._chosen(self._plan.traced_alike)
        came = any(self._parameters[index].grad is not None for members in self._asleep for index in members)
        return NOBODY if came else self._asleep

    def _chosen(self, order: Sequence[int]) -> list[tuple[int, ...]]:
        place = {index: position for position, index in enumerate(order)}
        loud = {order[0]}
        for bucket in self._plan.buckets:
            loud.add(max(bucket.members, key=place.__getitem__))
            loud.update(bucket.large())
        return [tuple(index for index in bucket.members if index not in loud) for bucket in self._plan.buckets]

    def went(self, *, alike: bool) -> None:
        """A step is over: its gradients came as in the one before, and its buckets in their order, or not."""
        if alike:
            self._alike += 1
        elif self._alike >= self._patience:
            self._alike, self._patience = 0, 2 * self._patience
        else:
            self._alike = 0
