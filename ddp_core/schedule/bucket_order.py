"""Buckets that follow the order in which gradients get ready (Li et al. 2020, section 6.2.1), or a checkpoint's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..handle import Handle
from ..torch_face.torch_reducer import TorchReducer
from ..transport.collectives import spread
from ..transport.host_memory import Memory, OneHost, own_memory

INTERVAL = 64  # synced steps between two looks


class BucketOrder:
    """Decides between steps, on all ranks alike, whether a reducer makes its buckets anew.

    `host`: where they may lie, as long as they are only summed. `device`: of what ranks tell.
    """

    def __init__(self, reducer: TorchReducer, host: OneHost, device: torch.device) -> None:
        self._reducer, self._host, self._device = reducer, host, device
        self._looked_at = 0
        self._followed_at: int | None = None  # when a state brought buckets, while these have memory of their own
        self.agreed = False  # rank 0 has told its order once
        self._name()

    def look(self, handle: Handle | None, *, hooked: bool = False) -> None:
        """Once after the first step and now and then: take rank 0's order. `handle`: the compression that averages.

        Without one a hook does that is not ours, and may know buckets by their numbers: these then stay as in torch.
        `hooked`: a hook calls the compression.
        """
        steps = self._reducer.finished
        if handle is not None and (saved := handle.loaded_order()):
            self._follow(saved)
            self._looked_at = max(1, steps)  # the first step was before the checkpoint
            self._followed_at = steps
        elif self._followed_at is not None and steps > self._followed_at:  # all ranks have come as far
            self._followed_at = None
            self._rebuild(self._reducer.plan.order, self._memory(handle, hooked))
        if steps in (0, self._looked_at) or (steps != 1 and steps % INTERVAL):
            return
        self._looked_at = steps
        if handle is None and (self.agreed or self._reducer.rules.dynamic):
            return
        order = torch.tensor(self._reducer.plan.proposal(), device=self._device)
        spread([order], 0, self._reducer.group)
        self.agreed = True
        self._rebuild(order.tolist(), self._memory(handle, hooked))

    def _memory(self, handle: Handle | None, hooked: bool) -> Memory:
        return self._host.memory(summed=handle is not None and not hooked and handle.sums)

    def _follow(self, names: Sequence[str]) -> None:
        """Make the buckets that a state was saved with, as far as their sizes allow."""
        places = {name: index for index, name in enumerate(self._reducer.names)}
        saved = [places[name] for name in dict.fromkeys(names) if name in places]
        others = [index for index in self._reducer.plan.order if index not in set(saved)]
        self._rebuild([*saved, *others], own_memory)

    def _rebuild(self, order: list[int], memory: Memory) -> None:
        plan = self._reducer.plan
        if order != plan.order or not (plan.shared or memory is own_memory):
            plan.build(order, memory)
            self._name()

    def _name(self) -> None:
        names, buckets = self._reducer.names, self._reducer.plan.buckets
        self._reducer.timeline.name_buckets([tuple(names[index] for index in bucket.members) for bucket in buckets])
