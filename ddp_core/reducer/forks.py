"""A forked process has its parent's buckets and connections: gradients are refused there before they are written."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

from ..engine.engine import FORKED

_guards: WeakSet[ForkGuard] = WeakSet()


class ForkGuard:
    """A guard of a model whose gradients `nodes` accumulate. `shares`: True if the parent would read them now."""

    def __init__(self, nodes: Sequence[Any], shares: Callable[[], bool | None]) -> None:
        self._process, self._nodes, self._shares = os.getpid(), nodes, shares
        _guards.add(self)

    def check(self) -> None:
        """Raise RuntimeError in another process than the one it was made in."""
        if os.getpid() != self._process:
            raise RuntimeError(FORKED)

    def _refuse(self, *_: Any) -> None:
        if self._shares():
            self.check()


def _arm_all() -> None:
    """Have all guards look at every gradient from now on."""
    for guard in list(_guards):
        for node in guard._nodes:
            node.register_prehook(guard._refuse)


os.register_at_fork(after_in_child=_arm_all)
