"""The sites that have met, and the collectives between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ...compress.protocol.layout import Ranks
from ...compress.protocol.requests import AllGather, AllReduce, AllToAll, ReduceScatter, Request
from ...ddp_core.transport.protocol import Reply, Transport
from ...ddp_core.transport.rank_messages import broadcast, exchange_bytes
from .background import Background, Closed, result_of
from .late_sites import Claim

CPU = torch.device("cpu")
CLOSING = 10.0  # seconds
PIECE = 1 << 20  # bytes of a model that travel within one time limit


class Meeting(Transport):
    """The sites that have met, and the transport between them. Its tensors are on the CPU.

    `names`: the sites, in rank order. `timeout`: of each wait. `claim`: the training and the round as the rendezvous found
    them, None where the participants find them. `lineage`: a number of this meeting, alike at all its sites. `differ`: True
    if its sites may round differently.
    """

    claim: Claim | None = None
    lineage = 0
    differ = False

    def __init__(self, group: dist.ProcessGroup, names: Sequence[str], timeout: timedelta) -> None:
        self.group, self.names, self.timeout = group, list(names), timeout
        self.ranks = Ranks(group.size(), group.rank())

    @property
    def limit(self) -> timedelta:
        return self.timeout

    def start(self, request: Request, channel: int) -> Reply:
        """Give a request to the network. Raises ValueError for one inside hosts, which sites are not."""
        if request.scope == "host":
            raise ValueError("messages of sites stay in no host: use a compressor without hosts+")
        return self._started(request)

    @property
    def sent_bytes(self) -> int | None:
        """Bytes that have left this participant so far; None where nobody counts them."""
        return None

    def _started(self, request: Request) -> Reply:
        raise NotImplementedError

    def tell(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every one's numbers, in rank order."""
        rows: list[list[int]] = self._started(AllGather(torch.tensor(numbers))).wait(self.timeout).tolist()
        return rows

    def exchange(self, message: bytes) -> list[bytes]:
        """Every one's message, in rank order."""
        return exchange_bytes(message, self, what="their messages")

    def copy_from(
        self,
        source: int,
        tensors: Sequence[Tensor],
        takers: Collection[int] | None = None,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        """Take over the tensors of rank `source`, in place. All ranks call it.

        `takers`: the ranks that need them, by default all others, which have the same bits already if they are left out.
        `moved`: is called where a part has arrived.
        """
        broadcast(tensors, source, self, what="the model")
        moved()


class Lines(Protocol):
    """The connections of a site: direct ones, or one to a relay."""

    async def exchange(
        self, number: int, outgoing: Sequence[memoryview | bytes], sizes: Sequence[int]
    ) -> list[bytearray]:
        """Send bytes to each other site, and receive as many from each as `sizes` says. `number`: of this exchange."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that have left this site so far."""

    def shut(self) -> None:
        """Close the connections; on the thread of the loop."""


@dataclass(frozen=True)
class SiteReply(Reply):
    """A tensor that other sites send."""

    future: Future[Tensor]

    def wait(self, timeout: timedelta) -> Tensor:
        """Return the tensor. Raises RuntimeError if it does not come within the time limit."""
        try:
            return result_of(self.future, timeout.total_seconds())
        except TimeoutError as error:
            raise RuntimeError(f"it did not come within {timeout}: a site hangs, or has died") from error

    def abandon(self) -> None:
        """Give it up."""
        self.future.cancel()


class SiteMeeting(Meeting):
    """Sites that are connected with each other, directly or through a relay."""

    def __init__(
        self, background: Background, lines: Lines, names: Sequence[str], rank: int, timeout: timedelta
    ) -> None:
        super().__init__(dist.ProcessGroup(rank, len(names)), names, timeout)  # a group of nothing but rank and size
        self._background, self.lines, self._number = background, lines, 0
        self._turn = asyncio.Lock()

    @property
    def sent_bytes(self) -> int:
        """Bytes that have left this site so far."""
        return self.lines.sent_bytes

    def _started(self, request: Request) -> Reply:
        return SiteReply(self._background.start(self._answered(request)))

    def copy_from(
        self,
        source: int,
        tensors: Sequence[Tensor],
        takers: Collection[int] | None = None,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        """Take over the tensors of site `source`, in place.

        They travel in pieces, each within the time limit of a wait, so that a slow line takes as long as it needs. Sites
        that are no takers only hear that the pieces arrive.
        """
        for tensor in tensors:
            payload = tensor.detach().view(-1).view(torch.uint8).numpy().data
            for begin in range(0, len(payload), PIECE):
                piece = self._copied(source, payload[begin : begin + PIECE], takers)
                SiteReply(self._background.start(piece)).wait(self.timeout)
                moved()

    async def _copied(self, source: int, piece: memoryview, takers: Collection[int] | None) -> Tensor:
        here, places = self.ranks.rank, range(self.ranks.world_size)
        taking = {*places} - {source} if takers is None else {*takers}
        outgoing = [piece if here == source and place in taking else b"" for place in places]
        async with self._turn:
            got = await self._exchange(
                outgoing, [len(piece) if place == source and here in taking else 0 for place in places]
            )
        if here in taking:
            piece[:] = got[source]
        return torch.empty(0)

    async def _answered(self, request: Request) -> Tensor:
        async with self._turn:
            if request.scope == "self":
                return request.tensor
            match request:
                case AllReduce():
                    return await self._sum(request)
                case AllGather(tensor=tensor, sizes=sizes):
                    parts = await self._gathered(tensor, sizes or [tensor.numel()] * self.ranks.world_size)
                    return torch.cat(parts) if sizes else torch.stack(parts).view(len(parts), *tensor.shape)
                case AllToAll(tensor=tensor):
                    return torch.stack(await self._rows(list(tensor.reshape(len(tensor), -1)))).view(tensor.shape)
                case ReduceScatter(tensor=tensor, op=op, sizes=sizes):
                    rows = list(tensor.split(sizes)) if sizes else list(tensor.reshape(len(tensor), -1))
                    total = self._total(await self._rows(rows), op)
                    return total if sizes else total.view(tensor.shape[1:])
        raise TypeError(
            f"sites answer AllReduce, AllGather, AllToAll and ReduceScatter; a program asked for {request!r}"
        )

    async def _sum(self, request: AllReduce) -> Tensor:
        """Each site sums a part, in rank order, and sends it to the others: all have the same bits."""
        flat = request.tensor.reshape(-1)
        parts = list(flat.tensor_split(self.ranks.world_size))
        total = self._total(await self._rows(parts), request.op)
        return torch.cat(await self._gathered(total, [part.numel() for part in parts])).view(request.tensor.shape)

    def _total(self, parts: Sequence[Tensor], op: str) -> Tensor:
        if op == "max":
            return torch.stack(list(parts)).amax(0)
        scaled = [part * (1 / len(parts)) if op == "mean" else part for part in parts]
        total = scaled[0].clone()
        for part in scaled[1:]:
            total.add_(part)
        return total

    async def _rows(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Send row j to site j, and return what came for this one's row, in rank order."""
        mine = rows[self.ranks.rank]
        got = await self._exchange([bytes_of(row) for row in rows], [mine.nbytes] * len(rows))
        return self._with_own(got, mine)

    async def _gathered(self, tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Send a tensor to all, and return theirs, flat, of these numbers of elements."""
        got = await self._exchange([bytes_of(tensor)] * len(sizes), [size * tensor.element_size() for size in sizes])
        return self._with_own(got, tensor.reshape(-1))

    def _with_own(self, got: Sequence[bytearray], mine: Tensor) -> list[Tensor]:
        return [mine if place == self.ranks.rank else tensor_of(part, mine) for place, part in enumerate(got)]

    async def _exchange(self, outgoing: Sequence[memoryview | bytes], sizes: Sequence[int]) -> list[bytearray]:
        """Send bytes to each other site, and receive as many from each as `sizes` says."""
        self._number += 1
        try:
            return await self.lines.exchange(self._number, outgoing, sizes)
        except BaseException:
            self.lines.shut()
            raise

    def close(self) -> None:
        """Close the connections, which tells the other sites."""
        try:
            self._background.run(self._closed(), CLOSING)
        except (Closed, TimeoutError):
            return

    async def _closed(self) -> None:
        self.lines.shut()


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in CPU memory."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().data


def tensor_of(payload: bytearray, like: Tensor) -> Tensor:
    """Return a flat tensor of these bytes, of a tensor's dtype."""
    return torch.frombuffer(payload, dtype=like.dtype) if payload else like.new_empty(0)
