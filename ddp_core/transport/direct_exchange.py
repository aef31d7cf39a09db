"""Large all-to-alls and all-gathers on the CPU, straight from rank to rank: the same bits as over Gloo, sooner."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet  # which is no TimeoutError before Python 3.11
from datetime import timedelta

from torch import Tensor

from ...compress.protocol import AllGather, AllToAll, Request
from .agreement import LOOK, Look
from .direct import GLOO, PINNED, Collectives
from .protocol import Reply

SMALLEST_BYTES = 10**6  # of all ranks' rows together; a quarter of that Gloo has done before another thread wakes


def is_large(request: Request, ranks: int) -> bool:
    """Whether a request is worth connections of its own; told alike by all ranks, so many."""
    if ranks == 1:
        return False
    if isinstance(request, AllGather):
        return not request.sizes and request.tensor.nbytes * ranks >= SMALLEST_BYTES
    return isinstance(request, AllToAll) and request.tensor.nbytes >= SMALLEST_BYTES


class Arrival(Reply):
    """What a direct collective will have written to `reply`. `look`: what a wait that takes long does now and then."""

    def __init__(self, begun: Future[None], reply: Tensor, look: Look) -> None:
        self._begun: Future[None] | None = begun
        self._reply, self._look = reply, look
        self._arrived: float | None = None

    def wait(self, timeout: timedelta) -> Tensor:
        """The result; RuntimeError where a rank is gone, or at the time limit."""
        deadline = time.monotonic() + timeout.total_seconds()
        while (begun := self._begun) is not None:
            try:
                begun.result(max(min(deadline - time.monotonic(), LOOK.total_seconds()), 0.001))
                return self._reply
            except NotYet as error:
                self._look()
                if time.monotonic() >= deadline:
                    raise RuntimeError(f"it did not come within {timeout}: a rank hangs, or has died") from error
            except RuntimeError:
                self._look()  # at the reason why a connection was lost
                raise
        raise RuntimeError("it was given up")

    def expect_late_wait(self) -> None:
        """Have the thread that receives it note when it is there."""
        if self._begun is not None:
            self._begun.add_done_callback(self._arrives)

    def _arrives(self, _: Future[None]) -> None:
        self._arrived = time.perf_counter()

    def arrived_at(self) -> float | None:
        """When it was there, where that is noted."""
        return self._arrived

    def abandon(self) -> None:
        """Let go of it."""
        self._begun = None


class Exchange:
    """What goes directly among some ranks, on a thread and connections of its own, made at the first request for it.

    `meet`: makes these. `all_want`: whether all ranks, so many as `size`, want them; asked once, before they meet, over
    connections that there are: who is dead is noticed there at once. Bits and bytes are those of Gloo's collectives. Its
    all-to-all begins to send before it is ready to receive, so that a link carries one direction after the other; here both
    go at once. Its all-gathers pass blocks on from rank to rank. GRADWIRE_COLLECTIVES=gloo on any rank does without.
    """

    def __init__(
        self, meet: Callable[[], Collectives], all_want: Callable[[bool], bool], size: int, look: Look
    ) -> None:
        self._meet, self._all_want, self._size, self._look = meet, all_want, size, look
        self._wanted: bool | None = None
        self._made: Collectives | None = None

    def start(self, request: Request) -> Arrival | None:
        """Begin a large request; None where one of the ranks wants Gloo to carry it."""
        if self._wanted is None:
            self._wanted = self._all_want(os.environ.get(PINNED) != GLOO)
        if not self._wanted:
            return None
        tensor = request.tensor.contiguous()
        if isinstance(request, AllToAll):
            reply = tensor.new_empty(tensor.shape)
            return self._arrival(self._direct.all_to_all("swap", self._rows(reply), self._rows(tensor)), reply)
        if "gather" not in self._direct.ways():
            return None
        reply = tensor.new_empty(self._size, *tensor.shape)
        return self._arrival(self._direct.all_gather("gather", self._rows(reply), tensor), reply)

    @property
    def _direct(self) -> Collectives:
        if self._made is None:
            self._made = self._meet()
        return self._made

    def _rows(self, tensor: Tensor) -> list[Tensor]:
        return list(tensor.view(self._size, -1).unbind())

    def _arrival(self, begun: Future[None], reply: Tensor) -> Arrival:
        return Arrival(begun, reply, self._look)

    def close(self) -> None:
        """Break the connections, once what is under way has ended."""
        if self._made is not None:
            self._made.close()
