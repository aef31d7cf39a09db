"""The engines of a model's compression: one for each device and process group."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache, cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from ...compress import Compressor, Ranks
from ...compress.state.shares import placed_on_hosts, ranks_given
from ..buckets.assignment import Allocate, allocate_own
from ..engine.engine import Engine
from ..measure.clock import Clock, clock_of
from ..transport.host_memory import HostMemory
from ..transport.host_places import ranks_per_host
from ..transport.launchers import warn_if_apart
from ..transport.lost_ranks import announce
from ..transport.parts_of_world import part_of
from ..transport.process_group import ProcessGroup
from ..transport.protocol import Decorator, Transport, time_limit
from ..transport.swap_agreement import Agreement
from ..transport.torch_groups import group_limit

AT_EXIT = timedelta(seconds=5)
LET_GO = 0.1  # seconds


@cache
def wait_at_exit() -> None:
    """Have the process wait at its exit, once all engines are closed, for Gloo's threads.

    They let go of the last tensors after a collective has ended, and need the interpreter for it. A thread that comes
    when the interpreter ends aborts the process.
    """
    weakref.finalize(Engines, time.sleep, LET_GO)  # the first one that is made runs last


class Engines:
    """Made as buckets ask for them. `groups`: see CompressedAverager, as `timeout` and `decorate`.

    `agreement`: where the ranks meet before they compare how they are set up. `on_idle`: see `Engine`.
    """

    def __init__(
        self,
        groups: Sequence[dist.ProcessGroup],
        timeout: timedelta | None,
        decorate: Decorator | None,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        if decorate is not None and not callable(decorate):
            raise TypeError(
                f"transport is a function of a transport, such as gradwire.ddp_core.Paced; got {decorate!r}"
            )
        wait_at_exit()
        self.given_timeout = timeout if timeout is None else time_limit(timeout)
        self.agreement = Agreement()
        self._groups, self._decorate, self._on_idle = list(groups), decorate, on_idle
        self.speaks: bool | None = None  # see `first`
        self._made: dict[tuple[torch.device, int], Engine] = {}
        self._found: int | None = None  # ranks of a host
        if self._groups or dist.is_initialized():
            with suppress(
                KeyError, RuntimeError
            ):  # it only helps: a group that torch does not know, a store that is gone
                announce(self._groups[0] if self._groups else dist.distributed_c10d._get_default_group())

    @property
    def group(self) -> dist.ProcessGroup:
        """The first of the groups, whose ranks all others have too."""
        if not self._groups:
            if not dist.is_initialized():
                raise RuntimeError("there is no process group yet: call torch.distributed.init_process_group() first")
            assert dist.group.WORLD is not None
            self._groups = [dist.group.WORLD]
        return self._groups[0]

    @cached_property
    def timeout(self) -> timedelta:
        """The limit of each wait: the given one, else that of the group itself."""
        return group_limit(self.group) if self.given_timeout is None else self.given_timeout

    @property
    def ranks(self) -> Ranks:
        """The ranks of the group, each a host of its own. Raises RuntimeError where there is no group yet."""
        return Ranks(self.group.size(), self.group.rank())

    @property
    def first(self) -> bool:
        """True on the rank that warns for all of the model's: rank 0 of the group if nobody has said which."""
        return self.group.rank() == 0 if self.speaks is None else self.speaks

    @cached_property
    def part(self) -> str:
        """The part of the world that the group is: see `part_of_world`."""
        return part_of(self.group)

    @property
    def idle(self) -> bool:
        """True if no engine has anything under way."""
        return all(engine.idle for engine in list(self._made.values()))  # others may add to them meanwhile

    @property
    def runs(self) -> bool:
        """True if any engine runs a task, whatever is left to those who will wait for it."""
        return any(engine.runs for engine in list(self._made.values()))

    @property
    def failed(self) -> bool:
        """True if any engine has failed or was closed."""
        return any(engine.failed for engine in list(self._made.values()))

    @property
    def on_host(self) -> bool:
        """True if programs run on the host, and are not only queued by it."""
        return all(device.type == "cpu" for device, _ in self._made)

    @property
    def clock(self) -> Clock:
        """The clock of the device on which programs run; the host's, if there are several."""
        devices = {device for device, _ in list(self._made)}
        return clock_of(devices.pop()) if len(devices) == 1 else Clock()

    def of(self, device: torch.device, index: int) -> Engine:
        """Return the engine of a bucket. Buckets go in turn among the groups."""
        place = index % len(self._groups or [self.group])
        if (device, place) not in self._made:
            warn_if_apart()
            check = self.agreement.check
            carrier: Transport = ProcessGroup(self._groups[place], device, self.timeout, check)
            if device.type == "cpu" and len(self._groups) == 1:  # around it the memory that a host's ranks share
                carrier = HostMemory(carrier, check)
            if self._decorate is not None:
                carrier = self._decorate(carrier)
            engine = Engine(carrier, device, self.timeout, self._on_idle)
            weakref.finalize(self, engine.close, AT_EXIT)  # a thread inside torch would abort the interpreter
            self._made[device, place] = engine
        return self._made[device, place]

    def transport(self, device: torch.device) -> Transport:
        """Return the transport of messages on a device: that of the first bucket."""
        return self.of(device, 0).transport

    def placed_ranks(self, compressor: Compressor, device: torch.device) -> Ranks:
        """Return the ranks on their hosts for a compressor of two levels, else each a host of its own.

        The first look at the hosts is a collective call.
        """
        if ranks_given(compressor) != 0:
            return placed_on_hosts(compressor, self.ranks)
        if self._found is None:
            self._found = ranks_per_host(self.transport(device), device)
        return replace(self.ranks, per_host=self._found)

    def allocator(self, compressor: Compressor, device: torch.device, *, sums: bool) -> Allocate:
        """Return what allocates the buckets of our own DDP. `sums`: gradients are only summed."""
        transport = self.of(device, 0).transport
        if not transport.allocates or (ranks_given(compressor) is None and not sums):
            return allocate_own

        def allocated(buckets: Sequence[Sequence[Tensor]]) -> Sequence[Tensor | None]:
            transport.arrange(self.placed_ranks(compressor, device).per_host)
            return transport.allocate(buckets)

        return allocated

    def send_all(self) -> None:
        """Have all that was submitted come to its end, whoever waits for what, and in whatever order."""
        for engine in list(self._made.values()):
            engine.send_all()

    def follow(self) -> None:
        """Have the current stream of each GPU wait for all that was submitted: what a thread reads may still be written."""
        for engine in list(self._made.values()):
            engine.follow()

    def close(self) -> None:
        """End their threads and connections."""
        for engine in list(self._made.values()):
            engine.close()
