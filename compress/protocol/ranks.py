"""The ranks of a training, the hosts that they are on, and those that take part in a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

# All ranks; those of this host; those of one place on every host; this rank alone.
Scope: TypeAlias = Literal["all", "host", "across", "self"]


@dataclass(frozen=True)
class Ranks:
    """The ranks of a training. Ranks of a host have consecutive numbers.

    Attributes:
        world_size: the number of ranks.
        rank: this rank's number.
        per_host: the number of ranks on each host.

    Raises:
        ValueError: `per_host` does not divide `world_size`.

    >>> ranks = Ranks(world_size=8, rank=5, per_host=2)
    >>> [ranks.members(scope) for scope in ("all", "host", "across")]
    [range(0, 8), range(4, 6), range(1, 8, 2)]
    """

    world_size: int = 1
    rank: int = 0
    per_host: int = 1

    def __post_init__(self) -> None:
        if self.per_host < 1 or self.world_size % self.per_host:
            raise ValueError(f"per_host divides the number of ranks, {self.world_size}; got {self.per_host}")

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return self.world_size // self.per_host

    @property
    def place(self) -> int:
        """The place of this rank in its host."""
        return self.rank % self.per_host

    def members(self, scope: Scope) -> range:
        """Return the ranks that take part in this rank's requests of a scope.

        Args:
            scope: "all" ranks, those of this "host", those of the same place on each host ("across"), or "self".

        Returns:
            The ranks' numbers.
        """
        if scope == "self":
            return range(self.rank, self.rank + 1)
        if scope == "host":
            first = self.rank - self.place
            return range(first, first + self.per_host)
        return range(self.place, self.world_size, self.per_host) if scope == "across" else range(self.world_size)
