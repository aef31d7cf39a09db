"""gradwire on models of torch's `replicate`: DDP by the machinery of FSDP2."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn

from ..compress import Spec
from ..ddp_core import Decorator, Handle
from .fsdp.arrivals import Arrivals
from .fsdp.finite_everywhere import FiniteEverywhere
from .fsdp.modules import ShardedModule, modules_of
from .fsdp.replicas import take_replicas


class ReplicateHandle(Handle):
    """The handle of a replicated model: as of DDP, and `close()` has torch average gradients by itself again."""

    _modules: Sequence[ShardedModule] = ()  # none in copies

    def take(self, model: nn.Module, modules: Sequence[ShardedModule]) -> None:
        """Average the gradients of a model's replicated modules, each in one bucket."""
        steps, timeout = self.averager.steps, self.averager.engines.timeout
        arrivals = Arrivals(steps, model, modules[0].device, timeout, FiniteEverywhere(self.averager), modules)
        take_replicas(modules, self, arrivals)
        self.averager.look_for_discarded([each for each in model.parameters() if each.requires_grad])
        self._modules = modules
        self._note_frozen()

    def bind(self, model: nn.Module, *, changed: bool = False) -> None:
        """Do nothing but find out which parameters are frozen: the modules name their parameters themselves."""
        self._note_frozen()

    def fitting(self, saved: Any) -> dict[str, Any]:
        """This rank's saved state, checked. Raises ValueError where it does not fit."""
        self._note_frozen()
        return super().fitting(saved)

    def _note_frozen(self) -> None:
        trained = {name for module in self._modules for name in module.shards()}
        self.frozen = frozenset(name for module in self._modules for name in module.names if name not in trained)

    def close(self) -> None:
        """End the threads and process groups that were made for it; torch averages gradients again."""
        for module in () if self.closed else self._modules:  # else another handle may average their gradients now
            module.give_back()
        super().close()


def attach_replicated(
    model: nn.Module,
    spec: Spec,
    process_group: dist.ProcessGroup | None,
    timeout: timedelta | None,
    transport: Decorator | None,
    undo: bool,
) -> ReplicateHandle:
    """Compress the gradients of a replicated model. Raises ValueError for a model that is refused."""
    modules = modules_of(model, whole=True)
    handle = ReplicateHandle(spec, process_group or modules[0].process_group, timeout, transport=transport, undo=undo)
    handle.take(model, modules)
    return handle
