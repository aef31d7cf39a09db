"""Large all-to-alls and all-gathers on the CPU, straight from rank to rank: the same bits as over Gloo, sooner."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from ....compress.protocol.requests import AllGather, AllToAll, Request
from ....kernels import temporary
from . import Collectives, Direct

SMALLEST_BYTES = 10**6  # of all ranks' rows together; a quarter of that Gloo has done before another thread wakes


def is_large(request: Request, ranks: int) -> bool:
    """Return True if a request is worth connections of its own: the same on all `ranks`."""
    if ranks == 1:
        return False
    if isinstance(request, AllGather):
        return not request.sizes and request.tensor.nbytes * ranks >= SMALLEST_BYTES
    return isinstance(request, AllToAll) and request.tensor.nbytes >= SMALLEST_BYTES


class Exchange:
    """The direct collectives among `size` ranks, on a thread and connections of `direct`.

    Bits and bytes are those of Gloo's collectives. Its all-to-all begins to send before it is ready to receive, so that a
    link carries one direction after the other; here both go at once. Its all-gathers pass blocks on from rank to rank.
    """

    def __init__(self, direct: Collectives, size: int) -> None:
        self._direct, self._size = direct, size
        self.close = direct.close  # breaks the connections, once what is under way has ended

    def start(self, request: Request) -> tuple[dist.Work, Tensor] | None:
        """Begin a large request, and what it writes to; None where Gloo is to carry it."""
        tensor = request.tensor.contiguous()
        if isinstance(request, AllToAll):
            reply = temporary(*tensor.shape, dtype=tensor.dtype, device=tensor.device)
            return Direct(self._direct.all_to_all("swap", self._rows(reply), self._rows(tensor)), [reply]), reply
        if "gather" not in self._direct.ways():
            return None
        reply = temporary(self._size, *tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return Direct(self._direct.all_gather("gather", self._rows(reply), tensor), [reply]), reply

    def _rows(self, tensor: Tensor) -> list[Tensor]:
        return list(tensor.view(self._size, -1).unbind())
