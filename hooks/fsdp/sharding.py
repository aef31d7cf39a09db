"""The wishes of whoever calls `attach` on an FSDP2 model."""

from __future__ import annotations

from dataclasses import dataclass

from ...compress import Optimizers, Spec


@dataclass(frozen=True)
class Sharding:
    """The ways in which weights are gathered, gradients reduced, and these averaged over replicas; None: as torch does.

    `optimizer`: decides on what is left open of error feedback. `undo`: see `StepMemory`.
    """

    gather: Spec | None
    reduce: Spec | None
    replicas: Spec | None
    optimizer: Optimizers | None = None
    undo: bool = False

    @property
    def of_shards(self) -> bool:
        """True if gradwire communicates among shards: not if it is to communicate among replicas alone."""
        return self.replicas is None or self.gather is not None or self.reduce is not None
