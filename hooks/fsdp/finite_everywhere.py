"""A step that any rank finds not finite counts on none: FSDP2's ranks agree on that before it ends."""

from __future__ import annotations

from dataclasses import dataclass

from ...ddp_core.averaging.averager import CompressedAverager
from ...ddp_core.averaging.engines import Engines
from ...ddp_core.averaging.shard_averager import ShardAverager
from ...ddp_core.transport.rank_messages import FINITE, true_everywhere


@dataclass(frozen=True)
class FiniteEverywhere:
    """A message of ranks before a step ends: it counts on no rank if gradients or averages of any are not finite.

    Of both averagers those of gradwire's; `sharing`: engines of the ranks that share parameters, if there are several.
    """

    among_replicas: CompressedAverager | None = None
    among_shards: ShardAverager | None = None
    sharing: Engines | None = None

    def __call__(self) -> None:
        """Agree. A collective call."""
        averager = self.among_replicas
        memory = averager.memory if averager is not None and averager.inside else None
        if memory is not None and self.sharing is not None and (finite := memory.finite_here) is not None:
            memory.note_finite(true_everywhere(finite, self.sharing.transport(finite.device), what=FINITE))
        finite = None if self.among_shards is None else self.among_shards.hear_replicas()
        if memory is not None and finite is not None:
            memory.note_finite(finite)
