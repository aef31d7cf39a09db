"""Whether the links carry what they are set to: one large all-reduce of torch's, without any of our own code."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from ....compress.protocol.requests import AllReduce
from ....ddp_core import start_sum
from ...ranks.group import joined
from ..link import BITS_PER_BYTE, parse_rate
from .config import NetlabConfig

SECONDS = 1.0  # that an all-reduce is to take
MOST_BYTES = 256 * 2**20
REPEATS = 5  # of which the fastest counts: other work on this machine can only delay
TIMEOUT = timedelta(seconds=120)
PAYLOAD_SHARE = 1448 / 1514  # of an Ethernet frame: what is left of it by its header, IP's and TCP's with timestamps
TOLERANCE = 0.1
MBIT = 10**6


def check(config: NetlabConfig) -> int:
    """Measure on this rank of the lab; rank 0 tells. The exit code: 1 where the rate is more than 10 % off."""
    torch.set_num_threads(1)
    rate = parse_rate(config.rate)
    share = 2 * (config.hosts - 1) / config.hosts  # of the buffer, that each rank sends in a ring
    buffer = torch.zeros(round(min(MOST_BYTES, SECONDS * rate / share)) // 4)
    with joined("gloo", TIMEOUT) as group:
        _seconds(buffer[: buffer.numel() // 10], group)  # opens connections and their windows
        seconds = min(_seconds(buffer, group) for _ in range(REPEATS))
        sent = AllReduce(buffer).sent_bytes(group.size())
        return report_rate(sent / seconds, rate, config) if group.rank() == 0 else 0


def _seconds(buffer: torch.Tensor, group: dist.ProcessGroup) -> float:
    began = time.perf_counter()
    start_sum(buffer, group).wait()
    return time.perf_counter() - began


def report_rate(payload: float, rate: float, config: NetlabConfig) -> int:
    """Print what was reached of a rate, both in bytes a second; the exit code."""
    frames = payload / PAYLOAD_SHARE
    print(f"{config.described}, Gloo's ring all-reduce, fastest of {REPEATS}; Mbit/s that each host sends and receives")
    print(f"set            {rate * BITS_PER_BYTE / MBIT:8.1f}   in Ethernet frames, as tc counts")
    print(
        f"reached        {frames * BITS_PER_BYTE / MBIT:8.1f}   in Ethernet frames, {frames / rate:.1%} of the set rate"
    )
    print(
        f"payload        {payload * BITS_PER_BYTE / MBIT:8.1f}   {payload / rate:.1%}; full frames carry {PAYLOAD_SHARE:.1%}"
    )
    return int(abs(payload / rate - 1) > TOLERANCE)
