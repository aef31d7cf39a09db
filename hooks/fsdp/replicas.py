"""Replicas of shards (hybrid sharding) or of whole parameters (`replicate`): any compressor averages their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from ...ddp_core import Handle
from ...ddp_core.averaging.averager import CompressedAverager
from ...ddp_core.averaging.engines import Engines
from ...ddp_core.averaging.plans import AllPending
from ...ddp_core.averaging.shard_averager import ShardAverager
from ...ddp_core.buckets.protocol import FlatBucket
from ...ddp_core.transport.rank_messages import FINITE, true_everywhere
from .arrivals import Arrivals
from .modules import ShardedModule

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


@dataclass(frozen=True)
class FiniteEverywhere:
    """A message of ranks before a step ends: it counts on no rank if gradients or averages of any are not finite.

    Of both averagers those of gradwire's; `sharing`: engines of the ranks that share parameters, if there are several.
    """

    among_replicas: CompressedAverager | None = None
    among_shards: ShardAverager | None = None
    sharing: Engines | None = None

    def __call__(self) -> None:
        """Agree. A collective call."""
        averager = self.among_replicas
        memory = averager.memory if averager is not None and averager.inside else None
        if memory is not None and self.sharing is not None and (finite := memory.finite_here) is not None:
            memory.note_finite(true_everywhere(finite, self.sharing.transport(finite.device), what=FINITE))
        finite = None if self.among_shards is None else self.among_shards.hear_replicas()
        if memory is not None and finite is not None:
            memory.note_finite(finite)


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


def take_replicas(modules: Sequence[ShardedModule], handle: Handle, arrivals: Arrivals) -> None:
    """Have a handle average the gradients of modules over their replicas."""
    numbers = count()
    for module in modules:
        module.take_replicas(ReplicaMean(module, handle, arrivals, numbers))
