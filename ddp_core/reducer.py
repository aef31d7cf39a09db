"""The reducer (Li et al. 2020, algorithm 1): gradients get ready, buckets leave in order, backward ends with the last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from .assignment import assigned
from .collectives import start_sum
from .grad_bucket import GradBucket
from .graph import gradient_node, reached
from .sparse import SparseBucket

Average: TypeAlias = Callable[[GradBucket], "torch.futures.Future[Tensor]"]
SHOWN = 8  # parameters named in an error


@dataclass(frozen=True)
class Rules:
    """`caps`: of buckets, in bytes. The others are arguments of DistributedDataParallel."""

    caps: Sequence[int]
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    skip_all_reduce_unused_params: bool = False


@dataclass
class Backward:
    """What one synchronized backward has brought so far."""

    ready: bytearray
    missing: list[int]  # firings of each parameter's hook until its gradient is ready
    order: list[int] = field(default_factory=list)
    launched: int = 0
    flushing: bool = False
    unused: set[int] = field(default_factory=set)
    shares: tuple[dist.Work, Tensor] | None = None


class Reducer:
    """Averages the gradients of `parameters` during backward, by `average`, bucket by bucket.

    `names`: of the parameters, for messages. `sparse`: which of them get sparse gradients.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        sparse: Sequence[bool],
        rules: Rules,
        group: dist.ProcessGroup,
        average: Average,
    ) -> None:
        self.average = average
        self.group = group
        self.rules = rules
        self._parameters, self._names, self._sparse = list(parameters), list(names), list(sparse)
        self._firings: list[int] | None = None  # of each parameter's hook in a step; None until a static graph is known
        self._backward: Backward | None = None
        self._used = bytearray(len(parameters))  # on this rank, since the last synchronization
        self.order = list(range(len(parameters)))[::-1]
        self.traced: list[int] = []
        self.finished = 0
        self.share = 1.0  # of the ranks that still have inputs, where the average is to be over these
        self.at_end: list[Callable[[], None]] = []
        self.build(self.order)
        self._nodes = [_node(parameter) for parameter in parameters]
        self._hooks = [node.register_hook(self._hook(index)) for index, node in enumerate(self._nodes)]

    def build(self, order: Sequence[int]) -> None:
        """Make the buckets for parameters that get ready in this order. All ranks do so between the same steps."""
        self.buckets: list[GradBucket] = []  # the old ones go first, so that both never use memory
        self.order = list(order)
        ready = [self._parameters[index] for index in order]
        plan = assigned(ready, self.rules.caps, [self._sparse[index] for index in order])
        self._bucket_of: list[GradBucket] = [None] * len(order)  # type: ignore[list-item]
        for place, positions in enumerate(plan):
            members = [order[position] for position in positions]
            bucket = self._bucket(place, members, last=place == len(plan) - 1)
            self.buckets.append(bucket)
            for index in members:
                self._bucket_of[index] = bucket

    def _bucket(self, place: int, members: Sequence[int], *, last: bool) -> GradBucket:
        parameters = [self._parameters[index] for index in members]
        if self._sparse[members[0]]:
            return SparseBucket(place, members, parameters, last=last)
        return GradBucket(place, members, parameters, last=last, alias=self.rules.gradient_as_bucket_view)

    def begin(self, outputs: Iterable[Tensor], scale: float = 1.0) -> None:
        """The end of a forward whose backward is to be synchronized; `outputs` show which parameters it used.

        `scale`: what `average` wants gradients multiplied by.
        """
        self.require_finished()
        count = len(self._parameters)
        missing = self._firings or [1] * count
        backward = Backward(bytearray(count), list(missing))
        for bucket in self.buckets:
            bucket.open(scale)
        if self.rules.find_unused_parameters and not self.rules.static_graph:
            found = reached(outputs, set(self._nodes))
            backward.unused = {index for index, node in enumerate(self._nodes) if node not in found}
        elif self._firings is not None:
            backward.unused = {index for index, firings in enumerate(self._firings) if not firings}
        self._backward = backward

    def pause(self) -> None:
        """A forward whose backward is not synchronized; one that was begun and never ran is dropped."""
        self.require_finished()
        self._backward = None

    def proposal(self) -> list[int]:
        """The order in which gradients got ready last, where the buckets do not fit it; else the order of the buckets."""
        seen = set(self.traced)
        order = self.traced + [index for index in self.order if index not in seen]
        place = {index: position for position, index in enumerate(order)}
        complete = [max(place[index] for index in bucket.members) for bucket in self.buckets]
        fits = self.finished > 1 and complete == sorted(complete)
        return self.order if fits else order

    @property
    def delays(self) -> bool:
        """Whether this step waits for the end of backward: the first one of a static graph, which it counts."""
        return self.rules.static_graph and self._firings is None

    def start(self) -> None:
        """The beginning of the backward, where the outputs can tell it: what it will not reach is ready."""
        Variable._execution_engine.queue_callback(self._flush)

    def require_finished(self) -> None:
        """Raise RuntimeError where the last synchronized backward did not come to its end."""
        if self._backward is None or not self._backward.order:
            return
        absent = [index for index, ready in enumerate(self._backward.ready) if not ready]
        raise RuntimeError(
            "Expected to have finished reduction in the prior iteration before starting a new one: "
            f"{len(absent)} parameters got no gradient ({self._shown(absent)}). They took no part in the loss "
            "(pass find_unused_parameters=True), or not all outputs of forward did, or that backward raised an error, "
            "after which the ranks are no longer in step: load a checkpoint into a new DistributedDataParallel"
        )

    def _hook(self, index: int) -> Callable[[Any, Any], None]:
        def ready(*_: Any) -> None:
            self._used[index] = 1
            if self._backward is not None:
                self._mark(self._backward, index)

        return ready

    def _mark(self, backward: Backward, index: int) -> None:
        """One firing of a parameter's hook."""
        backward.missing[index] -= 1
        if self.delays:
            backward.order.append(index)
            return
        if backward.unused:
            self._skip_unused(backward)
        if backward.missing[index] > 0:
            return
        if backward.ready[index]:
            raise RuntimeError(self._twice(index))
        backward.order.append(index)
        self._settle(backward, index)
        self._launch(backward)

    def _skip_unused(self, backward: Backward) -> None:
        """At the first gradient of a backward: those that it will not bring count as ready."""
        unused, backward.unused = backward.unused, set()
        for index in unused:
            self._settle(backward, index)

    def _settle(self, backward: Backward, index: int) -> None:
        backward.ready[index] = 1
        self._bucket_of[index].bring(index)

    def _launch(self, backward: Backward) -> None:
        """Send the buckets that are complete, in order; with the last one, ask for the end of backward."""
        while backward.launched < len(self.buckets) and not self.buckets[backward.launched].waiting:
            bucket = self.buckets[backward.launched]
            backward.launched += 1
            bucket.fill()
            bucket.future = self.average(bucket)
            if backward.launched == len(self.buckets):
                self._share_used(backward)
                if not backward.flushing:
                    Variable._execution_engine.queue_callback(self._finish)

    def _share_used(self, backward: Backward) -> None:
        """Tell all ranks which parameters this one used; the answer is waited for where it matters."""
        if self.rules.find_unused_parameters and not self.rules.static_graph:
            used = torch.tensor(list(self._used), dtype=torch.int32, device=self._parameters[0].device)
            backward.shares = (start_sum(used, self.group), used)

    def _flush(self) -> None:
        """The end of a backward: what it did not reach was not used."""
        backward = self._backward
        if backward is None or backward.launched == len(self.buckets):
            return
        if self.delays:
            self._firings = [1 - missing for missing in backward.missing]
            backward.order = _last_firings(backward.order)
        backward.flushing = True
        for index, ready in enumerate(backward.ready):
            if not ready:
                self._settle(backward, index)
        self._launch(backward)
        self._finish()

    def _finish(self) -> None:
        """Wait for the buckets, in order, and hand out the averages."""
        backward, self._backward = self._backward, None
        if backward is None:
            return
        wanted = self._wanted(backward)
        for bucket in self.buckets:
            assert bucket.future is not None
            average = bucket.future.wait()
            bucket.deliver(average if self.share == 1.0 else average.div_(self.share), wanted)
            bucket.future = None
        self.traced = backward.order
        self._used = bytearray(len(self._parameters))
        self.finished += 1
        for end in self.at_end:
            end()

    def _wanted(self, backward: Backward) -> Callable[[int], bool]:
        """Which parameters get the average: all but those that no rank used."""
        if backward.shares is None:
            return self._is_static_used if self._firings else lambda index: True
        if all(self._used):
            return lambda index: True
        work, shares = backward.shares
        work.wait()
        by_any = shares.tolist()
        return lambda index: by_any[index] > 0

    def _is_static_used(self, index: int) -> bool:
        assert self._firings is not None
        return self._firings[index] > 0

    def shadow(self) -> None:
        """Take part in a step with zeros: this rank has no more inputs, others have."""
        for bucket in self.buckets:
            bucket.clear()
            bucket.future = self.average(bucket)
        backward = Backward(bytearray(), [])
        self._used = bytearray(len(self._parameters))
        self._share_used(backward)
        for bucket in self.buckets:
            assert bucket.future is not None
            bucket.future.wait()
            bucket.future = None
        if backward.shares:
            backward.shares[0].wait()
        self.finished += 1

    def detach(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _twice(self, index: int) -> str:
        if self._firings is not None:
            return (
                f"Your training graph has changed in this iteration: parameter {self._names[index]} got more gradients "
                "than in the first one, which static_graph=True does not allow"
            )
        return (
            f"Expected to mark a variable ready only once, but parameter {self._names[index]} got a second gradient in one "
            "backward: it is used outside forward, or in several re-entrant checkpoints. Pass static_graph=True where every "
            "iteration uses it alike, or checkpoint with use_reentrant=False"
        )

    def _shown(self, indices: Sequence[int]) -> str:
        names = ", ".join(self._names[index] for index in indices[:SHOWN])
        return names + (f" and {len(indices) - SHOWN} more" if len(indices) > SHOWN else "")


def _node(parameter: Tensor) -> Any:
    """The parameter's gradient node, made on the device's default stream: it is bound to the stream it is made on."""
    if not parameter.is_cuda:
        return gradient_node(parameter)
    with torch.cuda.stream(torch.cuda.default_stream(parameter.device)):
        return gradient_node(parameter)


def _last_firings(order: Sequence[int]) -> list[int]:
    """The order in which parameters fired for the last time."""
    return list(dict.fromkeys(reversed(order)))[::-1]
