"""Direct collectives on a thread of their own, in the order in which they are asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from queue import SimpleQueue

import torch.distributed as dist
from torch import Tensor

from .fastest import Fastest, Ring, Way
from .hosts import hosts_of
from .rails import rails
from .staggered import Staggered
from .wire import Wire

JOIN_SECONDS = 5.0
Job = tuple[Callable[[], None], "Future[None]"]


def fastest(wire: Wire) -> Way:
    """The fastest of all ways, for each size. A collective call."""
    ways: dict[str, Way] = {"ring": Ring(wire), "staggered": Staggered(wire)}
    if (shared := rails(wire, hosts_of(wire))) is not None:
        ways["rails"] = shared
    return Fastest(wire, ways)


class Collectives:
    """All-gathers and reduce-scatters of a group's ranks, two at least, who all ask for the same ones in the same order.

    `store`: where these ranks meet, under names that nobody else uses; they do at the first one. After a failure, or beyond
    `timeout`, that and all later ones end in a RuntimeError on every rank. `choose`: the way that they go.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        choose: Callable[[Wire], Way] = fastest,
    ) -> None:
        self.timeout, self._choose = timeout, choose
        self._meet = partial(Wire, dist.PrefixStore("direct/", store), rank, size, timeout)
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._wire: Wire | None = None
        self._failure: BaseException | None = None

    def all_gather(self, outputs: Sequence[Tensor], block: Tensor) -> Future[None]:
        """Begin to write every rank's `block` to its output."""
        flat = [output.view(-1) for output in outputs]
        return self._submit(lambda: self._way.all_gather(flat, block.view(-1)))

    def reduce_scatter(self, output: Tensor, rows: Sequence[Tensor]) -> Future[None]:
        """Begin to write the sum of all ranks' rows for this one to `output`; see `Staggered`."""
        flat = [row.view(-1) for row in rows]
        return self._submit(lambda: self._way.reduce_scatter(output.view(-1), flat))

    def close(self) -> None:
        """Break the connections once what was asked for is done, or has failed."""
        self._jobs.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)

    def _submit(self, job: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="gradwire-collectives", daemon=True)
            self._thread.start()
        self._jobs.put((job, future))
        return future

    def _serve(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            try:
                self._run(job)
                future.set_result(None)
            except BaseException as error:  # whatever it is, who waits must learn of it
                future.set_exception(error)
            del item, job, future
        self._wire = None

    def _run(self, job: Callable[[], None]) -> None:
        if self._failure is not None:
            raise RuntimeError(f"an earlier collective of this group has failed: {self._failure}")
        try:
            if self._wire is None:
                self._wire = self._meet()
                self._wire.limit(self.timeout)
                self._way = self._choose(self._wire)
            self._wire.limit(self.timeout)
            job()
        except BaseException as error:
            self._failure, self._wire = error, None  # closes the connections, so that the others learn of it
            del self._way
            raise
