"""A connection between two processes that share a secret: frames with a keyed hash, over asyncio streams.

Both ends prove that they know the secret, and draw fresh keys from it and from two random numbers. Each frame carries its
length, its bytes and a keyed hash of a counter, the length and the bytes. So a frame that a stranger made, changed, repeated
or moved ends the connection. The bytes themselves are readable on the way, unless the secret has a pair for TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import secrets
import socket
import ssl
import struct
from collections import Counter
from collections.abc import Awaitable, Callable

from .secret import Secret

logger = logging.getLogger(__name__)
MAGIC = b"gradwire-sites-2"  # the protocol and its version
NONCE = TAG = 32  # bytes
FRAME = 1 << 20  # bytes of a frame at most: no end takes more memory before it has checked a hash
BUFFER = 1 << 18  # bytes that wait unread in a connection
LENGTH, COUNTER = struct.Struct(">I"), struct.Struct(">Q")
HANDSHAKE = 10.0  # seconds in which a new connection has to prove itself
STRANGERS = 512  # connections that have not yet; one from the network with the most makes room for the next
NETWORKS = {4: 24, 6: 64}  # bits of an address that are its network's: a host gets any address of its /64 at will
REFUSED = bytes(TAG)  # in place of a listener's proof, to a dialer whose proof is wrong
MEMBERS = 1 << 14  # connections that have: of each rank of each site
PAUSE = 0.5  # seconds after which accepting is tried again
NEXT_ADDRESS = 0.5  # seconds after which the next address of a host name is tried, beside the ones before
SILENCE = 60.0  # seconds at least after which a connection to a host that has vanished ends


class LinkError(RuntimeError):
    """A connection was lost, or its other end does not speak as a site does."""


class NotProven(LinkError):
    """The other end has another secret, or is no end of gradwire's."""


class Connection:
    """A connection whose ends have proven themselves.

    `peer`: the other end's name, for messages. `sent_bytes`: of frames, so far.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sending: bytes, receiving: bytes, peer: str
    ) -> None:
        self._reader, self._writer, self.peer = reader, writer, peer
        self._sending, self._receiving = sending, receiving
        self._sent = self._received = 0
        self.sent_bytes = 0

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
        self.sent_bytes += len(head) + len(body) + len(tag)
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


async def dial(host: str, port: int, secret: Secret, peer: str, patience: float = HANDSHAKE) -> Connection:
    """Connect to a listener. Raises LinkError where that fails, NotProven where the secrets differ.

    `peer`: its name without its address. Of a host name's addresses another one is tried while one does not answer.
    """
    known = f"{peer} at {shown(host, port)}"
    try:
        opening = asyncio.open_connection(
            host, port, limit=BUFFER, ssl=secret.dialing, happy_eyeballs_delay=min(NEXT_ADDRESS, patience / 4)
        )
        reader, writer = await asyncio.wait_for(opening, patience)
        _set_socket_options(writer, patience)
    except ssl.SSLCertVerificationError as error:
        raise NotProven(f"{known} has another certificate: give all sites the same file. {error}") from error
    except (OSError, asyncio.TimeoutError) as error:
        hint = ", or has a secret without a certificate" if secret.pair else ""
        raise LinkError(f"{known} does not answer{hint}: {error or 'no answer in time'}") from error
    try:
        return await asyncio.wait_for(_proven(reader, writer, secret.key, known, dials=True), min(patience, HANDSHAKE))
    except BaseException as error:
        writer.transport.abort()
        if isinstance(error, asyncio.TimeoutError):
            raise LinkError(f"{known} did not answer within {patience:g} s") from error
        raise


def shown(host: str, port: int) -> str:
    """Return an address as users write it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _set_socket_options(writer: asyncio.StreamWriter, patience: float) -> None:
    """Have the system send small frames at once, probe an idle connection, and end one that is silent too long.

    The other end may be silent for `patience` seconds, and for SILENCE at least.
    """
    here, seconds = writer.get_extra_info("socket"), int(max(patience, SILENCE))
    here.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
    )  # asyncio does so only for sockets that name TCP as their protocol; accepted ones do not
    here.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 1000 * seconds}
    for name, value in options.items():
        if hasattr(socket, name):  # not in every system
            here.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def _proven(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, peer: str, *, dials: bool
) -> Connection:
    """Prove the secret to the other end, and have it prove the secret.

    The end that dials proves first: a listener shows strangers nothing.
    """
    mine = secrets.token_bytes(NONCE)
    if dials:
        writer.write(MAGIC + mine)
    try:
        found = await _exactly(reader, len(MAGIC), peer)
    except LinkError as error:
        hint = " before it has said anything; it may have a secret with a certificate" if dials else ""
        raise LinkError(f"{error}{hint}") from error
    if found != MAGIC:
        raise NotProven(
            f"{peer} is no site, another release of gradwire, or has a secret with a certificate: it begins with {found!r}, "
            f"not {MAGIC!r}"
        )
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
    return Connection(reader, writer, *((there, back) if dials else (back, there)), peer)


class Listener:
    """Accept connections, and hand those that prove the secret to `serve`, which owns them from then on.

    `patience`: seconds for which a member may take no bytes.
    """

    def __init__(
        self, secret: Secret, serve: Callable[[Connection], Awaitable[None]], patience: float = SILENCE
    ) -> None:
        self._key, self._tls = secret.key, secret.listening
        self._serve, self._patience, self._members = serve, patience, 0
        self._strangers: dict[asyncio.Task[None], str] = {}  # to their networks
        self._accepting: list[asyncio.Task[None]] = []

    async def open(self, host: str, port: int) -> int:
        """Listen at an address, and return the port; 0 takes a free one."""
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for family, place in {family: place for family, *_, place in reversed(found)}.items():
            listening = socket.create_server((place[0], port), family=family, backlog=1024)
            listening.setblocking(False)
            port = listening.getsockname()[1]
            self._accepting.append(asyncio.ensure_future(self._accept(listening)))
        return port

    def close(self) -> None:
        """Stop listening; connections that have proven themselves stay."""
        for task in [*self._accepting, *self._strangers]:
            task.cancel()

    async def _accept(self, listening: socket.socket) -> None:
        """Count each connection before anything is read from it, TLS included: nobody has more than its share."""
        with contextlib.closing(listening):
            while True:
                try:
                    accepted, address = await asyncio.get_running_loop().sock_accept(listening)
                except OSError as error:  # of too many open files
                    logger.warning("no connection can be accepted, tried again in %.1f s: %s", PAUSE, error)
                    if self._strangers:
                        self._make_room()
                    await asyncio.sleep(PAUSE)
                    continue
                if len(self._strangers) >= STRANGERS:
                    self._make_room()
                task = asyncio.ensure_future(self._admit(accepted, f"the peer at {address}"))
                self._strangers[task] = network_of(str(address[0]))
                task.add_done_callback(lambda done: self._strangers.pop(done, None))
                await asyncio.sleep(0)  # it begins, and owns the socket

    def _make_room(self) -> None:
        """Close any of the unproven connections from a network that has the most: strangers do not choose which."""
        counts = Counter(self._strangers.values())
        most = max(counts.values())
        task = secrets.choice([each for each, network in self._strangers.items() if counts[network] == most])
        del self._strangers[task]
        task.cancel()

    async def _admit(self, accepted: socket.socket, peer: str) -> None:
        """Serve a connection once it has proven itself."""
        task = asyncio.current_task()
        try:
            link = await asyncio.wait_for(self._proof(accepted, peer), HANDSHAKE)
        except (LinkError, OSError, asyncio.TimeoutError) as error:
            logger.debug("a connection was refused: %s", error)
            return
        if task is not None:
            self._strangers.pop(task, None)
        if self._members >= MEMBERS:
            return link.close()
        self._members += 1
        try:
            await self._serve(link)
        except RuntimeError as error:  # of a lost connection, or a message that cannot be
            logger.debug("a connection was closed: %s", error)
            link.close()
        except BaseException:  # the listener's loop ends, and the other end has to see it
            link.close()
            raise
        finally:
            self._members -= 1

    async def _proof(self, accepted: socket.socket, peer: str) -> Connection:
        reader, writer = await _streams(accepted, self._tls)
        try:
            _set_socket_options(writer, self._patience)
            return await _proven(reader, writer, self._key, peer, dials=False)
        except BaseException:
            writer.transport.abort()
            raise


def network_of(address: str) -> str:
    """Return the network of an address: what one stranger may have all addresses of.

    >>> network_of("203.0.113.7"), network_of("2001:db8:1:2::7"), network_of("::ffff:203.0.113.7")
    ('203.0.113.0/24', '2001:db8:1:2::/64', '203.0.113.0/24')
    """
    found = ipaddress.ip_address(address.partition("%")[0])
    plain = getattr(found, "ipv4_mapped", None) or found
    return str(ipaddress.ip_network((plain, NETWORKS[plain.version]), strict=False))


async def _streams(
    accepted: socket.socket, tls: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit=BUFFER)
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.connect_accepted_socket(lambda: protocol, accepted, ssl=tls)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)
