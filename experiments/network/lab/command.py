"""`gradwire netlab`: run any command on hosts behind limited links."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from .config import NetlabConfig
from .hosts import clean
from .launcher import run_on_hosts


@dataclass(frozen=True)
class NetlabCommandConfig(NetlabConfig):
    """Run a command on every rank of a network that is made for it, with the variables that torchrun sets."""

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
    if not config.command:
        raise ValueError("give a command behind --: gradwire netlab --hosts 4 --rate 100mbit -- COMMAND")
    print(f"netlab: {config.described}", file=sys.stderr)
    return run_on_hosts(config, config.command)
