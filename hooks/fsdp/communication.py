"""The all-gather and reduce-scatter that FSDP2 calls in place of its own."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...compress.shards.layout import ShardLayout
from ...compress.shards.weights import WeightKind
from ...ddp_core import Pending, start_all_gather
from ...ddp_core.averaging.shard_averager import ShardAverager
from ...ddp_core.engine.in_flight import MODULES_IN_FLIGHT
from ...kernels import temporary
from .arrivals import Arrivals
from .modules import ShardedModule

logger = logging.getLogger(__name__)
OUTSIDE_INFERENCE = torch.inference_mode(mode=False)  # or steps could not write to what an evaluation has made
UNCOMPRESSED = (
    "weights of a sharded module (%s, ...) travel uncompressed: they, or others of their group, have 8 bits already, or "
    "are no numbers"
)
DIVIDES = (
    "set_force_sum_reduction_for_comms(False) does not go with gradwire, which sums gradients itself: leave that call "
    "out"
)


class GatherWork(dist._Work):
    """Weights on their way. Whoever waits for them decodes them; with `hosts+` lanes do."""

    def __init__(self, pending: Pending, timeout: timedelta) -> None:
        super().__init__()
        self._pending, self._timeout = pending, timeout

    @OUTSIDE_INFERENCE
    @torch.no_grad()
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when they are there; raises RuntimeError where they do not come within the time limit.

        That is the model's: torch passes no `timeout`.
        """
        self._pending.wait(self._timeout)
        return True


class GradMode:
    """A hook before forwards of modules. It notes whether gradients are on; torch gathers with them off."""

    enabled = True

    @torch._disable_dynamo
    def __call__(self, _module: nn.Module, _inputs: Any) -> None:
        """Note it."""
        self.enabled = torch.is_grad_enabled()


class ShardGather:
    """The all-gather of a module's parameters. `grad_mode`: of all modules, since torch prefetches some."""

    allocate = staticmethod(
        OUTSIDE_INFERENCE(temporary)
    )  # memory for the rows of all ranks, until torch has copied them

    def __init__(self, module: ShardedModule, averager: ShardAverager, grad_mode: GradMode) -> None:
        self._module, self._averager, self._grad_mode = module, averager, grad_mode
        self._looked = False  # for parameters that a codec cannot take
        weakref.finalize(self, module.module.register_forward_pre_hook(grad_mode, prepend=True).remove)

    @torch._disable_dynamo  # where a compiled function calls forward or backward
    @OUTSIDE_INFERENCE
    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Fill the output. On the CPU torch waits for it where it needs the weights, so that what it prefetches overlaps."""
        averager, module = self._averager, self._module
        training: bool = module.module.training  # in which steps are counted
        weights, on_cpu = averager.weights, output_tensor.device.type == "cpu"
        regathers = group.size() != module.shard_group.size()
        kinds = () if regathers else self._kinds(input_tensor)
        cuts = [kind.cut(weights.codec) for kind in kinds]
        # As they are, by torch: numbers of less than 16 bits; what was gathered before and is now shared out among fewer
        # ranks (`reshard_after_forward` a number), which must stay what it was; and all, without a codec, a link or hosts.
        if not kinds or (not any(cuts) and not averager.decorated and weights.per_host == 1):
            averager.note_gather(module.names, input_tensor, output_tensor, training=training)
            return start_all_gather(output_tensor, input_tensor, group, async_op=async_op or on_cpu)
        in_backward = torch._C._current_graph_task_id() != -1
        # else no later gather mends what a codec loses
        advances = in_backward or (training and module.in_forward and self._grad_mode.enabled)
        keys = [(module.index, kind.dtype) if weights.differences and kind.numbers else None for kind in kinds]
        held = [key and averager.in_use.get(key, kind.layout) for key, kind in zip(keys, kinds, strict=True)]
        if len(kinds) > 1:  # parts of a row in several types; what has no codec is not held, so backward gathers again
            program = weights.gather_kinds(input_tensor, output_tensor, kinds, held, advances=advances)
        elif held[0] and held[0].rows is not None and in_backward:  # gathered in forward, and held by all ranks
            averager.gather_again(module.names, held[0].rows, output_tensor)
            return None
        else:  # rows of one type, or their differences to those in use
            program = weights.gather(input_tensor, output_tensor, kinds[0], held[0], advances=advances)
        pending = averager.gather(module.index, module.names, program, output_tensor, training=training)
        timeout = averager.engines.timeout
        if on_cpu:
            return GatherWork(pending, timeout)
        pending.wait(timeout)
        return None

    def _kinds(self, mine: Tensor) -> Sequence[WeightKind]:
        """Return the types of numbers in a row; none if it has other numbers than the parameters.

        Log once which parameters a codec cannot take.
        """
        kinds = self._module.kinds
        if len(kinds) == 1:
            own = mine.numel() == kinds[0].layout.row and mine.is_floating_point() and mine.element_size() > 1
        else:
            own = mine.numel() == sum(end - first for kind in kinds for first, end in kind.spans)
        kinds = kinds if own else ()
        if not self._looked:
            self._looked = True
            taken = {name for kind in kinds if kind.numbers for name in kind.layout.whole.names}
            left = [name for name in self._module.names if name not in taken]
            if left and self._averager.weights.codec is not None and self._module.place[0] == 0:
                logger.warning(UNCOMPRESSED, ", ".join(left[:3]))
        return kinds


class ShardReduction:
    """The reduce-scatter of a module's gradients.

    `scale`: what their mean over shards is multiplied by; `total`: where torch then divides by a divisor of the user's.
    """

    allocate = staticmethod(torch.empty)  # all gradients of a module, or this rank's shards, which the user keeps

    def __init__(
        self, module: ShardedModule, averager: ShardAverager, arrivals: Arrivals, scale: float, total: float
    ) -> None:
        self._module, self._averager, self._arrivals = module, averager, arrivals
        self._scale, self._total = scale, total

    @torch._disable_dynamo  # torch calls it in backward, under no_grad: there is no inference mode to leave
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Fill the output: at once, or where torch does not look at it, by the end of backward.

        Raises RuntimeError where parameters are left out though each has a residual, and ValueError where torch relies on a
        division within the reduce-scatter.
        """
        module, averager, arrivals = self._module, self._averager, self._arrivals
        if op != dist.ReduceOp.SUM:
            raise ValueError(DIVIDES)
        divided = module.divided_anew
        scale = self._total if divided else self._scale
        arrivals.begin(averager)
        layout = module.layout()
        if layout.numel != input_tensor.numel():
            layout = self._nameless(layout, input_tensor)
        pending = averager.reduce(module.index, layout, input_tensor, output_tensor, scale)
        at_once = divided or module.averages_over_replicas or module.reads_gradients(output_tensor.dtype)
        arrivals.take(pending, at_once=at_once, in_flight=MODULES_IN_FLIGHT)

    def _nameless(self, layout: ShardLayout, grad: Tensor) -> ShardLayout:
        """Return a layout of the whole gradient as one parameter: torch left parameters out and does not report which."""
        if self._averager.memory.reduction.feedback:
            raise RuntimeError(self._module.left_out)
        ranks = layout.whole.ranks.world_size
        whole = dataclasses.replace(layout.whole, names=("",), shapes=((ranks, grad.numel() // ranks),))
        return ShardLayout(whole, (0,))
