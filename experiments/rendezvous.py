"""`gradwire rendezvous`: where sites meet that train by local steps."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ..hooks.local_sgd.rendezvous import keep as keep_rendezvous


@dataclass(frozen=True)
class RendezvousConfig:
    """Keep a place where sites meet that train by local steps, until Ctrl-C; sites may come and go meanwhile."""

    port: int = 29400
    """TCP port that sites connect to; 0 takes a free one"""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ValueError(f"a port is from 0 to 65535, got {self.port}")


def rendezvous(config: RendezvousConfig) -> int:
    """Keep the store; the command's exit code."""
    store = keep_rendezvous(config.port)
    try:
        print(f"sites meet at port {store.port} of this machine, until Ctrl-C", flush=True)
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        return 0
