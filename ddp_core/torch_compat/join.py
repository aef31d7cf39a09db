"""Uneven inputs: what a rank does for the others once its own inputs have ended."""

from __future__ import annotations

from typing import Any

from torch.distributed.algorithms.join import JoinHook

from ..reducer.module_buffers import agreed_rank


class ShadowSteps(JoinHook):
    """Mirrors every collective of the others' steps, with gradients of zero. `model`: our DistributedDataParallel."""

    def __init__(self, model: Any, divide_by_initial_world_size: bool) -> None:
        self.model = model
        model.divide_by_initial_world_size = divide_by_initial_world_size
        model.logger.data["join_uneven_inputs"] = 1
        super().__init__()

    def main_hook(self) -> None:
        """One step of the others."""
        model = self.model
        model.agree_on_order()
        model.sync_buffers(candidate=False)
        synced = model.backward_is_synced(joined=True)
        model.sync_buffers(candidate=False, after_forward=True)
        model.require_forward_param_sync = synced
        if synced:
            model.reducer.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """After the last input of all: the model of the ranks that trained longest is everybody's."""
        model = self.model
        model._authoritative_rank = agreed_rank(is_last_joiner, model.reducer.transport)
        model.copy_states(model._authoritative_rank)
