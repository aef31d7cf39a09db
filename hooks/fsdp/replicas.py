"""Replicas of shards (hybrid sharding) or of whole parameters (`replicate`): any compressor averages their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ...ddp_core import Handle
from ...ddp_core.averaging.engines import Engines
from ...ddp_core.averaging.plans import AllPending
from ...ddp_core.averaging.shard_averager import ShardAverager
from ...ddp_core.buckets.protocol import Bucket
from ...ddp_core.measure.step import Step
from ...ddp_core.transport.rank_messages import FINITE, true_everywhere
from .arrivals import Arrivals
from .modules import ShardedModule


class ShardBucket:
    """The gradients of a module, or some in turn, as torch's hooks are given buckets."""

    def __init__(self, index: int, buffer: Tensor, parameters: list[Tensor]) -> None:
        self._index, self._buffer, self._parameters = index, buffer, parameters

    def index(self) -> int:
        """The number of the bucket in the model."""
        return self._index

    def buffer(self) -> Tensor:
        """Return all gradients, one behind the other."""
        return self._buffer

    def parameters(self) -> list[Tensor]:
        """The shards of the parameters, padded as their gradients are."""
        return self._parameters

    def is_last(self) -> bool:
        """False: the end of a step is known in another way."""
        return False


class ReplicaSteps:
    """The steps of a handle, as arrivals begin and end them, and the numbers of its buckets.

    `shards`: whose step ends with that of the replicas, where gradwire communicates for them, too. `beside`: engines of the
    ranks that share the parameters, if there are several.
    """

    def __init__(self, handle: Handle, shards: ShardAverager | None, beside: Engines | None) -> None:
        self._handle, self._shards, self._beside = handle, shards, beside
        self._buckets = 0

    def begin_step(self) -> None:
        """Begin a step, before its first bucket."""
        self._handle.averager.begin_step(Step())

    def next_index(self) -> int:
        """The number of a bucket that is met for the first time."""
        self._buckets += 1
        return self._buckets - 1

    def end_step(self) -> None:
        """End the step: all averages are there. It counts on no rank if those of any are not finite."""
        averager = self._handle.averager
        if self._beside is not None and (finite := averager.memory.finite_here) is not None:
            averager.memory.note_finite(true_everywhere(finite, self._beside.transport(finite.device), what=FINITE))
        if self._shards is not None and (finite := self._shards.hear_replicas()) is not None:
            averager.memory.note_finite(finite)
        with averager.step_lock.lock:
            averager.end_step()
            if self._shards is not None:
                self._shards.finish_step()


DIVISOR = "set_gradient_divide_factor holds for gradwire's sums alone: say reduce='none', too"


class ReplicaMean:
    """The all-reduce hook of one module."""

    def __init__(self, module: ShardedModule, handle: Handle, steps: ReplicaSteps, arrivals: Arrivals) -> None:
        self._module, self._handle, self._steps, self._arrivals = module, handle, steps, arrivals
        self._parameters: list[Tensor] = []
        self._splits: list[int] = []
        self._indices: list[int] = []  # of the buckets
        self.name_shards()

    def name_shards(self) -> None:
        """Find the shards of the parameters, and name them for the handle; anew where torch has put them elsewhere."""
        shards = dict(self._module.shards())
        if [each.data_ptr() for each in self._parameters] == [each.data_ptr() for each in shards.values()]:
            return
        for old in self._parameters:
            self._handle.averager.names.pop(old, None)
        self._parameters, self._splits = list(shards.values()), self._module.splits()
        self._handle.name({shard: name for name, shard in shards.items()})

    def __call__(self, reduce_output: Tensor) -> None:
        """Average in place.

        Raises RuntimeError where parameters are left out, since torch does not tell which, and ValueError where gradients
        were given a divisor that holds for sums over shards alone.
        """
        module = self._module
        if module.divided_anew and not (module.sums or module.alone):
            raise ValueError(DIVISOR)
        self.name_shards()
        if sum(map(torch.numel, self._parameters)) != reduce_output.numel():
            raise RuntimeError(module.left_out)
        if module.alone and module.divisor is not None:  # torch has divided by it, where a mean divides by the ranks
            reduce_output.mul_(self._handle.averager.engines.group.size())
        self._arrivals.begin()
        average = self._handle.averager.average_hooked
        pendings = [average(each) for each in self._buckets(reduce_output)]
        at_once = module.divided_anew or module.reads_gradients(reduce_output.dtype)
        self._arrivals.take(AllPending(pendings), at_once=at_once)

    def _buckets(self, gradients: Tensor) -> Iterator[Bucket]:
        """The buckets of the module: one, or in a tensor-parallel model as many as its `splits`."""
        first = offset = 0
        for place, count in enumerate(self._splits):
            parameters = self._parameters[first : first + count]
            size = sum(map(torch.numel, parameters))
            if place == len(self._indices):
                self._indices.append(self._steps.next_index())
            yield ShardBucket(self._indices[place], gradients.narrow(0, offset, size), parameters)
            first, offset = first + count, offset + size


def take_replicas(
    model: nn.Module,
    modules: Sequence[ShardedModule],
    handle: Handle,
    shards: ShardAverager | None = None,
    beside: Engines | None = None,
) -> None:
    """Have a handle average the gradients of a model's modules over their replicas.

    `shards` and `beside`: as for `ReplicaSteps`.
    """
    steps = ReplicaSteps(handle, shards, beside)
    arrivals = Arrivals(steps, model, modules[0].device, handle.averager.engines.timeout, in_flight=None)
    for module in modules:
        module.take_replicas(ReplicaMean(module, handle, steps, arrivals))
