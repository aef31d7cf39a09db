"""`gradwire netlab`: run any command on hosts behind limited links, or check what the links carry."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from ....compress.protocol.requests import AllReduce
from ....ddp_core import start_sum
from ...ranks.group import joined
from ...ranks.launchers import lab_here
from ...ranks.own_command import own_command
from ..link import BITS_PER_BYTE, parse_rate
from .config import NetlabConfig
from .hosts import clean
from .launcher import run_on_hosts

FEWEST_TO_CHECK = 2
CHECK_SECONDS = 1.0  # that an all-reduce is to take
MOST_BYTES = 256 * 2**20
REPEATS = 5  # of which the fastest counts: other work on this machine can only delay
CHECK_TIMEOUT = timedelta(seconds=120)
PAYLOAD_SHARE = 1448 / 1514  # of an Ethernet frame: what is left of it by its header, IP's and TCP's with timestamps
TOLERANCE = 0.1
MBIT = 10**6


@dataclass(frozen=True)
class NetlabCommandConfig(NetlabConfig):
    """Run a command on every rank of a network that is made for it, with the variables that torchrun sets."""

    check: bool = False
    """measure the bandwidth of the links instead of running a command"""
    clean: bool = False
    """remove the hosts that killed labs left behind, and run no command"""
    command: list[str] = field(default_factory=list)
    """command to run on each host, after --"""


def netlab_command(config: NetlabCommandConfig) -> int:
    """Run it; the exit code: that of the first rank that failed, else 0."""
    if config.clean:
        gone = clean()
        print(f"removed the labs of {', '.join(map(str, gone))}" if gone else "nothing was left behind")
        return 0
    if config.check == bool(config.command):
        raise ValueError("give a command behind --, or --check: gradwire netlab --hosts 4 --rate 100mbit -- COMMAND")
    if not config.check:
        print(f"netlab: {config.described}", file=sys.stderr)
        return run_on_hosts(config, config.command)
    if config.ranks_per_host > 1:
        raise ValueError(
            f"--check measures links with one rank behind each, got --ranks-per-host {config.ranks_per_host}"
        )
    if config.hosts < FEWEST_TO_CHECK or not parse_rate(config.rate):
        raise ValueError(f"--check needs two hosts and a rate, got {config.described}")
    if lab_here() is not None:
        return check(config)
    arguments = ["netlab", "--check", f"--hosts={config.hosts}", f"--rate={config.rate}"]
    return run_on_hosts(config, own_command(*arguments))


def check(config: NetlabConfig) -> int:
    """Measure a large all-reduce of torch's on this rank of the lab; rank 0 tells. The exit code: 1 where the rate is more
    than 10 % off.
    """
    torch.set_num_threads(1)
    rate = parse_rate(config.rate)
    share = 2 * (config.hosts - 1) / config.hosts  # of the buffer, that each rank sends in a ring
    buffer = torch.zeros(round(min(MOST_BYTES, CHECK_SECONDS * rate / share)) // 4)
    with joined("gloo", CHECK_TIMEOUT) as group:
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
