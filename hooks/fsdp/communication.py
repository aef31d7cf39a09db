"""The all-gather and reduce-scatter that FSDP2 calls in place of its own."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...compress.shards.codec import needed
from ...compress.shards.layout import ShardLayout
from ...ddp_core import Pending, start_all_gather
from ...ddp_core.averaging.shard_averager import ShardAverager
from ...kernels import temporary
from .arrivals import Arrivals
from .modules import ShardedModule

logger = logging.getLogger(__name__)
UNCOMPRESSED = (
    "the weights of a sharded module (%s, ...) travel uncompressed: they have several types, or 8 bits already. To compress "
    "them, call fully_shard on a module for each type"
)
DIVIDES = (
    "set_force_sum_reduction_for_comms(False) does not go with gradwire, which sums gradients itself: leave that call "
    "out"
)


class GatherWork(dist._Work):
    """Weights on their way; whoever waits for them decodes them."""

    def __init__(self, pending: Pending, timeout: timedelta) -> None:
        super().__init__()
        self._pending, self._timeout = pending, timeout

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when they are there; raises RuntimeError where they do not come within the time limit."""
        self._pending.wait(self._timeout)
        return True


class ShardGather:
    """The all-gather of a module's parameters."""

    def __init__(self, module: ShardedModule, averager: ShardAverager) -> None:
        self._module, self._averager = module, averager
        self._warned = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the rows of all ranks, until torch has copied them."""
        return temporary(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Fill the output. On the CPU torch waits for it where it needs the weights, so that what it prefetches overlaps.

        As they are: bytes of parameters of several types, numbers of less than 16 bits, and what was gathered before and is
        now shared out among fewer ranks (`reshard_after_forward` a number), which must stay what it was. In backward the
        weights in use are copied, where all ranks hold them.
        """
        averager, module, training = self._averager, self._module, self._module.training
        on_cpu = output_tensor.device.type == "cpu"
        regathers = group.size() != module.shard_group.size()
        encodes = not regathers and self._encodes(input_tensor)
        codec = needed(averager.weights.codec, output_tensor.dtype)
        if not encodes or (codec is None and not averager.decorated):
            averager.note_gather(module.names, input_tensor, output_tensor, training=training)
            return start_all_gather(output_tensor, input_tensor, group, async_op=async_op or on_cpu)
        differences = codec is not None and averager.weights.differences
        held = averager.in_use.get(module.index, module.gathered) if differences else None
        if held is not None and held.rows is not None and torch._C._current_graph_task_id() != -1:
            averager.gather_again(module.names, held.rows, output_tensor)
            return None
        pending = averager.gather(module.index, module.names, input_tensor, output_tensor, held, training=training)
        timeout = averager.engines.timeout
        if on_cpu:
            return GatherWork(pending, timeout)
        pending.wait(timeout)
        return None

    def _encodes(self, mine: Tensor) -> bool:
        """Return True if a row holds numbers of one type, as parameters have them. Say once where a codec cannot be used."""
        numbers = mine.is_floating_point() and mine.element_size() > 1 and mine.numel() == self._module.gathered.row
        if not numbers and self._averager.weights.codec is not None and not self._warned and self._module.place[0] == 0:
            logger.warning(UNCOMPRESSED, ", ".join(self._module.names[:3]))
        self._warned |= not numbers
        return numbers


class ShardReduction:
    """The reduce-scatter of a module's gradients.

    `scale`: what their mean over shards is multiplied by; `total`: where torch then divides by a divisor of the user's.
    """

    def __init__(
        self, module: ShardedModule, averager: ShardAverager, arrivals: Arrivals, scale: float, total: float
    ) -> None:
        self._module, self._averager, self._arrivals = module, averager, arrivals
        self._scale, self._total = scale, total

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for a module's gradients, or for this rank's shards of them, which the user keeps."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Fill the output: at once, or where torch does not look at it, by the end of backward.

        Raises RuntimeError where parameters are left out, and what is held back of each is kept, and ValueError where torch
        relies on a division within the reduce-scatter.
        """
        module, averager, arrivals = self._module, self._averager, self._arrivals
        if op != dist.ReduceOp.SUM:
            raise ValueError(DIVIDES)
        divided = module.divided_anew
        scale = self._total if divided else self._scale
        arrivals.begin()
        layout = module.layout()
        if layout.numel != input_tensor.numel():
            layout = self._nameless(layout, input_tensor)
        pending = averager.reduce(module.index, layout, input_tensor, output_tensor, scale)
        at_once = divided or module.averages_over_replicas or module.reads_gradients(output_tensor.dtype)
        arrivals.take(pending, at_once=at_once)

    def _nameless(self, layout: ShardLayout, grad: Tensor) -> ShardLayout:
        """Return a layout of the whole gradient as one parameter: torch left parameters out and does not report which."""
        if self._averager.memory.reduction.feedback:
            raise RuntimeError(self._module.left_out)
        ranks = layout.whole.ranks.world_size
        whole = dataclasses.replace(layout.whole, names=("",), shapes=((ranks, grad.numel() // ranks),))
        return ShardLayout(whole, (0,))
