"""A connection between two processes that share a secret: frames with a keyed hash, over asyncio streams.

Both ends prove that they know the secret, and draw fresh keys from it and from two random numbers. Each frame carries its
length, its bytes and a keyed hash of a counter, the length and the bytes. So a frame that a stranger made, changed, repeated
or moved ends the connection. The bytes themselves are readable on the way.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)
MAGIC = b"gradwire-sites-1"  # the protocol and its version
NONCE = TAG = 32  # bytes
FRAME = 1 << 20  # bytes of a frame at most: no end takes more memory before it has checked a hash
BUFFER = 1 << 18  # bytes that wait unread in a connection
LENGTH, COUNTER = struct.Struct(">I"), struct.Struct(">Q")
HANDSHAKE = 10.0  # seconds in which a new connection has to prove itself
STRANGERS = 64  # connections that have not yet; one from the address with the most makes room for the next
REFUSED = bytes(TAG)  # in place of a listener's proof, to a dialer whose proof is wrong
MEMBERS = 2048  # connections that have
SILENCE = 60.0  # seconds at least after which a connection to a host that has vanished ends


class LinkError(RuntimeError):
    """A connection was lost, or its other end does not speak as a site does."""


class NotProven(LinkError):
    """The other end has another secret, or is no end of gradwire's."""


def key_of(secret: str) -> bytes:
    """Return the key that proves a secret; without a secret everybody knows it."""
    return hashlib.sha256(b"gradwire sites\0" + secret.encode()).digest()


class Link:
    """A connection whose ends have proven themselves. `peer`: the other end's name, for messages."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sending: bytes, receiving: bytes, peer: str
    ) -> None:
        self._reader, self._writer, self.peer = reader, writer, peer
        self._sending, self._receiving = sending, receiving
        self._sent = self._received = 0

    @property
    def own_address(self) -> str:
        """The address of this end."""
        return str(self._writer.get_extra_info("sockname")[0])

    async def send(self, body: bytes) -> None:
        """Send one frame, of at most FRAME bytes."""
        assert len(body) <= FRAME
        head = LENGTH.pack(len(body))
        tag = _tag(self._sending, self._sent, head, body)
        self._sent += 1
        try:
            self._writer.write(head + body + tag)
            await self._writer.drain()
        except OSError as error:
            raise LinkError(f"the connection to {self.peer} was lost: {error}") from error

    async def receive(self, most: int = FRAME) -> bytes:
        """Return the next frame. Raises LinkError for one of more than `most` bytes, before it takes memory for it."""
        head = await _exactly(self._reader, LENGTH.size, self.peer)
        (length,) = LENGTH.unpack(head)
        if length > most:
            self.close()
            raise LinkError(f"{self.peer} announces {length} bytes where at most {most} are allowed")
        body = await _exactly(self._reader, length, self.peer)
        tag = await _exactly(self._reader, TAG, self.peer)
        if not hmac.compare_digest(tag, _tag(self._receiving, self._received, head, body)):
            self.close()
            raise LinkError(f"a frame from {self.peer} was forged, changed or repeated on its way")
        self._received += 1
        return body

    def close(self) -> None:
        """Close the connection, without waiting for bytes that are on their way."""
        self._writer.transport.abort()

    async def end(self) -> None:
        """Close the connection once all bytes have been sent."""
        self._writer.close()
        try:
            await asyncio.wait_for(self._writer.wait_closed(), HANDSHAKE)
        except (OSError, asyncio.TimeoutError):
            self.close()


def _tag(key: bytes, counter: int, head: bytes, body: bytes) -> bytes:
    made = hmac.new(key, COUNTER.pack(counter) + head, "sha256")
    made.update(body)
    return made.digest()


async def _exactly(reader: asyncio.StreamReader, size: int, peer: str) -> bytes:
    try:
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, OSError) as error:
        raise LinkError(f"{peer} closed the connection") from error


async def dial(host: str, port: int, key: bytes, peer: str, patience: float = HANDSHAKE) -> Link:
    """Connect to a listener. Raises LinkError where that fails, NotProven where the secrets differ."""
    try:
        opening = asyncio.open_connection(host, port, limit=BUFFER)
        reader, writer = await asyncio.wait_for(opening, patience)
        _keep_alive(writer, patience)
    except (OSError, asyncio.TimeoutError) as error:
        raise LinkError(f"{peer} does not answer at {host}:{port}: {error or 'no answer in time'}") from error
    try:
        return await asyncio.wait_for(_proven(reader, writer, key, peer, dials=True), min(patience, HANDSHAKE))
    except BaseException as error:
        writer.transport.abort()
        if isinstance(error, asyncio.TimeoutError):
            raise LinkError(f"{peer} at {host}:{port} did not answer within {patience:g} s") from error
        raise


def _keep_alive(writer: asyncio.StreamWriter, patience: float) -> None:
    """Have the system probe an idle connection, and end one whose other end is silent for so long, or SILENCE."""
    here, seconds = writer.get_extra_info("socket"), int(max(patience, SILENCE))
    here.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 1000 * seconds}
    for name, value in options.items():
        if hasattr(socket, name):  # not in every system
            here.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def _proven(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, peer: str, *, dials: bool
) -> Link:
    """Prove the secret to the other end, and have it prove the secret.

    The end that dials proves first: a listener shows strangers nothing.
    """
    mine = secrets.token_bytes(NONCE)
    if dials:
        writer.write(MAGIC + mine)
    if (found := await _exactly(reader, len(MAGIC), peer)) != MAGIC:
        raise NotProven(f"{peer} is no site or another release of gradwire: it begins with {found!r}, not {MAGIC!r}")
    theirs = await _exactly(reader, NONCE, peer)
    if not dials:
        writer.write(MAGIC + mine)
    both = mine + theirs if dials else theirs + mine
    dialer, listener = (hmac.digest(key, role + both, "sha256") for role in (b"dialer", b"listener"))
    if dials:
        writer.write(dialer)
    proof = await _exactly(reader, TAG, peer)
    if dials and proof == REFUSED:
        raise NotProven(f"{peer} does not accept this site's secret: give all sites the same one")
    if not hmac.compare_digest(proof, listener if dials else dialer):
        if not dials:
            writer.write(REFUSED)
        raise NotProven(f"{peer} has another secret: give all sites the same one")
    if not dials:
        writer.write(listener)
    ways = (hmac.digest(key, role + both, "sha256") for role in (b"to listener", b"to dialer"))
    there, back = ways
    return Link(reader, writer, *((there, back) if dials else (back, there)), peer)


class Listener:
    """Accept connections, and hand those that prove the secret to `serve`, which owns them from then on.

    `patience`: seconds for which a member may take no bytes.
    """

    def __init__(self, key: bytes, serve: Callable[[Link], Awaitable[None]], patience: float = SILENCE) -> None:
        self._key, self._serve, self._patience, self._members = key, serve, patience, 0
        self._strangers: dict[asyncio.StreamWriter, str] = {}  # to their addresses
        self._server: asyncio.Server | None = None

    async def open(self, host: str, port: int) -> int:
        """Listen at an address, and return the port; 0 takes a free one."""
        self._server = await asyncio.start_server(self._accept, host, port, limit=BUFFER, backlog=1024)
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Stop listening; connections that have proven themselves stay."""
        if self._server is not None:
            self._server.close()
        for writer in self._strangers:
            writer.transport.abort()

    def _make_room(self) -> None:
        """Close any of the unproven connections from the address that has the most: strangers do not choose which."""
        ((busiest, _),) = Counter(self._strangers.values()).most_common(1)
        writer = secrets.choice([each for each, address in self._strangers.items() if address == busiest])
        del self._strangers[writer]
        writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._strangers) >= STRANGERS:
            self._make_room()
        self._strangers[writer] = str((writer.get_extra_info("peername") or [""])[0])
        peer = f"the peer at {writer.get_extra_info('peername')}"
        try:
            _keep_alive(writer, self._patience)
            link = await asyncio.wait_for(_proven(reader, writer, self._key, peer, dials=False), HANDSHAKE)
        except (LinkError, OSError, asyncio.TimeoutError) as error:
            logger.debug("a connection was refused: %s", error)
            writer.transport.abort()
            return
        finally:
            self._strangers.pop(writer, None)
        if self._members >= MEMBERS:
            return link.close()
        self._members += 1
        try:
            await self._serve(link)
        except RuntimeError as error:  # of a lost connection, or a message that cannot be
            logger.debug("a connection was closed: %s", error)
            link.close()
        finally:
            self._members -= 1
