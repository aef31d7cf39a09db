"""Module buffers, such as the running statistics of batch norm, made those of one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..transport.collectives import broadcast, largest
from ..transport.protocol import Transport


class BufferSync:
    """Copies a model's buffers from one rank to all, or does what a user's hook does instead.

    `hook`: its state, the function, and whether it runs after forward. It is called as `function(state, {name: buffer})`;
    the futures that it returns, if any, are waited for at the end of backward.
    """

    def __init__(
        self, transport: Transport, hook: tuple[Any, Callable[[Any, dict[str, Tensor]], Any], bool] | None = None
    ) -> None:
        self.hook = hook
        self._transport = transport
        self._pending: list[torch.futures.Future[Any]] = []

    def separate(self) -> None:
        """Have buffers queue behind no gradients. A collective call."""
        self._transport = self._transport.separate()

    @property
    def after_forward(self) -> bool:
        """True if buffers are synchronized after forward instead of before it."""
        return self.hook is not None and self.hook[2]

    def run(self, buffers: dict[str, Tensor], *, agree: bool, candidate: bool) -> None:
        """Synchronize: from rank 0, or with `agree` from the highest rank that is a candidate."""
        if self.hook is not None:
            state, function, _ = self.hook
            self._pending += function(state, buffers) or []
            return
        tensors = list(buffers.values())
        self.copy(tensors, agreed_rank(candidate, self._transport) if agree else 0)

    def copy(self, tensors: Sequence[Tensor], source: int) -> None:
        """Overwrite tensors by those of rank `source` of the group; graphs that saved them stay valid."""
        changed = tuple(tensor.detach() for tensor in tensors if tensor.numel())
        if changed:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(changed):
                broadcast(changed, source, self._transport, what="their parameters and buffers")

    def wait(self) -> None:
        """End what hooks began."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.wait()


def agreed_rank(candidate: bool, transport: Transport) -> int:
    """The highest rank that is a candidate. Blocks."""
    rank = largest(transport.ranks.rank if candidate else -1, transport)
    if rank < 0:
        raise RuntimeError("no rank has the current model: all have run out of inputs at once")
    return rank
