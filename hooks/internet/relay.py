"""A relay: each site connects to the rendezvous alone, which passes payloads on to the others.

A payload for several sites leaves its sender once. The relay passes the frames of one exchange on before any of the next, so
it keeps nothing, and a site receives what is due. `Star` is a site's end; `Room` is the rendezvous', which server.py opens.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence

from .link import Connection, LinkError
from .mesh import HEAD, Incoming, all_of
from .records import BYTES, BadRecord, field, read, written

PLACE = struct.Struct(">H")  # of a site among those of a meeting; in front of a frame: whom it is from
PART = 1 << 17  # bytes of a payload in a frame: the relay passes on whole ones, so small ones wait less


def _addressed(places: Sequence[int], body: bytes) -> bytes:
    """Return a frame for sites at these places; one for none ends an exchange."""
    return struct.pack(f">H{len(places)}H", len(places), *places) + body


def _read_address(frame: bytes, sites: int) -> tuple[list[int], bytes]:
    """Return the places that a frame is for, and its body. Raises BadRecord."""
    count = PLACE.unpack_from(frame)[0] if len(frame) >= PLACE.size else sites
    size = PLACE.size * (1 + count)
    if count >= sites or len(frame) < size:
        raise BadRecord(f"a frame for the relay names the sites that it is for, fewer than {sites}; got {count}")
    places = [place for (place,) in PLACE.iter_unpack(frame[PLACE.size : size])]
    if any(place >= sites for place in places):
        raise BadRecord(f"a frame for the relay names places below {sites}; got {places}")
    return places, frame[size:]


class Star:
    """The connection of one site with a relay."""

    def __init__(self, link: Connection, names: Sequence[str], rank: int) -> None:
        self._link, self._names, self._rank = link, list(names), rank

    async def exchange(
        self, number: int, outgoing: Sequence[memoryview | bytes], sizes: Sequence[int]
    ) -> list[bytearray]:
        """Send bytes to each other site, and receive as many from each as `sizes` says. `number`: of this exchange."""
        received, _ = await all_of([self._receive(number, sizes), self._send(number, outgoing)])
        return list(received)

    async def _send(self, number: int, outgoing: Sequence[memoryview | bytes]) -> None:
        """Send each payload once, whoever it is for.

        The site behind this one comes first: where all sites send to one at once, its line alone is busy.
        """
        places: dict[int, list[int]] = {}
        for step in range(1, len(outgoing)):
            place = (self._rank + step) % len(outgoing)
            places.setdefault(id(outgoing[place]), []).append(place)  # one object is one payload for several sites
        for to in places.values():
            payload = outgoing[to[0]]
            await self._link.send(_addressed(to, HEAD.pack(number, len(payload))))
            for begin in range(0, len(payload), PART):
                await self._link.send(_addressed(to, bytes(payload[begin : begin + PART])))
        await self._link.send(_addressed([], b""))

    async def _receive(self, number: int, sizes: Sequence[int]) -> list[bytearray]:
        due = {place: Incoming(self._names[place], number, size) for place, size in enumerate(sizes)}
        parts = {place: message.payload for place, message in due.items()}
        del due[self._rank]
        while due:
            frame = await self._link.receive()
            (place,) = PLACE.unpack_from(frame) if len(frame) >= PLACE.size else (-1,)
            if place not in due:
                raise LinkError(f"{self._link.peer} passes a frame on from site {place}, of which none is due")
            due[place].add(frame[PLACE.size :])
            if due[place].whole:
                del due[place]
        return [parts[place] for place in range(len(sizes))]

    @property
    def sent_bytes(self) -> int:
        """Bytes that have left this site so far."""
        return self._link.sent_bytes

    def shut(self) -> None:
        """Close the connection; on the thread of the loop."""
        self._link.close()


async def joined(link: Connection, question: dict[str, object], names: Sequence[str], rank: int) -> Star:
    """Return the connection with a relay, once all sites of a meeting are connected with it. Raises LinkError."""
    try:
        await link.send(written(question))
        answer = read(await link.receive(BYTES), f"the answer of {link.peer}")
        if field(answer, "kind", str, f"the answer of {link.peer}") == "error":
            said = field(answer, "message", str, f"the answer of {link.peer}")
            raise LinkError(f"{link.peer} does not connect the sites: {said}")
    except BaseException:
        link.close()
        raise
    return Star(link, names, rank)


class Room:
    """The sites of a meeting, as a relay knows them. It ends with the first connection that does."""

    def __init__(self, token: str, sites: Sequence[str]) -> None:
        self.token, self._sites = token, list(sites)
        self._links: dict[int, Connection] = {}
        self._turns = {place: asyncio.Lock() for place in range(len(sites))}  # of writing to a connection
        self.ended = False
        self._finished = 0  # sites that have sent all of an exchange
        self._next: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def serve(self, site: str, link: Connection, seconds: float) -> None:
        """Pass on what a site sends, until a connection ends. `seconds`: in which all sites have to come."""
        place = self._sites.index(site)
        if self.ended or place in self._links:
            raise BadRecord(f"site {site} has been in this meeting already")
        self._links[place], complete = link, self._next
        try:
            if len(self._links) == len(self._sites):
                for each in self._links.values():  # before any site's frames
                    await each.send(written({"kind": "here"}))
                self._open()
            await asyncio.wait_for(asyncio.shield(complete), seconds)
            while not self.ended:
                await self._exchange(place, link)
        except asyncio.TimeoutError as error:
            raise LinkError(f"only {len(self._links)} of {len(self._sites)} sites have come to the relay") from error
        finally:
            self.end()

    async def _exchange(self, place: int, link: Connection) -> None:
        """Pass on what a site sends in an exchange; the next one begins once all sites have sent all of this one."""
        while True:
            places, body = _read_address(await link.receive(), len(self._sites))
            if not places:
                break
            for to in places:
                async with self._turns[to]:
                    await self._links[to].send(PLACE.pack(place) + body)
        self._finished += 1
        if self._finished == len(self._sites):
            return self._open()
        await asyncio.shield(self._next)

    def _open(self) -> None:
        """Let all sites go on with the next exchange."""
        self._finished, opened = 0, self._next
        self._next = asyncio.get_running_loop().create_future()
        opened.set_result(None)

    def end(self) -> None:
        """Close all connections."""
        if not self.ended:
            self.ended = True
            self._open()
            for link in self._links.values():
                link.close()
