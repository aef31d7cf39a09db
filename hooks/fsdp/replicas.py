"""Replicas of shards (hybrid sharding) or of whole parameters (`replicate`): any compressor averages their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import count

import torch
from torch import Tensor

from ...compress import tuned
from ...ddp_core import Decorator, Handle
from ...ddp_core.averaging.plans import AllPending
from ...ddp_core.buckets.protocol import FlatBucket
from .arrivals import Arrivals
from .modules import ShardedModule
from .sharding import Sharding

NOTHING = torch.empty(0, device="cpu")


class ShardBucket(FlatBucket):
    """The gradients of a module, or some in turn, which come in another buffer in each step.

    `all_parameters`: their shards, padded as the gradients are. `plan`: for the averager to remember.
    """

    scale = None

    def __init__(self, index: int, parameters: list[Tensor]) -> None:
        self.place, self.all_parameters, self.plan = index, parameters, None
        self.flat, self.numel = NOTHING, sum(map(torch.numel, parameters))

    def is_last(self) -> bool:
        """False: the end of a step is known in another way."""
        return False


DIVISOR = "set_gradient_divide_factor holds for gradwire's sums alone: say reduce='none', too"


class ReplicaMean:
    """The all-reduce hook of one module. `numbers`: of the buckets of all modules."""

    def __init__(self, module: ShardedModule, handle: Handle, arrivals: Arrivals, numbers: Iterator[int]) -> None:
        self._module, self._handle, self._arrivals, self._numbers = module, handle, arrivals, numbers
        self._parameters: list[Tensor] = []
        self._buckets: list[ShardBucket] = []  # until shards lie elsewhere
        self._indices: list[int] = []  # of the buckets
        self.name_shards()

    def name_shards(self) -> None:
        """Find the shards of the parameters, and name them for the handle; anew where torch has put them elsewhere."""
        shards = self._module.shards()
        if [each.data_ptr() for each in self._parameters] == [each.data_ptr() for each in shards.values()]:
            return
        for old in self._parameters:
            self._handle.averager.names.pop(old, None)
        self._parameters, self._buckets = list(shards.values()), []
        self._handle.name({shard: name for name, shard in shards.items()})

    def __call__(self, reduce_output: Tensor) -> None:
        """Average in place.

        Raises RuntimeError where parameters are left out, since torch does not tell which, and ValueError where gradients
        were given a divisor that holds for sums over shards alone.
        """
        module = self._module
        divided = module.divided_anew
        if divided and not (module.sums or module.alone):
            raise ValueError(DIVISOR)
        self.name_shards()
        self._buckets = self._buckets or self._cut()
        if sum(each.numel for each in self._buckets) != reduce_output.numel():
            raise RuntimeError(module.left_out)
        if module.alone and module.divisor is not None:  # torch has divided by it, where a mean divides by the ranks
            reduce_output.mul_(self._handle.averager.engines.group.size())
        averager = self._handle.averager
        self._arrivals.begin(averager)
        pendings = []
        parts = reduce_output.split([each.numel for each in self._buckets])
        for bucket, part in zip(self._buckets, parts, strict=True):
            bucket.flat = part
            pendings.append(averager.average(bucket))
            bucket.flat = NOTHING  # nobody else keeps gradients of this step
        at_once = divided or module.reads_gradients(reduce_output.dtype)
        self._arrivals.take(pendings[0] if len(pendings) == 1 else AllPending(pendings), at_once=at_once)

    def _cut(self) -> list[ShardBucket]:
        """Return the buckets of the module: one, or in a tensor-parallel model as many as its `splits`."""
        buckets, first = list[ShardBucket](), 0
        for place, number in enumerate(self._module.splits()):
            if place == len(self._indices):
                self._indices.append(next(self._numbers))
            buckets.append(ShardBucket(self._indices[place], self._parameters[first : first + number]))
            first += number
        return buckets


def handle_of_replicas(
    modules: Sequence[ShardedModule], asked: Sharding, timeout: timedelta | None, transport: Decorator | None
) -> Handle | None:
    """The handle of what averages over replicas."""
    if asked.replicas is None:
        return None
    group = modules[0].replica_group
    if group is None:
        raise ValueError("it has no replicas: fully_shard(model, mesh=...) with a mesh of two dimensions makes some")
    if not asked.of_shards and any(module.divisor is not None and not module.alone for module in modules):
        raise ValueError(DIVISOR)
    return Handle(tuned(asked.replicas, asked.optimizer), group, timeout, transport=transport, undo=asked.undo)


def take_replicas(modules: Sequence[ShardedModule], handle: Handle, arrivals: Arrivals) -> None:
    """Have a handle average the gradients of modules over their replicas."""
    numbers = count()
    for module in modules:
        module.take_replicas(ReplicaMean(module, handle, arrivals, numbers))
