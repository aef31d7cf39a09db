"""`gradwire netlab`: run any command on hosts behind limited links."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from ...ranks.launchers import lab_here
from ...ranks.own_command import own_command
from ..link import parse_rate
from .check import check
from .config import NetlabConfig
from .hosts import clean
from .launcher import run_on_hosts

FEWEST_TO_CHECK = 2


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
