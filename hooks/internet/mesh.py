"""Direct connections between sites that have met: every site is connected with every other."""

from __future__ import annotations

import asyncio
import struct
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from typing import Any

from .link import FRAME, Connection, LinkError, dial
from .records import BYTES, Site, field, read, written
from .secret import Secret

HEAD = struct.Struct(">QQ")  # number of a message between two sites, and its bytes
PARKED = 1024  # connections that wait until this site has heard of their meeting
INTRODUCTION = 10.0  # seconds in which a connection has to say who it is


class Parking:
    """Connections from sites of a meeting, which may come before this site has heard of the meeting.

    `own`: this site's identity. A relay may bring connections that are meant for another site.
    """

    def __init__(self, own: str) -> None:
        self._own = own
        self._places: OrderedDict[tuple[str, str], asyncio.Future[Connection]] = OrderedDict()

    async def park(self, link: Connection) -> None:
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

    def place(self, token: str, site: str) -> asyncio.Future[Connection]:
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


def _release(place: asyncio.Future[Connection]) -> None:
    if place.done() and not place.cancelled():
        place.result().close()
    place.cancel()


async def connected(
    peers: Sequence[Site], rank: int, token: str, secret: Secret, parking: Parking, seconds: float
) -> list[Connection | None]:
    """Connect with every other site of a meeting: dial those before this one, and await those behind it."""

    async def with_peer(place: int) -> Connection | None:
        peer = peers[place]
        if place == rank:
            return None
        if place > rank:
            link = await parking.place(token, peer.id)
            parking.claimed(token, peer.id)
        else:
            link = await dial(peer.host, peer.port, secret, peer.name, seconds)
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
            if not task.cancelled() and task.exception() is None and isinstance(task.result(), Connection):
                task.result().close()
        raise


class Mesh:
    """The connections of one site with the others of a meeting, in rank order; None in its own place."""

    def __init__(self, links: Sequence[Connection | None]) -> None:
        self.links = list(links)

    async def exchange(
        self, number: int, outgoing: Sequence[memoryview | bytes], sizes: Sequence[int]
    ) -> list[bytearray]:
        """Send bytes to each other site, and receive as many from each as `sizes` says. `number`: of this exchange."""
        work: list[Coroutine[Any, Any, bytearray]] = []
        for place, link in enumerate(self.links):
            work.append(_none() if link is None else _received(link, number, sizes[place]))
        work += [_sent(link, number, outgoing[place]) for place, link in enumerate(self.links) if link]
        return list((await all_of(work))[: len(self.links)])

    @property
    def sent_bytes(self) -> int:
        """Bytes that have left this site so far."""
        return sum(link.sent_bytes for link in self.links if link is not None)

    def shut(self) -> None:
        """Close the connections; on the thread of the loop."""
        for link in self.links:
            if link is not None:
                link.close()


async def _none() -> bytearray:
    return bytearray()


async def _sent(link: Connection, number: int, payload: memoryview | bytes) -> bytearray:
    await link.send(HEAD.pack(number, len(payload)))
    for begin in range(0, len(payload), FRAME):
        await link.send(bytes(payload[begin : begin + FRAME]))
    return bytearray()


async def _received(link: Connection, number: int, size: int) -> bytearray:
    """Return the bytes of a message. Raises LinkError for another one than this site expects."""
    message = Incoming(link.peer, number, size)
    message.add(await link.receive(HEAD.size))
    while not message.whole:
        message.add(await link.receive(min(FRAME, size - len(message.payload))))
    return message.payload


class Incoming:
    """A message from a site, frame by frame. Raises LinkError for another one than is due.

    `peer`: the site's name; `number`, `size`: of the message that is due, and its bytes.
    """

    def __init__(self, peer: str, number: int, size: int) -> None:
        self._peer, self._due, self._begun = peer, (number, size), False
        self.payload = bytearray()

    @property
    def whole(self) -> bool:
        """Return True once all bytes are there."""
        return self._begun and len(self.payload) == self._due[1]

    def add(self, frame: bytes) -> None:
        """Take the next frame: first the head, then bytes of the message."""
        if not self._begun:
            found = HEAD.unpack(frame) if len(frame) == HEAD.size else (0, 0)
            if found != self._due:
                raise LinkError(
                    f"{self._peer} sends message and size {found} where {self._due} is due: its model, options or release "
                    "differ"
                )
            self._begun = True
        elif not 0 < len(frame) <= self._due[1] - len(self.payload):
            raise LinkError(
                f"{self._peer} sends {len(frame)} bytes after {len(self.payload)} of a message of {self._due[1]}"
            )
        else:
            self.payload += frame
