"""What FSDP2 calls in place of its own all-gather and reduce-scatter."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from ...compress.shards import ShardLayout
from ...ddp_core import Pending, ShardAverager, start_all_gather
from .modules import ShardedModule

IN_FLIGHT = 4  # reduce-scatters, each of which keeps the gradients of a module


class GatherWork(dist._Work):  # type: ignore[misc]
    """Weights on their way; whoever waits for them decodes them."""

    def __init__(self, pending: Pending, timeout: timedelta) -> None:
        super().__init__()
        self._pending, self._timeout = pending, timeout

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when they are there; raises RuntimeError where they do not come within the time limit."""
        self._pending.wait(self._timeout)
        return True


class Allocating:
    """Memory as torch's own communication allocates it."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of this size, not filled."""
        return torch.empty(*size, dtype=dtype, device=device)


class ShardGather(Allocating):
    """The all-gather of a module's parameters."""

    def __init__(self, module: ShardedModule, averager: ShardAverager) -> None:
        self._module, self._averager = module, averager

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Fill the output. On the CPU torch waits for it where it needs the weights, so that what it prefetches overlaps.

        As they are: bytes of parameters of several types, whole numbers, and what was gathered before and is now shared out
        among fewer ranks (`reshard_after_forward` a number), which must stay what it was.
        """
        averager, module = self._averager, self._module
        on_cpu = output_tensor.device.type == "cpu"
        exact = averager.codec is None and not averager.decorated
        if exact or not output_tensor.is_floating_point() or group.size() != module.shard_group.size():
            averager.note_gather(module.index, module.names, input_tensor, output_tensor)
            return start_all_gather(output_tensor, input_tensor, group, async_op=async_op or on_cpu)
        pending = averager.gather(module.index, module.names, input_tensor, output_tensor)
        timeout = averager.engines.timeout
        if on_cpu:
            return GatherWork(pending, timeout)
        pending.wait(timeout)
        return None


class Arrivals:
    """Shards of gradients on their way, which torch does not wait for: backward ends when all are there."""

    def __init__(self, averager: ShardAverager) -> None:
        self._averager = averager
        self._pendings: list[Pending] = []
        self._backward = -1  # that has begun the step

    @property
    def within(self) -> bool:
        """Whether there is a backward whose end will come."""
        return self._backward != -1

    def begin(self) -> None:
        """Gradients of a module come next: perhaps the first ones of a backward."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward or backward == -1:
            self._wait(0)  # for what a backward left that broke off
            self._averager.begin_step()
            self._backward = backward
            if backward != -1:
                Variable._execution_engine.queue_callback(self._finish)

    def add(self, pending: Pending) -> None:
        """Let a shard arrive while backward goes on; the memory that waits with it is limited."""
        self._pendings.append(pending)
        self._wait(IN_FLIGHT)

    def wait(self, pending: Pending) -> None:
        """Wait for a shard at once."""
        pending.wait(self._averager.engines.timeout)
        if not self.within:
            self._averager.end_step()

    def _finish(self) -> None:
        self._wait(0)
        self._averager.end_step()
        self._backward = -1

    def _wait(self, left: int) -> None:
        while len(self._pendings) > left:
            self._pendings.pop(0).wait(self._averager.engines.timeout)


class ShardReduction(Allocating):
    """The reduce-scatter of a module's gradients."""

    def __init__(self, module: ShardedModule, averager: ShardAverager, arrivals: Arrivals, scale: float) -> None:
        self._module, self._averager, self._arrivals, self._scale = module, averager, arrivals, scale

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Fill the output: at once, or where torch does not look at it, by the end of backward.

        Raises RuntimeError where parameters are left out, and what is held back of each is kept.
        """
        module, averager, arrivals = self._module, self._averager, self._arrivals
        arrivals.begin()
        layout = module.layout()
        if layout.numel != input_tensor.numel():
            layout = self._nameless(layout, input_tensor)
        pending = averager.reduce(module.index, layout, input_tensor, output_tensor, self._scale)
        if (
            output_tensor.device.type == "cpu"
            and arrivals.within
            and not module.waits_for_gradients(output_tensor.dtype)
        ):
            arrivals.add(pending)
        else:
            arrivals.wait(pending)

    def _nameless(self, layout: ShardLayout, grad: Tensor) -> ShardLayout:
        """Where torch leaves parameters out, it does not tell which: what travels, as one parameter."""
        if self._averager.memory.reduction.feedback:
            shown = ", ".join(layout.whole.names[:3])
            raise RuntimeError(
                f"some parameters of a sharded module ({shown}, ...) have no gradient in this backward, and torch does not "
                "tell which, while error feedback keeps what is held back of each: call "
                "set_reduce_scatter_unused_params(True) on the model, where torch has it, or reduce with "
                "error_feedback=false, as in 'int8:error_feedback=false'"
            )
        ranks = layout.whole.world_size
        whole = dataclasses.replace(layout.whole, names=("",), shapes=((ranks, grad.numel() // ranks),))
        return ShardLayout(whole, (0,))
