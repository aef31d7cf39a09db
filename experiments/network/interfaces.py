"""The network interfaces of this host."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any

NETWORK = Path("/sys/class/net")
IPV6_TABLE = Path("/proc/net/if_inet6")
GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux's netdevice(7)


def interfaces() -> list[dict[str, Any]]:
    """Network interfaces: name, state, addresses, and link speed if the driver knows it."""
    return [
        {
            "name": name,
            "state": _attribute(name, "operstate"),
            "addresses": _addresses(name),
            "speed_mbit": _speed(name),
        }
        for _, name in socket.if_nameindex()
    ]


def _attribute(interface: str, attribute: str) -> str | None:
    try:
        return (NETWORK / interface / attribute).read_text().strip()
    except OSError:  # the kernel refuses to read what a driver does not know
        return None


def _speed(interface: str) -> int | None:
    text = _attribute(interface, "speed")
    return int(text) if text and int(text) > 0 else None


def _addresses(interface: str) -> list[str]:
    """Its IPv4 address, then its IPv6 addresses."""
    table = IPV6_TABLE.read_text().splitlines() if IPV6_TABLE.exists() else []
    rows = [line.split() for line in table]
    longer = [str(IPv6Address(bytes.fromhex(row[0]))) for row in rows if row[-1] == interface]
    return [*filter(None, [_ipv4(interface)]), *longer]


def _ipv4(interface: str) -> str | None:
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), GET_ADDRESS, struct.pack("256s", interface.encode()))
        except OSError:  # the interface has no IPv4 address
            return None
    return socket.inet_ntoa(answer[20:24])
