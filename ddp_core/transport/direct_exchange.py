"""Large all-to-alls and all-gathers on the CPU, straight from rank to rank: the same bits as over Gloo, sooner."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from ...compress.protocol import AllGather, AllToAll, Request
from .direct import GLOO, PINNED, Collectives, Direct

SMALLEST_BYTES = 10**6  # of all ranks' rows together; a quarter of that Gloo has done before another thread wakes


def is_large(request: Request, ranks: int) -> bool:
    """Whether a request is worth connections of its own; told alike by all ranks, so many."""
    if ranks == 1:
        return False
    if isinstance(request, AllGather):
        return not request.sizes and request.tensor.nbytes * ranks >= SMALLEST_BYTES
    return isinstance(request, AllToAll) and request.tensor.nbytes >= SMALLEST_BYTES


class Exchange:
    """What goes directly among some ranks, on a thread and connections of its own, made at the first request for it.

    `meet`: makes these. `all_want`: whether all ranks, so many as `size`, want them; asked once, before they meet, over
    connections that there are: who is dead is noticed there at once. Bits and bytes are those of Gloo's collectives. Its
    all-to-all begins to send before it is ready to receive, so that a link carries one direction after the other; here both
    go at once. Its all-gathers pass blocks on from rank to rank. GRADWIRE_COLLECTIVES=gloo on any rank does without.
    """

    def __init__(self, meet: Callable[[], Collectives], all_want: Callable[[bool], bool], size: int) -> None:
        self._meet, self._all_want, self._size = meet, all_want, size
        self._wanted: bool | None = None
        self._made: Collectives | None = None

    def start(self, request: Request) -> tuple[dist.Work, Tensor] | None:
        """Begin a large request, and what it writes to; None where one of the ranks wants Gloo to carry it."""
        if self._wanted is None:
            self._wanted = self._all_want(os.environ.get(PINNED) != GLOO)
        if not self._wanted:
            return None
        tensor = request.tensor.contiguous()
        if isinstance(request, AllToAll):
            reply = tensor.new_empty(tensor.shape)
            return Direct(self._direct.all_to_all("swap", self._rows(reply), self._rows(tensor)), [reply]), reply
        if "gather" not in self._direct.ways():
            return None
        reply = tensor.new_empty(self._size, *tensor.shape)
        return Direct(self._direct.all_gather("gather", self._rows(reply), tensor), [reply]), reply

    @property
    def _direct(self) -> Collectives:
        if self._made is None:
            self._made = self._meet()
        return self._made

    def _rows(self, tensor: Tensor) -> list[Tensor]:
        return list(tensor.view(self._size, -1).unbind())

    def close(self) -> None:
        """Break the connections, once what is under way has ended."""
        if self._made is not None:
            self._made.close()
