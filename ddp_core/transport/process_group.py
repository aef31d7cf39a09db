"""Requests over a torch process group: on the CPU a private Gloo group for each channel, on CUDA the group itself."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, partial
from traceback import clear_frames
from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ...compress.protocol.layout import Ranks, Scope
from ...compress.protocol.requests import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Gather,
    ReduceScatter,
    Request,
    Scatter,
)
from ...kernels import temporary
from .direct.collectives import GLOO, PINNED, Collectives, Direct
from .private_group import meeting_place, new_name, private_group
from .protocol import MESSAGE_LIMIT, Reply, Transport
from .swap_agreement import CHECK_EVERY, Check, nothing
from .taken_over import OWN_REQUESTS, TAKERS
from .torch_groups import (
    ALL_GATHER,
    ALL_TO_ALL,
    carries,
    clone_group,
    device_of,
    end_when_idle,
    log_no_future,
    message_limit,
    notes_aside,
    orders_streams,
    polled,
    takes_time_limits,
)

CPU = torch.device("cpu")
LARGE = 10**6  # bytes of all ranks' rows together: worth connections of their own; less Gloo does while a thread wakes


@dataclass(eq=False)
class GroupPending(Reply):
    """A collective of a process group, and the tensor that will hold its result.

    `work`: None once it was waited for or given up, and on a rank that is not a member of the group. `check`: what a wait
    that takes long does now and then; it may raise. `by_streams`: the group, if its works are ordered among streams, as with
    NCCL. `timed`: see `takes_time_limits`. `limit`: a wait as long is left to the group, whose own limit it is.
    """

    work: dist.Work | None
    reply: Tensor
    check: Check = nothing
    by_streams: dist.ProcessGroup | None = None
    timed: bool = True
    limit: timedelta = timedelta.max

    def expect_late_wait(self, now: Callable[[], float]) -> None:
        """Have the group's thread, which must not wait, or a stream note when it is there; not with Gloo on CUDA."""
        told = not self.reply.is_cuda if self.by_streams is None else notes_aside(self.by_streams, self.reply.device)
        if self.work is not None and told:
            try:
                self.work.get_future().add_done_callback(lambda _: setattr(self, "arrived", now()))
            except RuntimeError as error:  # the backend of the group gives none
                log_no_future(str(error))

    def wait(self, timeout: timedelta) -> Tensor:
        """Return the result; on CUDA the current stream waits for it, and the group's watchdog keeps the time limit."""
        try:
            self._wait(timeout)
        except Exception as error:
            clear_frames(error.__traceback__)  # they keep the work, and it a connection, as long as the error is kept
            raise
        self.work = None  # whoever keeps this, as a traceback may, keeps no connection open
        return self.reply

    def _wait(self, timeout: timedelta) -> bool:
        """Wait in parts, and look around between them; and where a connection was lost, for the reason."""
        if (work := self.work) is None:
            raise RuntimeError("it was given up, or this rank is not a member of the process group that it reduces on")
        if self.reply.is_cuda or timeout >= self.limit:
            return work.wait()
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            began = time.monotonic()
            part = max(min(deadline - began, CHECK_EVERY.total_seconds()), 0.001)
            try:
                return work.wait(timedelta(seconds=part)) if self.timed else polled(work, part)
            except RuntimeError as error:
                failed = time.monotonic() - began < part / 2  # too early for a timeout: a connection was lost
                self.check()
                if failed:
                    raise
                if time.monotonic() >= deadline:
                    why = f"it did not come within {timeout}: a rank hangs, or has died. {error}"
                    raise RuntimeError(why) from error
                if work.is_completed():  # while this one looked
                    return work.wait(CHECK_EVERY) if self.timed else work.wait()

    def abandon(self) -> None:
        """Let go of the work, and so of its connection."""
        self.work = None


@dataclass(frozen=True)
class LocalReply(Reply):
    """The reply to a request that a rank makes to itself alone: it keeps its place in the order of rounds."""

    tensor: Tensor

    def wait(self, timeout: timedelta) -> Tensor:
        """Return the tensor, which is there."""
        return self.tensor


class ProcessGroup(Transport):
    """Carries requests over `group`. `timeout`: of making channels, and of travels on the CPU. `check`: see `GroupPending`.

    Requests within and across hosts have groups of their own: `open` makes them on the CPU, the first request on a GPU.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, timeout: timedelta, check: Check = nothing
    ) -> None:
        self.group, self.ranks, self.check = group, Ranks(group.size(), group.rank()), check
        self._device, self._timeout = device, timeout
        self._names: list[str] = []  # of the channels
        self._arrangement = ""  # a name that no other has
        self._groups: dict[tuple[int, Scope], dist.ProcessGroup] = {}
        self._exchanges: dict[tuple[int, Scope], Exchange | None] = {}

    def arrange(self, per_host: int) -> None:
        """Forget the groups within and across hosts of other ranks, and have a name for those to come."""
        if per_host != self.ranks.per_host:
            self._arrangement = new_name(self)
            self.ranks = replace(self.ranks, per_host=per_host)
            self._end_groups(time.monotonic() + self._timeout.total_seconds())
            self._groups = {key: group for key, group in self._groups.items() if key[1] == "all"}
            self._exchanges = {key: made for key, made in self._exchanges.items() if key[1] == "all"}

    def open(self, channels: int, scopes: Sequence[Collection[Scope]] = ()) -> None:
        """Have so many channels. A collective call: every rank makes it at the same bucket.

        Groups are made here and not by those who use them: threads that wait for other ranks share one connection to the
        store.
        """
        for channel in range(channels):
            on_cuda = self._device.type == "cuda"
            if channel == len(self._names):
                self._names.append("" if on_cuda else new_name(self))  # on CUDA all programs take channel 0
            wanted: Collection[Scope] = ["all"] if on_cuda or not scopes else scopes[channel]
            for scope in sorted(wanted):
                if scope != "self" and (channel, scope) not in self._groups:
                    self._groups[channel, scope] = self.group if on_cuda else self._private(channel, scope)

    def _private(self, channel: int, scope: Scope) -> dist.ProcessGroup:
        ranks, name = self.ranks.members(scope), self._name(channel, scope)
        began = time.monotonic()
        try:
            return private_group(self.group, self._timeout, name, ranks, self._device)
        except RuntimeError as error:
            everyone = dist.get_process_group_ranks(self.group)
            raise RuntimeError(
                f"ranks {[everyone[rank] for rank in ranks]} did not all make a process group for round {channel + 1}: it "
                f"ended after {time.monotonic() - began:.1f} s of {self._timeout}; see the errors of the others. {error}"
            ) from error

    def _name(self, channel: int, scope: Scope) -> str:
        if scope == "all":
            return self._names[channel]
        return f"{self._names[channel]}{self._arrangement}/{scope}-{self.ranks.members(scope)[0]}"

    def _direct(self, request: Request, channel: int, group: dist.ProcessGroup) -> Reply | None:
        """Start a large request on connections of its own; the first one waits for all ranks. None: the group takes it."""
        key = channel, request.scope
        if key not in self._exchanges:
            self._exchanges[key] = self._exchange(f"{self._name(*key)}/direct", group)
        exchange = self._exchanges[key]
        begun = None if exchange is None else exchange.start(request)
        return None if begun is None else GroupPending(*begun, check=self.check)

    def _exchange(self, name: str, group: dist.ProcessGroup) -> Exchange | None:
        """None where the environment of any rank wants Gloo: they vote over the group, which notices who is dead at once."""
        votes = torch.tensor([int(os.environ.get(PINNED) != GLOO)])
        if int(GroupPending(group.allreduce([votes]), votes, check=self.check).wait(self._timeout)) < group.size():
            return None
        store = meeting_place(self.group, name)
        return Exchange(Collectives(store, group.rank(), group.size(), self._timeout), group.size())

    def start(self, request: Request, channel: int) -> Reply:
        """Give a request to the group of a channel. Raises RuntimeError where there are not so many."""
        if request.scope == "self":
            return LocalReply(request.tensor)
        group = self._groups.get((channel, request.scope))
        if group is None:
            if channel >= len(self._names):
                raise RuntimeError(
                    f"the program asks for round {channel + 1}, but its dry run had only {len(self._names)}: "
                    "the number of rounds must not depend on the gradient's values"
                )
            group = self._groups[channel, request.scope] = self._private(channel, request.scope)
        size = group.size()
        if isinstance(request, AllGather | AllToAll) and self._device.type == "cpu" and size > 1:
            rows, equal = (size, not request.sizes) if isinstance(request, AllGather) else (1, True)
            large = equal and rows * request.tensor.nbytes >= LARGE
            if large and (direct := self._direct(request, channel, group)) is not None:
                return direct
        if TAKERS:  # a context takes time in each request of each bucket; messages are few, and always have one
            with OWN_REQUESTS:
                return started(request, group, self.check, by_streams=self._by_streams)
        return started(request, group, self.check, by_streams=self._by_streams)

    @cached_property
    def limit(self) -> timedelta:
        """The time limit of the group itself."""
        device = self._device if carries(self.group, self._device) else torch.device("cuda")
        return message_limit(self.group, device, self._timeout)

    def message(self, request: Request) -> Reply:
        """Give a request to the group itself. A tensor on the CPU goes over the GPU where the group has no other backend."""
        tensor = request.tensor
        if not tensor.is_cuda and not carries(self.group, CPU):
            tensor = tensor.to(device_of(self.group) if self._device.type == "cpu" else self._device)
            request = replace(request, tensor=tensor)
        timed = tensor.is_cuda or takes_time_limits(self.group, tensor.device)
        # without `check`: ranks that differ in a swap or a load wait for each other in requests of buckets
        if isinstance(request, AllGather):  # row by row, which every backend knows
            reply = tensor.new_empty((self.group.size(), *tensor.shape))
            with OWN_REQUESTS:
                pending = GroupPending(self.group.allgather([list(reply)], [tensor]), reply, timed=timed)
        else:
            with OWN_REQUESTS:
                pending = started(request, self.group, by_streams=self._by_streams, timed=timed)
        pending.limit = self.limit
        return pending

    def separate(self) -> Transport:
        """Return a transport over a group of the same ranks on a GPU, where gradients travel over the group itself."""
        on_cuda = self._device.type == "cuda"
        return ProcessGroup(clone_group(self.group, self.limit), self._device, self._timeout) if on_cuda else self

    @cached_property
    def _by_streams(self) -> bool:
        """True if streams wait for replies, and the host never does."""
        return orders_streams(self.group, self._device)

    def _end_groups(self, deadline: float) -> None:
        """End the groups within and across hosts on a GPU, where one that is dropped breaks off what streams still do."""
        private = [group for group in self._groups.values() if group is not self.group]
        if self._device.type == "cuda" and private:
            end_when_idle(private, self._device, deadline)

    def finish(self, deadline: float) -> None:
        """Let go of the channels once streams are done with them."""
        self._end_groups(deadline)
        self.abort()

    def abort(self) -> None:
        """Let go of the channels: Gloo's own abort does nothing, connections close with the last reference."""
        exchanges = list(self._exchanges.values())  # at once: others may still add to them
        self._names, self._groups, self._exchanges = [], {}, {}
        for exchange in filter(None, exchanges):
            exchange.close()


class Exchange:
    """Large all-to-alls and all-gathers on the CPU, among `size` ranks, by `direct`: between hosts from rank to rank.

    Bits and bytes are those of Gloo's collectives. Its all-to-all begins to send before it is ready to receive, so that a
    link carries one direction after the other; here both go at once. Its all-gathers pass blocks on from rank to rank.
    """

    def __init__(self, direct: Collectives, size: int) -> None:
        self._direct, self._size = direct, size
        self.close = direct.close  # breaks the connections, once what is under way has ended

    def start(self, request: Request) -> tuple[dist.Work, Tensor] | None:
        """Begin a large request, and what it writes to; None where Gloo is to carry it."""
        tensor = request.tensor.contiguous()
        if ("all_to_all" if isinstance(request, AllToAll) else "all_gather") not in self._direct.kinds():
            return None
        if isinstance(request, AllToAll):
            reply = temporary(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            return Direct(self._direct.all_to_all(self._rows(reply), self._rows(tensor)), [reply]), reply
        reply = temporary((self._size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        return Direct(self._direct.all_gather(self._rows(reply), tensor), [reply]), reply

    def _rows(self, tensor: Tensor) -> list[Tensor]:
        return list(tensor.view(self._size, -1).unbind())


def filled(sizes: Sequence[int]) -> bool:
    """Return True for sizes of rows that are cut from a tensor, all of the first one's size as far as the tensor goes.

    >>> filled((4, 4, 3)), filled((4, 2, 0)), filled((4, 2, 3)), filled(())
    (True, True, False, False)
    """
    total, each = sum(sizes), sizes[0] if sizes else 0
    return total > 0 and all(size == min(each, max(0, total - row * each)) for row, size in enumerate(sizes))


def lengthened(tensor: Tensor, size: int) -> Tensor:
    """A flat tensor with zeros behind it, or itself where it is long enough."""
    return tensor if tensor.numel() == size else pad(tensor, (0, size - tensor.numel()))


def started(
    request: Request,
    group: dist.ProcessGroup,
    check: Check = nothing,
    *,
    by_streams: bool = False,
    timed: bool = True,
) -> GroupPending:
    """A request as a collective of a process group. `timed`: True for groups that gradwire makes, see `takes_time_limits`.

    Of requests with `sizes`: rows that are equal but for the last ones travel so with NCCL; all others in all-reduces.
    """
    tensor = request.tensor
    pending = partial(GroupPending, check=check, by_streams=group if by_streams else None, timed=timed)
    if isinstance(request, AllReduce | ReduceScatter) and request.op == "mean" and group.size() > 1:
        tensor.mul_(1 / group.size())  # as torch: bit for bit what its DDP gives
    match request:
        case ReduceScatter(sizes=sizes) if by_streams and filled(sizes):
            reply = tensor.new_empty(sizes[0])
            rows = lengthened(tensor, len(sizes) * sizes[0])
            work = dist.reduce_scatter_tensor(reply, rows, group=group, async_op=True)
            return pending(work, reply[: sizes[group.rank()]])
        case AllGather(sizes=sizes) if by_streams and filled(sizes):
            reply = tensor.new_empty(len(sizes) * sizes[0])
            work = dist.all_gather_into_tensor(reply, lengthened(tensor, sizes[0]), group=group, async_op=True)
            return pending(work, reply[: sum(sizes)])
        case ReduceScatter(sizes=sizes) if sizes:
            return pending(group.allreduce([tensor]), tensor.split(sizes)[group.rank()])
        case AllGather(sizes=sizes) if sizes:
            reply = tensor.new_zeros(sum(sizes))
            reply.split(sizes)[group.rank()].copy_(tensor)
            return pending(group.allreduce([reply]), reply)
        case AllReduce(op=op):
            if op != "max":
                return pending(group.allreduce([tensor]), tensor)
            largest = dist.AllreduceOptions()
            largest.reduceOp = dist.ReduceOp.MAX
            return pending(group.allreduce([tensor], largest), tensor)
        case ReduceScatter():
            reply = temporary(tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)
            work = dist.reduce_scatter_tensor(reply.view(-1), tensor.reshape(-1), group=group, async_op=True)
            return pending(work, reply)
        case AllGather():
            reply = temporary((group.size(), *tensor.shape), dtype=tensor.dtype, device=tensor.device)
            work = getattr(group, ALL_GATHER)(reply.view(-1), tensor.reshape(-1))  # torch's function takes longer
            return pending(work, reply)
        case AllToAll():
            reply = temporary(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            return pending(getattr(group, ALL_TO_ALL)(reply, tensor, [], []), reply)
        case Broadcast() | Gather() | Scatter():
            return pending(*_from_one(request, tensor.contiguous(), group))
    raise TypeError(
        f"a program may yield {', '.join(each.__name__ for each in get_args(Request))}; it yielded {request!r}"
    )


def _from_one(
    request: Broadcast | Gather | Scatter, tensor: Tensor, group: dist.ProcessGroup
) -> tuple[dist.Work, Tensor]:
    """Begin a collective that one rank gives or gets all of. Return its work and its reply."""
    if isinstance(request, Broadcast):
        sending = dist.BroadcastOptions()
        sending.rootRank = request.source
        return group.broadcast([tensor], sending), tensor
    if isinstance(request, Gather):
        gathering, here = dist.GatherOptions(), group.rank() == request.target
        gathering.rootRank = request.target
        rows = tensor.new_empty((group.size() if here else 0, *tensor.shape))
        return group.gather([list(rows)] if here else [], [tensor], gathering), rows
    scattering = dist.ScatterOptions()
    scattering.rootRank = request.source
    mine = tensor.new_empty(tensor.shape[1:])
    given = [list(tensor)] if group.rank() == request.source else []
    return group.scatter([mine], given, scattering), mine


def over(group: dist.ProcessGroup, device: torch.device = CPU) -> ProcessGroup:
    """Return a transport for messages alone over a process group. `device`: this rank's, where the group is of GPUs."""
    return ProcessGroup(group, device, MESSAGE_LIMIT)
