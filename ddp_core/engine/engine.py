"""Runs compressors' programs on process groups, and reports what that cost.

One rule: the order of collectives on a process group is a function of the order of buckets alone, the same on every
rank. Completion times differ between ranks, so nothing is ever started because something else has ended.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ...compress.protocol import Program
from ...compress.simulate import Traffic
from ..transport.collectives import exchange, is_paced
from ..transport.host_sums import SharedBuffer
from .lanes import Lanes
from .side_stream import SideStream
from .sums import GroupSum, Sum, Work
from .task import Job, ProgramError, Record

logger = logging.getLogger(__name__)
DEFAULT_TIMEOUT = timedelta(minutes=30)
DEVICES = ("cpu", "cuda")


class Engine:
    """The programs of one rank for one process group and device.

    `timeout` limits every wait on the CPU; with NCCL the group's own limit applies. After an error, in a program or on
    the wire, all live programs end with that error and every later call says so: nothing hangs. Raises ValueError for a
    device that is neither a CPU nor CUDA's.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        if device.type not in DEVICES:
            raise ValueError(f"gradients are reduced on {' and '.join(DEVICES)}, not on {device.type}")
        self.group = group
        self.device = device
        self._lock = threading.Lock()
        self._live: dict[Job, None] = {}
        self._sums: list[Sum] = []
        self._shared: weakref.ref[SharedBuffer] | None = None  # the last one that was summed
        self._timeout = timeout
        self._failure: str | None = None  # why it reduces no more gradients
        self._closed = False
        self._executor: Lanes | SideStream = (
            SideStream(group, device, self._ended) if device.type == "cuda" else Lanes(group, timeout, self._ended)
        )

    def prepare(self, rounds: int) -> None:
        """Make ready for programs of `rounds` rounds. A collective call, made by all ranks at the same bucket."""
        self._refuse_if_failed()
        self._executor.ensure(rounds)

    def agree(self, text: str) -> None:
        """Raise ValueError on every rank unless all ranks pass the same text. A collective call."""
        self._refuse_if_failed()
        texts = exchange(text, self.group, self.device)
        differing = [rank for rank, other in enumerate(texts) if other != texts[0]]
        if differing:
            raise ValueError(
                f"the ranks were set up differently: rank 0 has {texts[0]}, "
                f"rank {differing[0]} has {texts[differing[0]]}; use the same compressor and model on all ranks"
            )

    def submit(
        self, program: Program[Tensor], label: str, *, at_once: bool = False
    ) -> tuple[torch.futures.Future[Tensor], Record]:
        """Run a bucket's program after those submitted before; returns at once.

        `at_once`: it has nothing to compute before its first request, so no other thread need wake up for that. The
        future holds the program's result, or raises RuntimeError with `label` and the cause.
        """
        self._refuse_if_failed()
        devices: list[int | str | torch.device] | None = [self.device] if self.device.type == "cuda" else None
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        job = Job(label, program, self.group.size(), future)
        with self._lock:
            self._live[job] = None
        self._executor.submit(job, at_once=at_once)
        return future, job.record

    def sum(
        self,
        tensor: Tensor,
        result: Tensor,
        cost: Traffic,
        label: Callable[[], str],
        shared: SharedBuffer | None = None,
    ) -> Sum | None:
        """Begin to add up a tensor over ranks, in place, behind what was submitted before; returns at once.

        `result`: what those who wait for it get. `cost`: what it takes. `shared`: the tensor as memory of all ranks, which
        needs no process group. There is less to do than for a program that asks for the sum. None, with nothing done, where
        it could not leave at once, or where only programs can be waited for as is wanted.
        """
        if self._failure is not None or self._closed:
            self._refuse_if_failed()
        if is_paced():
            return None
        if shared is not None:
            begin: Callable[[], Work] = shared.sum
            self._shared = weakref.ref(shared)  # not to keep its memory
        elif (group := self._executor.free_group()) is not None:
            begin = partial(GroupSum, tensor, group)
        else:
            return None
        started = Sum(begin, result, cost, self._timeout, lambda error: self._fail(label(), error))
        self._sums = [other for other in self._sums if other.work is not None]
        self._sums.append(started)
        return started

    @property
    def failed(self) -> bool:
        """Whether a program or a sum did not come to its end."""
        return self._failure is not None

    def rest(self, deadline: float) -> None:
        """Wait until no program runs; raise RuntimeError where one still does at `deadline`, by time.monotonic."""
        if not self._executor.rest(deadline):
            raise RuntimeError(
                "buckets of a backward that did not come to its end are still under way: other ranks do not answer"
            )

    def close(self, limit: timedelta | None = None) -> None:
        """End the engine's threads; what is under way comes to its end first, if it does within `limit`."""
        deadline = time.monotonic() + (limit or self._timeout).total_seconds()
        self._drop_sums(deadline)
        self._executor.close(deadline)
        self._closed = True

    def _refuse_if_failed(self) -> None:
        if self._failure is not None or self._closed:
            why = self._failure or "close() was called"
            raise RuntimeError(f"the engine has failed or was closed, and reduces no more gradients: {why}")

    def _ended(self, job: Job, error: BaseException | None) -> None:
        if error is not None:
            self._fail(job.label, error)
            return
        with self._lock:
            mine = job in self._live
            self._live.pop(job, None)
        if mine:
            job.future.set_result(job.result)  # type: ignore[arg-type]

    def _fail(self, label: str, error: BaseException) -> ProgramError:
        """End all that is under way, with the first error, which is returned."""
        with self._lock:
            if self._failure is None:
                self._failure = f"{label}: {type(error).__name__}: {error}"
            live, self._live = list(self._live), {}
        failure = ProgramError(self._failure)
        failure.__cause__ = error
        for other in live:
            other.closed = True
            other.future.set_exception(failure)  # type: ignore[arg-type]
        self._executor.abort()  # after the futures: it may wait for what is in flight
        self._drop_sums()
        if self._shared is not None and (shared := self._shared()) is not None:
            shared.sums.give_up()  # others may wait for what this rank will not begin
        for other in live:
            try:
                other.close()
            except Exception:  # a program that objects to its end must not keep the others from theirs
                logger.warning("%s did not close", other.label, exc_info=True)
        return failure

    def _drop_sums(self, deadline: float = 0.0) -> None:
        """Give up the sums that have not arrived by `deadline`, and keep none: they know this engine."""
        sums, self._sums = self._sums, []
        for started in sums:
            started.drop(deadline)
