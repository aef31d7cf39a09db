"""`gradwire rendezvous`: the address at which sites of local SGD meet."""

from __future__ import annotations

import ipaddress
import resource
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from ..hooks.internet.secret import SECRET, Secret
from ..hooks.internet.server import Server

FILES = 1 << 15  # that the rendezvous may open


@dataclass(frozen=True)
class RendezvousConfig:
    """Keep the address at which sites of local SGD meet, until Ctrl-C; sites may come and go meanwhile."""

    host: str = "127.0.0.1"
    """address at which to listen: one that the other sites reach, or 0.0.0.0 for all addresses of this host"""

    port: int = 29400
    """TCP port that sites connect to; 0 takes a free one"""

    secret_file: Path | None = None
    """file with the secret of all sites; if not given, the secret is GRADWIRE_SECRET, and without that a --host other
    than 127.0.0.1 gets a new one. A file with a private key and its certificate encrypts connections"""

    relay: bool = False
    """pass payloads on between sites, which then need to reach this address alone"""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ValueError(f"a port is from 0 to 65535, got {self.port}")


def rendezvous(config: RendezvousConfig) -> int:
    """Keep the server; the command's exit code."""
    allow_files(FILES)
    given = Secret.of(config.secret_file)
    made = "" if given.text or _is_loopback(config.host) else secrets.token_urlsafe(24)
    try:
        server = Server(config.host, config.port, Secret.of(made) if made else given, relay=config.relay)
    except RuntimeError as error:
        raise ValueError(f"{error}. Give a free port by --port and an address of this host by --host") from error
    try:
        print(_shown(config.host, server.port, made, given), flush=True)
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        return 0
    finally:
        server.close()


def allow_files(count: int) -> None:
    """Let this process open so many files, if the system does: each rank of each site holds a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _shown(host: str, port: int, made: str, given: Secret) -> str:
    """Return what other sites need. `made`: a secret that they cannot know; `given`: one that they may have."""
    reached = socket.gethostname() if host in ("0.0.0.0", "::") else host
    address = f"[{reached}]:{port}" if ":" in reached else f"{reached}:{port}"
    lines = [f"sites meet at port {port} of {host}, until Ctrl-C. On each site:"]
    if made:
        lines.append(f"  export {SECRET}={made}")
    elif given.text and not given.pair:
        lines.append(f"  export {SECRET}=...  # the same as here")
    secret = f', secret=pathlib.Path("{given.pair.name}")' if given.pair else ""
    lines.append(f'  gradwire.LocalSteps(model, optimizer, at=gradwire.Rendezvous("{address}", sites=2{secret}))')
    if not made and not given.text:
        lines.append(
            "Without a secret only processes of this host take part. For other hosts give --host, which makes one."
        )
    return "\n".join(lines)
