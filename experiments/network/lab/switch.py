"""A switch between the hosts of a lab, in user space: packets wait for their delay, and some are lost.

It needs no netem, which many kernels lack. Packet sockets at the near ends of the links take the packets that hosts have
sent at their rate up, and pass them to the queue that has the other host's rate down.
"""

from __future__ import annotations

import errno
import heapq
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from random import Random
from select import select
from threading import Event

from .beside import beside
from .config import NetlabConfig, parse_share, parse_time

SOL_PACKET, STATISTICS, HEADERS, IGNORE_OUTGOING = 263, 6, 15, 23  # of linux/if_packet.h
SEND_BUFFER, RECEIVE_BUFFER = 32, 33  # SO_SNDBUFFORCE and SO_RCVBUFFORCE, which exceed the host's limits
ALL_PROTOCOLS = 3
TO, FROM = slice(10, 16), slice(16, 22)  # addresses of a frame, behind the kernel's header about checksum and segments
LARGEST = 66_000  # bytes of a frame that the network card of a real host would cut into packets
IN_TURN = 64  # frames of a host before those of the next
READ_AT_ONCE = 2**23  # bytes of the packets that come while this host does something else
SENT_AT_ONCE = 2**29  # bytes, more than a link's queue holds
POLL_SECONDS = 0.05
FULL = (errno.ENOBUFS, errno.EAGAIN)


def delays(config: NetlabConfig) -> bool:
    """Return True if packets wait or get lost."""
    return any((parse_time(config.delay), parse_time(config.jitter), parse_share(config.loss)))


@contextmanager
def switched(config: NetlabConfig, ports: Sequence[str]) -> Iterator[None]:
    """Pass packets between interfaces in a thread while the block lasts; then warn of packets that this host missed."""
    with ExitStack() as stack:
        links = [stack.enter_context(_opened(port)) for port in ports]
        stack.callback(_warn_of_missed, links)
        stack.enter_context(beside(partial(_work, config, links), "gradwire-switch"))
        yield


def _warn_of_missed(links: Sequence[socket.socket]) -> None:
    counts = (link.getsockopt(SOL_PACKET, STATISTICS, 8)[4:] for link in links)
    if missed := sum(int.from_bytes(each, sys.byteorder) for each in counts):
        print(
            f"netlab: this host was too slow for {missed:,} packets, which were lost: use lower rates or fewer "
            "hosts, or leave out the loss, since packets then travel in larger pieces",
            file=sys.stderr,
        )


def _opened(port: str) -> socket.socket:
    try:
        link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    except PermissionError as error:
        raise ValueError(
            "delay, jitter and loss of a lab need packet sockets, which this container refuses: grant the capability "
            "NET_RAW (docker run --cap-add NET_RAW), or leave them out"
        ) from error
    try:
        link.setsockopt(SOL_PACKET, HEADERS, 1)
        link.setsockopt(SOL_PACKET, IGNORE_OUTGOING, 1)
        link.setsockopt(socket.SOL_SOCKET, RECEIVE_BUFFER, READ_AT_ONCE)
        link.setsockopt(socket.SOL_SOCKET, SEND_BUFFER, SENT_AT_ONCE)
        link.bind((port, ALL_PROTOCOLS))
    except OSError as error:
        link.close()
        raise ValueError(
            f"this kernel lacks an option of packet sockets ({error}): leave out delay, jitter and loss, or take a newer one"
        ) from error
    link.setblocking(False)
    return link


def _work(config: NetlabConfig, links: Sequence[socket.socket], stop: Event) -> None:
    """Pass packets on until `stop`. After a failure, end the lab: its ranks would wait for ever."""
    try:
        _pass(config, links, stop)
    except OSError as error:
        os.kill(os.getpid(), signal.SIGTERM)
        raise ValueError(f"the network of the lab broke: {error}. Start the command again") from error


def _pass(config: NetlabConfig, links: Sequence[socket.socket], stop: Event) -> None:
    """Pass packets on until `stop`. Draws depend on a host and the number of its packet alone."""
    delay, jitter, loss = 2 * parse_time(config.delay), parse_time(config.jitter), parse_share(config.loss)
    draws = {link: Random(host).random for host, link in enumerate(links)}
    arrivals = dict.fromkeys(links, 0.0)
    owners: dict[bytes, socket.socket] = {}  # by address, as their packets show it
    waiting: list[tuple[float, int, bytes, list[socket.socket]]] = []
    numbers = count()
    while not stop.is_set():
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else POLL_SECONDS
        for link in select(links, (), (), min(pause, POLL_SECONDS))[0]:
            for frame in _received(link):
                draw = draws[link]  # two links are on the way: the sender's and the receiver's
                lost, late = (draw() < loss) + (draw() < loss), jitter * (draw() + draw())
                if lost:
                    continue
                owners[frame[FROM]] = link
                arrivals[link] = max(arrivals[link], time.monotonic() + delay + late)
                owner = owners.get(frame[TO])
                others = [other for other in links if other is not link] if owner is None else [owner]
                heapq.heappush(waiting, (arrivals[link], next(numbers), frame, others))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, frame, others = heapq.heappop(waiting)
            for other in others:
                _send(other, frame)


def _received(link: socket.socket) -> Iterator[bytes]:
    for _ in range(IN_TURN):
        try:
            yield link.recv(LARGEST)
        except BlockingIOError:
            return


def _send(link: socket.socket, frame: bytes) -> None:
    try:
        link.send(frame)
    except OSError as error:
        if error.errno not in FULL:  # a full queue loses packets, as a router's does
            raise
