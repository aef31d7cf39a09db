"""The process group that ranks join, and where they meet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

RENDEZVOUS = "rendezvous"


@contextmanager
def joined(backend: str, timeout: timedelta, rendezvous: dict[str, Any] | None = None) -> Iterator[dist.ProcessGroup]:
    """The default process group, from `rendezvous` or a launcher's variables; destroyed at the end. gloo-cuda is Gloo.

    A rank that fails keeps its connections while its process lives, so that it can tell why before its peers notice.
    """
    if rendezvous is not None:
        rendezvous["store"].set_timeout(timeout)
    dist.init_process_group(backend.removesuffix("-cuda"), timeout=timeout, **(rendezvous or {}))
    group = dist.group.WORLD
    assert group is not None
    yield group
    dist.barrier()
    dist.destroy_process_group()


def further_group(backend: str) -> dist.ProcessGroup:
    """A group of all ranks of the default one, over another backend. A collective call."""
    group = dist.new_group(backend=backend)
    assert isinstance(group, dist.ProcessGroup)
    return group


def rendezvous_in(folder: Path, rank: int, nproc: int) -> dict[str, Any]:
    """For `joined`: a file in a folder of this host, of whatever name, through which `nproc` ranks meet."""
    return {"store": dist.FileStore(str(folder / RENDEZVOUS), nproc), "rank": rank, "world_size": nproc}
