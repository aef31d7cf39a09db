"""Direct collectives on a thread of their own, in the order in which they are asked for."""

from __future__ import annotations

import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet  # which is no TimeoutError before Python 3.11
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from .hosts import has_neighbours, hosts_of
from .rails import Rails, rails
from .wire import Staggered, Wire

GLOO = "gloo"
PINNED = "GRADWIRE_COLLECTIVES"  # "gloo" in the environment turns direct collectives off
JOIN_SECONDS = 5.0
UNLIMITED = timedelta(0)  # torch's word for a wait without a limit of its own
Way: TypeAlias = Staggered | Rails
Ways: TypeAlias = Mapping[str, Way]
Job: TypeAlias = Callable[[Ways], None]
Jobs: TypeAlias = "SimpleQueue[tuple[Job, timedelta, Future[None]] | None]"


def best_ways(wire: Wire) -> Ways:
    """Return the way of each kind of collective, by the kind's name, without those that Gloo carries. A collective call.

    Gathers and sums send no block twice into a host: with several ranks on any, they take rails, or Gloo where these lack.
    Within one host an all-to-all in chunks takes two to four times as long as Gloo's.
    """
    swap = Staggered(wire)
    if not has_neighbours(wire):
        return dict.fromkeys(("all_to_all", "all_gather", "reduce_scatter"), swap)
    hosts = hosts_of(wire)
    once = rails(wire, hosts)
    ways: Ways = {} if once is None else {"all_gather": once, "reduce_scatter": once}
    return ways if len(hosts) == 1 else {**ways, "all_to_all": swap}


class Direct(dist.Work):
    """A collective that has begun, and the tensors that it writes."""

    def __init__(self, begun: Future[None], written: Sequence[Tensor]) -> None:
        super().__init__()
        self._begun, self._written = begun, list(written)

    def wait(self, timeout: timedelta = UNLIMITED) -> bool:
        """Wait for it; RuntimeError where it fails or takes longer, and beyond the group's time limit it fails."""
        try:
            self._begun.result(timeout.total_seconds() if timeout > UNLIMITED else None)
        except NotYet as error:
            raise RuntimeError(f"the collective has not ended within {timeout}") from error
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """One that ends with it."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self._begun.add_done_callback(partial(_end, future, self._written))
        return future

    def is_completed(self) -> bool:
        """Return True if it has ended, well or not."""
        return self._begun.done()

    def is_success(self) -> bool:
        """Return True if it has ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of the collective, if it has ended with one."""
        return self._begun.exception() if self._begun.done() else None

    def result(self) -> list[Tensor]:
        """Return the tensors that the collective writes."""
        return self._written


def _end(future: torch.futures.Future[list[Tensor]], written: list[Tensor], begun: Future[None]) -> None:
    """End a work's future. It holds no reference to the work: its tensors would else stay until garbage is collected."""
    if (error := begun.exception()) is not None:
        future.set_exception(error)  # type: ignore[arg-type]  # torch takes any
    else:
        future.set_result(written)


class Collectives:
    """Direct collectives of a group's ranks, two at least, who all ask for the same ones in the same order.

    `store`: where these ranks meet, under names that nobody else uses; they do at the first one. After a failure, or beyond
    `timeout`, that and all later ones end in a RuntimeError on every rank.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        make_ways: Callable[[Wire], Ways] = best_ways,
    ) -> None:
        self.timeout = timeout
        self._jobs: Jobs = SimpleQueue()
        self._kinds: Sequence[str] | None = None
        connect = partial(Wire, dist.PrefixStore("direct/", store), rank, size, timeout)
        work = partial(_work, self._jobs, connect, make_ways)
        self._thread = threading.Thread(target=work, name="gradwire-collectives", daemon=True)
        self._lock = threading.RLock()  # held while a job is handed over: behind the end nobody would do it
        self._ended = threading.Event()
        ending = self._jobs, self._thread, self._lock, self._ended
        self.close = weakref.finalize(self, _close, *ending)  # a thread inside torch aborts the exit

    def kinds(self) -> Sequence[str]:
        """The names of the collectives that these ranks do. A collective call, which blocks when it is the first."""
        if self._kinds is None:
            kinds: list[str] = []
            self._submit(lambda ways: kinds.extend(ways)).result()
            self._kinds = kinds
        return self._kinds

    def all_gather(self, outputs: Sequence[Tensor], block: Tensor) -> Future[None]:
        """Begin to write every rank's `block` to its output."""
        flat = [output.view(-1) for output in outputs]
        return self._submit(lambda ways: ways["all_gather"].all_gather(flat, block.view(-1)))

    def all_to_all(self, outputs: Sequence[Tensor], rows: Sequence[Tensor]) -> Future[None]:
        """Begin to write every rank's row for this one to its output."""
        received, given = ([each.view(-1) for each in tensors] for tensors in (outputs, rows))
        return self._submit(lambda ways: ways["all_to_all"].all_to_all(received, given))

    def reduce_scatter(self, output: Tensor, rows: Sequence[Tensor]) -> Future[None]:
        """Begin to write the sum of all ranks' rows for this one to `output`."""
        flat = [row.view(-1) for row in rows]
        return self._submit(lambda ways: ways["reduce_scatter"].reduce_scatter(output.view(-1), flat))

    def _submit(self, job: Job) -> Future[None]:
        future: Future[None] = Future()
        with self._lock:
            if not self._ended.is_set():
                if self._thread.ident is None:
                    self._thread.start()
                self._jobs.put((job, self.timeout, future))
            if self._ended.is_set():  # perhaps by a signal's handler on this thread, just now
                raise RuntimeError("the process group was shut down: its collectives have ended")
        return future


@torch.inference_mode()  # or this thread could not write to tensors made in it, nor read those that require gradients
def _work(jobs: Jobs, connect: Callable[[], Wire], make_ways: Callable[[Wire], Ways]) -> None:
    """Do what is asked for, until the end or the first failure; then end the rest."""
    wire: Wire | None = None
    ways: Ways | None = None
    while (item := jobs.get()) is not None:
        job, timeout, future = item
        try:
            wire = wire or connect()
            wire.limit(timeout)
            ways = make_ways(wire) if ways is None else ways
            job(ways)
            future.set_result(None)
        except BaseException as error:  # whatever it is, who waits must learn of it
            _disconnect(wire, ways)
            wire = ways = None
            del item, job
            traceback.clear_frames(error.__traceback__)  # whose works hold the connections
            future.set_exception(error)
            _refuse(jobs, str(error))
            return
        del item, job, future  # which hold tensors


def _disconnect(wire: Wire | None, ways: Ways | None) -> None:
    """Have the other ranks learn of a failure, however long an exception keeps what it happened in."""
    for way in set((ways or {}).values()):
        way.close()
    if wire is not None:
        wire.close()


def _refuse(jobs: Jobs, why: str) -> None:
    while (item := jobs.get()) is not None:
        item[2].set_exception(RuntimeError(f"an earlier collective of this group has failed: {why}"))


def _close(jobs: Jobs, thread: threading.Thread, lock: AbstractContextManager[Any], ended: threading.Event) -> None:
    """Break the connections once what was asked for is done, or has failed."""
    with lock:
        ended.set()
        jobs.put(None)
    if thread.ident is not None and thread is not threading.current_thread():
        thread.join(JOIN_SECONDS)
