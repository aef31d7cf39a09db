"""The rates at which each host's link sends and receives: homes and clouds often have one slower direction."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...compress.protocol.requests import Gather, Scatter
from ...ddp_core import ask
from .rank_group import RankGroup

MOST = 32  # hosts: more would take too long
SECONDS = 0.1  # of a transfer, about
LARGEST = 2**24  # bytes of one
REPEATS = 2
SLOW = 0.8  # times an ordinary link: a direction that is slower is named


@dataclass(frozen=True)
class HostLink:
    """The rates of a host's link while nothing else uses it, in bytes per second. `rank`: the first of the host."""

    host: str
    rank: int
    sends: float
    receives: float


def host_links(here: RankGroup, seconds_a_byte: float) -> list[HostLink]:
    """Return the link of each host; none if all ranks share one host, or hosts are too many. A collective call.

    One host at a time sends to all others, then receives from all; `seconds_a_byte` of the network tells how much.
    """
    if here.one_host or here.ranks.hosts > MOST:
        return []
    size = min(LARGEST, int(SECONDS / seconds_a_byte) if seconds_a_byte else LARGEST)
    row = torch.zeros(
        max(1, size // (here.ranks.world_size - here.ranks.per_host)), dtype=torch.uint8, device=here.device
    )
    names = here.gather(socket.gethostname())
    roots = range(0, here.ranks.world_size, here.ranks.per_host)
    return [HostLink(names[root], root, _rate(here, row, root, True), _rate(here, row, root, False)) for root in roots]


def described(links: Sequence[HostLink]) -> Iterator[str]:
    """In words: one line where all are alike, else one for each that is slow in a direction."""
    if not links:
        return
    sends, receives = [link.sends for link in links], [link.receives for link in links]
    slowest, fastest = min(*sends, *receives), max(*sends, *receives)
    if len(links) == 2:  # what one sends is what the other receives
        slow = []
        if slowest < SLOW * fastest:
            one, other = sorted(links, key=lambda link: link.sends)
            rates = f"{_gbit(one.sends)}, back {_gbit(other.sends)}"
            slow = [f"link from {_named(one)} to {_named(other)}: {rates}: every step waits for the slower"]
    else:
        slow = [*_slow(links, "sends", sends, receives), *_slow(links, "receives", receives, sends)]
    yield from slow or [f"links: each host sends and receives {_gbit(slowest)} to {_gbit(fastest)}"]


def _slow(links: Sequence[HostLink], does: str, rates: Sequence[float], opposite: Sequence[float]) -> list[str]:
    """Each that is slow for itself, not because another one is slow in the `opposite` direction: each carries its part."""
    ordinary = max(statistics.median_high(rates), statistics.median_high(opposite))
    others = [min(rate for at, rate in enumerate(opposite) if at != place) for place in range(len(links))]
    return [
        f"link of {_named(link)} {does} {_gbit(rate)}, an ordinary one {_gbit(ordinary)}: every step waits for the slowest"
        for link, rate, other in zip(links, rates, others, strict=True)
        if rate < SLOW * min(ordinary, (len(links) - 1) * other)
    ]


def _named(link: HostLink) -> str:
    return f"{link.host} (rank {link.rank})"


def _rate(here: RankGroup, row: torch.Tensor, root: int, outward: bool) -> float:
    """Bytes a second between a root and the ranks of other hosts; the rows of its own host go along, by other ways."""
    fastest = min(_seconds(here, row, root, outward) for _ in range(REPEATS))
    return row.nbytes * (here.ranks.world_size - here.ranks.per_host) / fastest


def _seconds(here: RankGroup, row: torch.Tensor, root: int, outward: bool) -> float:
    """Until the last rank is done."""
    dist.barrier(here.group)
    began = time.perf_counter()
    request = Scatter(row.expand(here.ranks.world_size, -1), root) if outward else Gather(row, root)
    ask(request, here.messages, what="the tensors of the root")
    if here.device.type == "cuda":
        torch.cuda.synchronize(here.device)
    slowest: float = max(here.gather(time.perf_counter() - began))
    return slowest


def _gbit(rate: float) -> str:
    return f"{8 * rate / 1e9:.3g} Gbit/s"
