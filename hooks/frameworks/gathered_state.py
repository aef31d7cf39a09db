"""The state and the statistics of the compression that frameworks save and log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...ddp_core import Handle
from .local_steps import GatheredSites


class GatheredState:
    """The states of all ranks as one object with `state_dict` and `load_state_dict`, called on all ranks.

    Pass it to Accelerate's `register_for_checkpointing`, or to torch.distributed.checkpoint: `dcp.save({"model": ...,
    "compression": GatheredState(handle)})`. It loads on the same or another number of ranks.

    Args:
        handle: the handle of the compression.
    """

    def __init__(self, handle: Handle | GatheredSites) -> None:
        self._handle = handle

    def state_dict(self) -> dict[str, Any]:
        """Return `Handle.gather_state_dict()`."""
        return self._handle.gather_state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Call `Handle.scatter_state_dict(saved)`.

        Args:
            saved: the gathered state, on rank 0.
        """
        self._handle.scatter_state_dict(saved)


def scalars(source: Handle | GatheredSites) -> dict[str, float]:
    """Return its `metrics()` by the names under which frameworks log them; empty before the first synchronized step."""
    return {f"gradwire/{name}": value for name, value in source.metrics().items()} if source.called else {}
