"""Local SGD in a framework's trainer: no gradient is averaged, and the states of all sites are in its checkpoints."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...ddp_core.transport.process_group import ProcessGroup, over
from ...ddp_core.transport.rank_messages import gathered, scattered
from ..local_sgd.local_steps import LocalSteps
from ..model_kinds import ddp_inside

SITES = "sites"  # the key of their states
OF_LOCAL_STEPS = set(inspect.signature(LocalSteps).parameters) - {"model", "optimizer", "process_group", "timeout"}


def without_averages(model: nn.Module) -> nn.Module:
    """Return the model inside a framework's DDP, which averages no gradients and copies no buffers from now on."""
    ddp = ddp_inside(model)
    if ddp is None:
        return model
    ddp.require_backward_grad_sync = ddp.require_forward_param_sync = False
    inside: nn.Module = ddp.module
    return inside


class GatheredSites:
    """The states of all ranks' LocalSteps as one, for frameworks that save on rank 0.

    Frameworks save the model and the optimizer of rank 0 alone. So all ranks go on from the model that they had in common
    after the last round, and owe the mean of what all held back.
    """

    def __init__(self, local: LocalSteps, model: nn.Module) -> None:
        self.local, self._device = local, next((each.device for each in model.parameters()), torch.device("cpu"))

    def gather_state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks on the first one, on the others {}. All ranks call it after the same step."""
        states = gathered(self.local.state_dict(), self._everyone(), what="the states of LocalSteps")
        return {SITES: states} if states else {}

    def scatter_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `gather_state_dict` returned to the first rank. All ranks call it."""
        given = [saved.get(SITES)] * dist.get_world_size()
        states = scattered(given, self._everyone(), what="the states of LocalSteps")
        if not isinstance(states, list):
            raise ValueError(f"the checkpoint has no states of LocalSteps: save with LocalSteps; it has {list(saved)}")
        self.local.load_state_dict(states)

    @property
    def called(self) -> bool:
        """True after the first round."""
        return bool(self.local.history)

    def metrics(self) -> dict[str, float]:
        """Return `LocalSteps.metrics()`."""
        return self.local.metrics()

    @property
    def closed(self) -> bool:
        """True after `LocalSteps.close()` or `finish()`."""
        return self.local.closed

    def _everyone(self) -> ProcessGroup:
        assert dist.group.WORLD is not None
        return over(dist.group.WORLD, self._device)
