"""Hosts, made and removed with iproute2: a bridge, and for each host a network namespace behind a limited virtual cable.

Where packets wait or get lost, a switch in user space (`switch`) takes the place of the bridge.

All that a lab makes has its owner's process id in its name, and a file in `OWNERS` that the owner keeps locked: what
belongs to an unlocked one was left by a process that is gone, however it ended, and is removed when the next lab starts.
Nothing else is ever touched.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from ..link import parse_rate
from .config import NetlabConfig, parse_share
from .switch import delays, switched

OWNERS = Path("/run/gradwire-netlab")
NAMESPACES = Path("/var/run/netns")  # where `ip netns` keeps them
INTERFACES = Path("/sys/class/net")
BENCHMARKING = IPv4Network("198.18.0.0/15")  # set aside for tests of networks by RFC 2544
WIRE = "wire"  # the interface that every host sees
QUEUE = "200ms"
TOOLS = ("ip", "tc")
INSTEAD = "or emulate the link in user space: gradwire compare --link 100mbit"
BURST_SECONDS, SMALLEST_BURST = 0.002, 16 * 1024  # what may pass at once after a silence, in seconds of the rate, bytes


class NetlabError(ValueError):
    """There can be no lab here; the message has the reason and what to do instead."""


def require() -> None:
    """Raise NetlabError where no lab can be made."""
    if sys.platform != "linux":
        raise NetlabError(f"hosts are network namespaces, which only Linux has: run this there, {INSTEAD}")
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise NetlabError(f"{' and '.join(missing)} not found: install iproute2 (apt install iproute2), {INSTEAD}")
    if os.geteuid() != 0:
        script = Path(sys.executable).with_name("gradwire")  # `-m` would look for modules in the current folder first
        again = f"sudo -E {script if script.exists() else f'{sys.executable} -m gradwire'} {shlex.join(sys.argv[1:])}"
        raise NetlabError(f"network namespaces can be made by root only: {again}; {INSTEAD}")


def run(*words: str) -> str:
    """Run a command of iproute2; what it prints. Raises NetlabError with what it says where it fails."""
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise NetlabError(
            f"`{shlex.join(words)}` failed: {said}. A container needs the capabilities NET_ADMIN and SYS_ADMIN; "
            f"grant them, {INSTEAD}"
        )
    return done.stdout


@dataclass(frozen=True)
class Lab:
    """Names and addresses of the hosts of the process `owner`, counted from 0."""

    owner: int
    hosts: int
    subnet: IPv4Network

    @property
    def bridge(self) -> str:
        """The interface that joins all links, where no switch does."""
        return f"gwl{self.owner}b"

    def namespace(self, host: int) -> str:
        """The network namespace of a host."""
        return f"gradwire-{self.owner}-{host}"

    def port(self, host: int) -> str:
        """The near end of a host's link, at the bridge or the switch."""
        return f"gwl{self.owner}v{host}"

    def address(self, host: int) -> IPv4Address:
        """Return the address at which the other hosts find a host."""
        return self.subnet[host + 1]


@contextmanager
def temporary_lab(config: NetlabConfig) -> Iterator[Lab]:
    """A lab, for as long as the block lasts; first removes what dead owners have left. NetlabError where it cannot be."""
    require()
    with _owner() as owner:
        lab = Lab(owner, config.hosts, free_subnet())
        _build(lab, config)
        with switched(config, [lab.port(host) for host in range(lab.hosts)]) if delays(config) else nullcontext():
            yield lab


@contextmanager
def _owner() -> Iterator[int]:
    """This process's id, marked as that of a living owner; at the end, all that it has made is removed."""
    mine = OWNERS / str(os.getpid())
    with _alone():
        _clean()
        if mine.exists():
            raise NetlabError("this process has a lab already; one at a time")
        if foreign := left_by(os.getpid()):
            raise NetlabError(
                f"there is {', '.join(foreign)} already, by a process {os.getpid()} of another container: start again, "
                "for another process id; `ip link del` and `ip netns del` remove unused ones"
            )
        file = mine.open("w")  # closed on exec: no child keeps the lock
        fcntl.flock(file, fcntl.LOCK_EX)
    with file:
        try:
            yield os.getpid()
        finally:
            with _uninterrupted(), _alone():
                remove(os.getpid())
                mine.unlink()


@contextmanager
def _alone() -> Iterator[None]:
    """No other process claims or cleans meanwhile."""
    OWNERS.mkdir(exist_ok=True)
    with (OWNERS / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP wait for the end of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def clean() -> list[int]:
    """Remove what owners that are gone have left; their process ids."""
    require()
    with _alone():
        return _clean()


def _clean() -> list[int]:
    gone = [file for file in OWNERS.iterdir() if file.name.isdigit() and not _locked(file)]
    for file in gone:
        remove(int(file.name))
        file.unlink()
    return sorted(int(file.name) for file in gone)


def _locked(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def namespaces_of(owner: int) -> list[str]:
    """The namespaces that there are of an owner's."""
    found = os.listdir(NAMESPACES) if NAMESPACES.exists() else []
    return sorted(name for name in found if re.fullmatch(rf"gradwire-{owner}-\d+", name))


def interfaces_of(owner: int) -> list[str]:
    """The interfaces on the host that there are of an owner's."""
    return sorted(name for _, name in socket.if_nameindex() if re.fullmatch(rf"gwl{owner}(b|v\d+)", name))


def left_by(owner: int) -> list[str]:
    """All that there is of an owner's."""
    return [*interfaces_of(owner), *namespaces_of(owner)]


def remove(owner: int) -> None:
    """Remove all that an owner has made, and end what still runs inside."""
    for namespace in namespaces_of(owner):
        for process in run("ip", "netns", "pids", namespace).split():
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(int(process), signal.SIGKILL)
    for interface in interfaces_of(owner):
        _delete("ip", "link", "del", interface, path=INTERFACES / interface)
    for namespace in namespaces_of(owner):
        _delete("ip", "netns", "del", namespace, path=NAMESPACES / namespace)


def _delete(*words: str, path: Path) -> None:
    """Run a command that deletes; the kernel may have done it already, with the other end of the cable."""
    try:
        run(*words)
    except NetlabError:
        if path.exists():
            raise


def free_subnet() -> IPv4Network:
    """Room for 254 hosts that no route of this host knows of."""
    routes = json.loads(run("ip", "-json", "-4", "route", "show", "table", "all") or "[]")
    known = [IPv4Network(route["dst"], strict=False) for route in routes if route["dst"] != "default"]
    for subnet in BENCHMARKING.subnets(new_prefix=24):
        if not any(subnet.overlaps(other) for other in known):
            return subnet
    raise NetlabError(f"this host has routes to all of {BENCHMARKING}: no addresses are left for hosts")


def _build(lab: Lab, config: NetlabConfig) -> None:
    """Make all hosts."""
    quiet = ("addrgenmode", "none")  # no IPv6 address, so that nobody but the ranks sends anything
    bridged = () if delays(config) else ("master", lab.bridge)
    if bridged:
        run("ip", "link", "add", lab.bridge, "type", "bridge")
        run("ip", "link", "set", lab.bridge, *quiet, "up")
    for host in range(lab.hosts):
        namespace, port = lab.namespace(host), lab.port(host)
        run("ip", "netns", "add", namespace)
        run("ip", "link", "add", port, "type", "veth", "peer", "name", WIRE, "netns", namespace)
        run("ip", "link", "set", port, *bridged, *quiet, "up")
        inside = ("ip", "-netns", namespace)
        run(*inside, "addr", "add", f"{lab.address(host)}/{lab.subnet.prefixlen}", "dev", WIRE)
        run(*inside, "link", "set", WIRE, *quiet, "up")
        run(*inside, "link", "set", "lo", "up")
        if parse_share(config.loss):  # else the kernel hands over some packets as one, which would be lost together
            run(*inside, "link", "set", WIRE, "gso_max_segs", "1")
        _limit("-netns", namespace, interface=WIRE, rate=parse_rate(config.rate))
        _limit(interface=port, rate=parse_rate(config.rate_down))


def _limit(*where: str, interface: str, rate: float) -> None:
    """Let an interface send no faster, counted in Ethernet frames; a longer silence saves up no more than a burst.

    `rate` in bytes per second, 0 for no limit.
    """
    if not rate:
        return
    burst = max(SMALLEST_BURST, round(rate * BURST_SECONDS))
    limits = ("rate", f"{rate:.0f}bps", "burst", f"{burst}b", "latency", QUEUE)
    run("tc", *where, "qdisc", "add", "dev", interface, "root", "tbf", *limits)
