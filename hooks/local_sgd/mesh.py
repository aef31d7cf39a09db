"""The connections between sites that have met, and the collectives over them: every site is connected with every other."""

from __future__ import annotations

import asyncio
import struct
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...compress.protocol.requests import AllGather, AllReduce, AllToAll, ReduceScatter, Request
from ...ddp_core.transport.protocol import Reply
from .background import Background, Closed, result_of
from .link import FRAME, Link, LinkError, dial
from .records import BYTES, field, read, written
from .sites import Meeting

HEAD = struct.Struct(">QQ")  # number of a message between two sites, and its bytes
PARKED = 1024  # connections that wait until this site has heard of their meeting
INTRODUCTION = 10.0  # seconds in which a connection has to say who it is


@dataclass(frozen=True)
class Peer:
    """A site of a meeting. `id`: its identity; `host`, `port`: where it listens."""

    id: str
    name: str
    host: str
    port: int


class Parking:
    """Connections from sites of a meeting, which may come before this site has heard of the meeting.

    `own`: this site's identity. A relay may bring connections that are meant for another site.
    """

    def __init__(self, own: str) -> None:
        self._own = own
        self._places: OrderedDict[tuple[str, str], asyncio.Future[Link]] = OrderedDict()

    async def park(self, link: Link) -> None:
        """Keep a connection until it is claimed, once it has said for which meeting it is."""
        try:
            record = read(await asyncio.wait_for(link.receive(BYTES), INTRODUCTION), "the introduction of a site")
        except asyncio.TimeoutError as error:
            raise LinkError(f"{link.peer} does not say who it is") from error
        token, site, to = (field(record, key, str, "the introduction of a site") for key in ("token", "id", "to"))
        if to != self._own:
            raise LinkError(f"{link.peer} wants to reach site {to}, and this is {self._own}")
        place = self.place(token, site)
        if place.done():
            return link.close()
        link.peer = f"site {site}"
        place.set_result(link)

    def place(self, token: str, site: str) -> asyncio.Future[Link]:
        """Return the future connection from a site, in the meeting that has this token."""
        if (token, site) not in self._places:
            self._places[token, site] = asyncio.get_running_loop().create_future()
        while len(self._places) > PARKED:
            _release(self._places.popitem(last=False)[1])
        return self._places[token, site]

    def clear(self) -> None:
        """Close connections of earlier meetings that nobody has claimed."""
        for place in self._places.values():
            _release(place)
        self._places.clear()

    def claimed(self, token: str, site: str) -> None:
        """Note that a connection has found its meeting."""
        self._places.pop((token, site), None)


def _release(place: asyncio.Future[Link]) -> None:
    if place.done() and not place.cancelled():
        place.result().close()
    place.cancel()


async def connected(
    peers: Sequence[Peer], rank: int, token: str, key: bytes, parking: Parking, seconds: float
) -> list[Link | None]:
    """Connect with every other site of a meeting: dial those before this one, and await those behind it."""

    async def with_peer(place: int) -> Link | None:
        peer = peers[place]
        if place == rank:
            return None
        if place > rank:
            link = await parking.place(token, peer.id)
            parking.claimed(token, peer.id)
        else:
            link = await dial(peer.host, peer.port, key, peer.name, seconds)
            await link.send(written({"token": token, "id": peers[rank].id, "to": peer.id}))
        link.peer = peer.name
        return link

    try:
        links = await asyncio.wait_for(all_of([with_peer(place) for place in range(len(peers))]), seconds)
    except asyncio.TimeoutError as error:
        raise LinkError(f"no connection to all of {', '.join(peer.name for peer in peers)} in {seconds:g} s") from error
    parking.clear()
    return links


async def all_of(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run coroutines at once, and return their results. Where one raises, the others end."""
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled() and task.exception() is None and isinstance(task.result(), Link):
                task.result().close()
        raise


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
    """Sites that are connected with each other."""

    def __init__(
        self, background: Background, links: Sequence[Link | None], names: Sequence[str], rank: int, timeout: timedelta
    ) -> None:
        super().__init__(dist.ProcessGroup(rank, len(links)), names, timeout)  # a group of nothing but rank and size
        self._background, self._links, self._number = background, list(links), 0
        self._turn = asyncio.Lock()

    def _started(self, request: Request) -> Reply:
        return SiteReply(self._background.start(self._answered(request)))

    def copy_from(self, source: int, tensors: Sequence[Tensor]) -> None:
        """Take over the tensors of site `source`, in place."""
        for tensor in tensors:
            SiteReply(self._background.start(self._copied(source, tensor))).wait(self.timeout)

    async def _copied(self, source: int, tensor: Tensor) -> Tensor:
        mine, size = self.ranks.rank == source, tensor.nbytes
        outgoing = [bytes_of(tensor) if mine else b""] * self.ranks.world_size
        async with self._turn:
            got = await self._exchange(outgoing, [size if place == source else 0 for place in range(len(outgoing))])
        return tensor if mine else tensor.copy_(tensor_of(got[source], tensor).view(tensor.shape))

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

    async def _sum(self, request: AllReduce) -> Tensor:
        """Each site sums a part, in rank order, and sends it to the others: all have the same bits."""
        flat = request.tensor.reshape(-1)
        parts = list(flat.tensor_split(self.ranks.world_size))
        total = self._total(await self._rows(parts), request.op)
        return torch.cat(await self._gathered(total, [part.numel() for part in parts])).view(request.tensor.shape)

    def _total(self, parts: Sequence[Tensor], op: str) -> Tensor:
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
        work: list[Coroutine[Any, Any, bytearray]] = []
        for place, link in enumerate(self._links):
            work.append(_none() if link is None else _received(link, self._number, sizes[place]))
        work += [_sent(link, self._number, outgoing[place]) for place, link in enumerate(self._links) if link]
        try:
            return list((await all_of(work))[: len(self._links)])
        except BaseException:
            self.shut()
            raise

    def shut(self) -> None:
        """Close the connections; on the thread of the loop."""
        for link in self._links:
            if link is not None:
                link.close()

    def close(self) -> None:
        """Close the connections, which tells the other sites."""
        try:
            self._background.run(self._closed(), INTRODUCTION)
        except (Closed, TimeoutError):
            return

    async def _closed(self) -> None:
        self.shut()


async def _none() -> bytearray:
    return bytearray()


async def _sent(link: Link, number: int, payload: memoryview | bytes) -> bytearray:
    await link.send(HEAD.pack(number, len(payload)))
    for begin in range(0, len(payload), FRAME):
        await link.send(bytes(payload[begin : begin + FRAME]))
    return bytearray()


async def _received(link: Link, number: int, size: int) -> bytearray:
    """Return the bytes of a message. Raises LinkError for another one than this site expects."""
    head = await link.receive(HEAD.size)
    found = HEAD.unpack(head) if len(head) == HEAD.size else (0, 0)
    if found != (number, size):
        link.close()
        raise LinkError(
            f"{link.peer} sends message and size {found} where {(number, size)} is due: its model, options or release differ"
        )
    payload = bytearray()
    while len(payload) < size:
        frame = await link.receive(min(FRAME, size - len(payload)))
        if not frame:
            link.close()
            raise LinkError(f"{link.peer} sends a message that ends after {len(payload)} of {size} bytes")
        payload += frame
    return payload


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in CPU memory."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().data


def tensor_of(payload: bytearray, like: Tensor) -> Tensor:
    """Return a flat tensor of these bytes, of a tensor's dtype."""
    return torch.frombuffer(payload, dtype=like.dtype) if payload else like.new_empty(0)
