"""Module buffers, such as the running statistics of batch norm, made those of one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .collectives import largest, spread


class BufferSync:
    """Copies the buffers of `module` from one rank to all, or does what a user's hook does instead.

    A hook is called as `hook(state, {name: buffer})`; the futures that it returns, if any, are waited for at the end of
    backward.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self.after_forward = False
        self._module = module
        self._group = group
        self._hook: Callable[[Any, dict[str, Tensor]], Any] | None = None
        self._state: Any = None
        self.pending: list[torch.futures.Future[Any]] = []

    def register(self, state: Any, hook: Callable[[Any, dict[str, Tensor]], Any], *, after_forward: bool) -> None:
        """Let a hook synchronize, before or after forward."""
        if not callable(hook):
            raise TypeError(f"a buffer hook is called with (state, buffers), got {type(hook).__name__}")
        self._state, self._hook, self.after_forward = state, hook, after_forward

    def current(self) -> dict[str, Tensor]:
        """The buffers that ranks have in common now; a module may replace its buffers."""
        ignored = set(getattr(self._module, "_ddp_params_and_buffers_to_ignore", ()))
        return {name: buffer for name, buffer in self._module.named_buffers() if name not in ignored}

    def run(self, *, agree: bool, candidate: bool) -> None:
        """Synchronize: from rank 0, or with `agree` from the highest rank that is a candidate."""
        if self._hook is not None:
            self.pending += self._hook(self._state, self.current()) or []
            return
        source = 0
        if agree:
            source = agreed_rank(candidate, self._group, next(iter(self.current().values())).device)
        self.copy(list(self.current().values()), source)

    def copy(self, tensors: Sequence[Tensor], source: int) -> None:
        """Overwrite tensors by those of rank `source` of the group; graphs that saved them stay valid."""
        changed = tuple(tensor.detach() for tensor in tensors if tensor.numel())
        if changed:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(changed):
                spread(changed, source, self._group)

    def wait(self) -> None:
        """End what hooks began."""
        pending, self.pending = self.pending, []
        for future in pending:
            future.wait()


def agreed_rank(candidate: bool, group: dist.ProcessGroup, device: torch.device) -> int:
    """The highest rank of the group that is a candidate. Blocks."""
    rank = largest(group.rank() if candidate else -1, group, device)
    if rank < 0:
        raise RuntimeError("no rank has the current model: all have run out of inputs at once")
    return rank
