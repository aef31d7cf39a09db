"""The rendezvous itself: a server that sites ask for the next meeting, over connections that have proven a secret.

With `relay` it also passes payloads on between sites, which only dial out then.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import secrets
import socket
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path
from typing import Any

from .background import Background
from .link import Connection, LinkError, Listener
from .records import BYTES, BadRecord, field, read, written
from .relay import Room
from .secret import Secret
from .server_meetings import Answer, Arrival, Gathering

logger = logging.getLogger(__name__)
TRAININGS = 4096  # that the server remembers, one for each rank of a site; an idle one makes room for the next
ASKED = 10.0  # seconds in which a connection has to say what it wants
LONGEST = 3600.0  # seconds for which a site waits for others at the relay
START = timedelta(seconds=30)


class Server:
    """A place where sites meet, until `close`. Raises RuntimeError where it cannot listen at the address.

    `host`: the address at which it listens; without a secret a loopback or private one. `port`: 0 takes a free one.
    `relay`: sites reach each other through it.
    """

    def __init__(
        self, host: str = "127.0.0.1", port: int = 0, secret: str | Path | Secret = "", *, relay: bool = False
    ) -> None:
        shared = Secret.of(secret)
        refuse_open(host, shared)
        self.host, self._epoch, self._relay = host, secrets.token_hex(8), relay
        self._rooms: dict[str, Room] = {}  # by prefix
        self._gatherings: OrderedDict[str, Gathering] = OrderedDict()
        self._answers: dict[tuple[str, str], asyncio.Future[Answer]] = {}
        self._background = Background()
        self._listener = Listener(shared, self._serve)
        try:
            self.port = self._background.run(self._listener.open(host, port), START.total_seconds())
        except OSError as error:
            self._background.close()
            raise RuntimeError(f"no rendezvous can listen at {host}:{port}: {error}") from error

    def close(self) -> None:
        """End: sites that wait raise RuntimeError."""
        with contextlib.suppress(RuntimeError, TimeoutError):
            self._background.run(self._shut(), START.total_seconds())
        self._background.close()

    async def _shut(self) -> None:
        self._listener.close()

    async def _serve(self, link: Connection) -> None:
        """Answer one question of a site."""
        try:
            question = read(await asyncio.wait_for(link.receive(BYTES), ASKED), "the question of a site")
            if question.get("ask") == "relay":
                return await self._passed_on(question, link)
            answer = await self._answered(question, link)
        except BadRecord as error:
            logger.warning("the rendezvous refuses a question of %s: %s", link.peer, error)
            answer = {"kind": "error", "error": "bad", "message": str(error), "round": 0}
        except asyncio.TimeoutError:
            return link.close()
        if answer is not None:
            await link.send(written({**answer, "epoch": self._epoch}))
        await link.end()

    async def _answered(self, question: dict[str, Any], link: Connection) -> Answer | None:
        """Return the answer; None where the site has left before there was one."""
        wish = field(question, "ask", str, "the question of a site")
        if wish == "look":
            return {"kind": "here", "relay": self._relay}
        prefix = field(question, "prefix", str, "the question of a site")
        gathering = self._gathering(prefix)
        if wish == "meet":
            arrival = Arrival.of(question, self._epoch, asyncio.get_running_loop().time(), relay=self._relay)
            return await self._met(prefix, gathering, arrival, link)
        if wish == "end":
            meeting, number = (field(question, key, int, "the end of a training") for key in ("meeting", "round"))
            if field(question, "epoch", str, "the end of a training") == self._epoch:
                gathering.end(meeting, number)
            self._review(prefix, gathering)
            return {"kind": "here"}
        raise BadRecord(f"a site asks to look, meet, relay or end; got {wish[:20]!r}")

    async def _passed_on(self, question: dict[str, Any], link: Connection) -> None:
        """Pass on what a site of the last meeting sends to the others, until one of them leaves."""
        what = "the question of a site"
        token, site, prefix = (field(question, key, str, what) for key in ("token", "id", "prefix"))
        seconds = min(field(question, "phase", float, what), LONGEST)
        gathering = self._gatherings.get(prefix)
        if not self._relay or gathering is None or token != gathering.token or site not in gathering.members:
            raise BadRecord(f"site {site[:20]} asks for the relay, and is not in a last meeting")
        room = self._rooms.get(prefix)
        if room is None or room.token != token:
            if room is not None:
                room.end()
            room = self._rooms[prefix] = Room(token, gathering.members)
        try:
            await room.serve(site, link, seconds)
        finally:
            if room.ended and self._rooms.get(prefix) is room:
                del self._rooms[prefix]

    def _gathering(self, prefix: str) -> Gathering:
        found = self._gatherings.setdefault(prefix, Gathering(self._relay))
        self._gatherings.move_to_end(prefix)
        idle = (name for name, each in self._gatherings.items() if not each.waiting and name != prefix)
        for name in list(idle)[: max(0, len(self._gatherings) - TRAININGS)]:
            del self._gatherings[name]
        if len(self._gatherings) > TRAININGS:
            del self._gatherings[prefix]
            raise BadRecord(f"{TRAININGS} trainings wait for sites already")
        return found

    async def _met(self, prefix: str, gathering: Gathering, arrival: Arrival, link: Connection) -> Answer | None:
        """Have a site wait for its meeting; a connection that ends meanwhile takes it back."""
        loop, key = asyncio.get_running_loop(), (prefix, arrival.id)
        if (earlier := self._answers.pop(key, None)) is not None:
            earlier.cancel()  # of a connection that was lost: the site asks again
        gathering.add(arrival)
        answer = self._answers[key] = loop.create_future()
        left = asyncio.ensure_future(link.receive(BYTES))
        timers = [loop.call_at(each + 1e-3, self._review, prefix, gathering) for each in gathering.deadlines(arrival)]
        try:
            self._review(prefix, gathering)
            await asyncio.wait({answer, left}, return_when=asyncio.FIRST_COMPLETED)
            return answer.result() if answer.done() and not answer.cancelled() else None
        finally:
            for timer in timers:
                timer.cancel()
            await _dropped(left)
            if self._answers.get(key) is answer:
                del self._answers[key]
                gathering.waiting.pop(arrival.id, None)
                self._review(prefix, gathering)

    def _review(self, prefix: str, gathering: Gathering) -> None:
        """Answer the sites whose wait is over."""
        for site, answer in gathering.review(asyncio.get_running_loop().time()).items():
            if (future := self._answers.get((prefix, site))) is not None and not future.done():
                future.set_result(answer)


async def _dropped(task: asyncio.Future[bytes]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, LinkError):
        await task


def refuse_open(host: str, secret: Secret) -> None:
    """Raise ValueError for an address that strangers may reach, without a secret."""
    if secret.text:
        return
    try:
        found = {each[4][0] for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise ValueError(f"{host} is no address of this host: {error}") from error
    addresses = [ipaddress.ip_address(str(each).partition("%")[0]) for each in found]
    if not all(_is_near(each) for each in addresses):
        raise ValueError(
            f"without a secret sites listen at loopback and private addresses alone; got {host}: give all sites and the "
            "rendezvous the same secret= or GRADWIRE_SECRET"
        )


def _is_near(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Return True for an address of this host or of a private network; a provider's NAT is shared by strangers."""
    plain = getattr(address, "ipv4_mapped", None) or address
    return not plain.is_unspecified and bool(plain.is_loopback or plain.is_private or plain.is_link_local)
