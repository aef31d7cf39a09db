"""The line of a site to the internet, on a clock that may be simulated: rates up and down, and delay.

A site dials the proxy in place of the rendezvous, which relays. Bytes of all its connections share the line. TCP itself sees
a host without delay. `gradwire netlab --delay` has real connections, in real time.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

CHUNK = 16384  # bytes that travel together
LOOK = 0.02  # seconds between two looks at a direction that is cut
QUEUE = 0.1  # seconds of bytes that wait in front of a line: without any, each late timer would make it slower


@dataclass
class Direction:
    """One direction of a line. `rate`: bytes per second; `delay`: seconds.

    `cut`: nothing passes as long as it is True. `held`: bytes that a cut has held up so far.
    """

    rate: float
    delay: float = 0.0
    cut: bool = False
    held: int = 0
    _free: float = 0.0

    def leaves(self, size: int, now: float) -> tuple[float, float]:
        """Return when bytes have left the near end, at the line's rate, and when they are at the far end."""
        self._free = max(self._free, now) + size / self.rate
        return self._free, self._free + self.delay


class Wan:
    """A proxy for the connections of one site to an address. `open` and `close` run on an asyncio loop."""

    def __init__(self, host: str, port: int, up: Direction, down: Direction) -> None:
        self._to, self.up, self.down = (host, port), up, down
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> int:
        """Listen at a free port of 127.0.0.1, and return it."""
        self._server = await asyncio.start_server(self._joined, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        """Close the port and all connections."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _joined(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        ends = [writer]
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._to)
            ends.append(far_writer)
            await asyncio.sleep(self.up.delay + self.down.delay)  # of TCP's handshake, whose ends are near here
            await asyncio.gather(_pass(reader, far_writer, self.up), _pass(far_reader, writer, self.down))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            for end in ends:
                end.transport.abort()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: Direction) -> None:
    """Pass bytes on in order, each when the line has carried it; the end of the bytes, too."""
    waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
    delivering = asyncio.ensure_future(_deliver(waiting, writer, line))
    loop = asyncio.get_running_loop()
    try:
        while chunk := await reader.read(CHUNK):
            left, arrives = line.leaves(len(chunk), loop.time())
            await asyncio.sleep(left - QUEUE - loop.time())
            waiting.put_nowait((arrives, chunk))
        waiting.put_nowait((loop.time() + line.delay, b""))
        await delivering
    finally:
        delivering.cancel()


async def _deliver(waiting: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter, line: Direction) -> None:
    while True:
        arrives, chunk = await waiting.get()
        await asyncio.sleep(arrives - asyncio.get_running_loop().time())
        line.held += len(chunk) if line.cut else 0
        while line.cut:
            await asyncio.sleep(LOOK)
        if not chunk:
            with contextlib.suppress(OSError):
                writer.write_eof()
            return
        writer.write(chunk)
        await writer.drain()
