"""The ranks that take part in a request."""

from __future__ import annotations

from typing import Literal, TypeAlias

# All ranks; those of this host; those of one place on every host; this rank alone.
Scope: TypeAlias = Literal["all", "host", "across", "self"]


def members(scope: Scope, rank: int, world_size: int, ranks_per_host: int = 1) -> range:
    """The ranks that take part in a request of `rank`; hosts have consecutive ranks.

    >>> [members(scope, 5, world_size=8, ranks_per_host=2) for scope in ("all", "host", "across")]
    [range(0, 8), range(4, 6), range(1, 8, 2)]
    """
    if scope == "self":
        return range(rank, rank + 1)
    if scope == "host":
        first = rank - rank % ranks_per_host
        return range(first, first + ranks_per_host)
    return range(rank % ranks_per_host, world_size, ranks_per_host) if scope == "across" else range(world_size)
