"""Hybrid sharding: shards of gradients are averaged over replicas by any compressor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...ddp_core import FuturePending, Handle
from ...ddp_core.averaging.shard_averager import ShardAverager
from ...ddp_core.measure.step import Step
from .arrivals import Arrivals
from .modules import ShardedModule


class ShardBucket:
    """A module's shards of gradients, as torch's hooks are given buckets."""

    def __init__(self, index: int, buffer: Tensor, parameters: list[Tensor]) -> None:
        self._index, self._buffer, self._parameters = index, buffer, parameters

    def index(self) -> int:
        """The number of the module in its step."""
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
    """The steps of a handle, as arrivals begin and end them, and the modules of each in their order.

    `shards`: whose step ends with that of the replicas, where gradwire communicates for them, too.
    """

    def __init__(self, handle: Handle, shards: ShardAverager | None) -> None:
        self._handle, self._shards = handle, shards
        self._modules = 0

    def begin_step(self) -> None:
        """Begin a step, before its first bucket."""
        self._handle.averager.begin_step(Step())
        self._modules = 0

    def next_index(self) -> int:
        """The number of the next module in its step: backward has an order of its own."""
        self._modules += 1
        return self._modules - 1

    def end_step(self) -> None:
        """End the step: all averages are there."""
        with self._handle.averager.step_lock.lock:
            self._handle.averager.end_step()
            if self._shards is not None:
                self._shards.end_step()


DIVISOR = "set_gradient_divide_factor holds for gradwire's sums alone: say reduce='none', too"


class ReplicaMean:
    """The all-reduce hook of one module."""

    def __init__(self, module: ShardedModule, handle: Handle, steps: ReplicaSteps, arrivals: Arrivals) -> None:
        self._module, self._handle, self._steps, self._arrivals = module, handle, steps, arrivals
        self._parameters: list[Tensor] = []
        self.name_shards()

    def name_shards(self) -> Sequence[Tensor]:
        """The shards of the parameters, and their names for the handle; made anew where torch has put them elsewhere."""
        shards = dict(self._module.shards())
        if [each.data_ptr() for each in self._parameters] != [each.data_ptr() for each in shards.values()]:
            for old in self._parameters:
                self._handle.averager.names.pop(old, None)
            self._parameters = list(shards.values())
            self._handle.name({shard: name for name, shard in shards.items()})
        return self._parameters

    def __call__(self, reduce_output: Tensor) -> None:
        """Average in place.

        Raises RuntimeError where parameters are left out, since torch does not tell which, and ValueError where gradients
        were given a divisor that holds for sums over shards alone.
        """
        if self._module.divided_anew and not self._module.sums:
            raise ValueError(DIVISOR)
        parameters: Any = self.name_shards()
        if sum(map(torch.numel, parameters)) != reduce_output.numel():
            raise RuntimeError(self._module.left_out)
        self._arrivals.begin()
        bucket: Any = ShardBucket(self._steps.next_index(), reduce_output, parameters)
        pending = FuturePending(self._handle.averager.average_for_hook(bucket))
        at_once = self._module.divided_anew or self._module.reads_gradients(reduce_output.dtype)
        self._arrivals.take(pending, at_once=at_once)
