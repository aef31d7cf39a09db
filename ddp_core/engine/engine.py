"""Runs compressors' programs over a transport, and ends them all together when one fails.

One rule: the order of collectives on a channel is a function of the order of buckets alone, the same on every rank.
Completion times differ between ranks, so nothing is ever started because something else has ended.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta

import torch

from ...compress.protocol.layout import Scope
from ...kernels import pool
from ..transport.lost_ranks import explained
from ..transport.protocol import DEFAULT_TIMEOUT, Pending, Transport
from ..transport.same_setup import agree
from .lanes import Driver, HookError, Lanes, ProgramError, Task, WaitedTask
from .side_stream import NO_LIMIT, SideStream

logger = logging.getLogger(__name__)
DEVICES = ("cpu", "cuda")
FORKED = (
    "this process was forked after the model was set up for training on several ranks: its buckets and connections are the "
    "parent's. Run such a backward in the parent, start the process by spawn, or use a copy of the bare module here"
)
_inherited: list[Engine] = []


class Engine:
    """The tasks of one rank over one transport, for tensors on one device.

    `timeout` limits every wait on the CPU; with NCCL the group's own limit applies. After an error, in a program or on
    the wire, all live tasks end with that error and every later call says so: nothing hangs. `on_idle` is called, on any
    thread, when no task is live any more. Raises ValueError for a device that is neither a CPU nor CUDA's.
    """

    def __init__(
        self,
        transport: Transport,
        device: torch.device,
        timeout: timedelta = DEFAULT_TIMEOUT,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        if device.type not in DEVICES:
            raise ValueError(f"gradients are reduced on {' and '.join(DEVICES)}, not on {device.type}")
        self.transport = transport
        self.device = device
        self._timeout, self._on_idle = timeout, on_idle
        self._lock = threading.Lock()
        self._live: dict[Task, None] = {}
        self._failure: str | None = None  # why it reduces no more gradients
        self._closed = False
        self._process = os.getpid()
        self._on_cuda = device.type == "cuda"
        self._beside: Driver = (
            SideStream(transport, device, self._ended) if self._on_cuda else Lanes(transport, timeout, self._ended)
        )
        self._gathers: Driver = SideStream(transport, device, self._ended) if self._on_cuda else self._beside
        self._drivers = dict.fromkeys((self._beside, self._gathers))  # each once, in this order

    def prepare(self, rounds: int, scopes: Sequence[Collection[Scope]] = ()) -> None:
        """Make ready for tasks of `rounds` rounds, each among the ranks of some scopes, or all of them.

        A collective call, made by all ranks at the same bucket.
        """
        self._refuse_if_failed()
        self.transport.open(rounds, scopes)

    def agree(self, text: str) -> None:
        """Raise ValueError on every rank unless all ranks pass the same text. A collective call."""
        self._refuse_if_failed()
        way_out = "; use the same compressor and model on all ranks, and load the same checkpoint of it on all of them"
        agree(text, self.transport, what="the setup of their first bucket", way_out=way_out)

    def submit(self, task: Task, *, on_wait: bool = False, gathers: bool = False) -> Pending:
        """Run a bucket's task after those submitted before; returns at once.

        `on_wait`: whoever waits for it runs it, once its first request was started here: with nothing to compute beside
        backward, no other thread or stream need take part. Until all tasks so far have ended, the next ones go the same
        way, and are waited for in this order: otherwise ranks would differ in the order of later rounds, where there are
        any. `gathers`: it gathers weights, which on a GPU do not wait for what reductions compute; but the collectives of
        both share the group, in the order in which they were started. Waiting gives the program's result, or raises
        RuntimeError with the task's label and the cause.
        """
        with self._lock:
            if self._failure is not None or self._closed:
                self._refuse_if_failed()
            self._live[task] = None
        if gathers and self._on_cuda:
            return self._gathers.submit(task)
        if not on_wait:
            return self._beside.submit(task)
        task.left_to_waiter, waited = True, WaitedTask(task, self.transport, self._ended)
        noted = not self._on_cuda or task.now is not time.perf_counter  # on a GPU it is dear, so in measured steps only
        try:
            waited.runs = task.advance(
                self.transport, 0, NO_LIMIT if self._on_cuda else self._timeout, notes_arrival=noted
            )
        except Exception as error:  # raised where it is waited for
            waited.error = error
        return waited

    def send_all(self) -> None:
        """Have all that was submitted come to its end, whoever waits for what, and in whatever order."""
        self._beside.send_all()

    def follow(self) -> None:
        """Have the current stream of a GPU wait for all that was submitted."""
        for driver in self._drivers:
            driver.follow()

    def follow_gathers(self) -> None:
        """Have the current stream of a GPU wait for the gathers of weights that were submitted."""
        self._gathers.follow()

    @property
    def failed(self) -> bool:
        """True if it reduces no more gradients."""
        return self._failure is not None or self._closed

    @property
    def idle(self) -> bool:
        """True if all tasks so far have ended."""
        return self._failure is None and not self._live

    @property
    def runs(self) -> bool:
        """True if any task runs. One that whoever waits for it runs does so from then on."""
        with self._lock:
            return not all(task.left_to_waiter for task in self._live)

    def close(self, limit: timedelta | None = None) -> None:
        """End the engine's threads; what is under way comes to its end first, if it does within `limit`."""
        if os.getpid() != self._process:
            _inherited.append(self)  # in a fork: threads and connections are the parent's, and cannot be ended here
            return
        deadline = time.monotonic() + (limit or self._timeout).total_seconds()
        with self._lock:
            self._closed = True  # a task that is submitted from now on would wait behind the end of the threads
        for driver in self._drivers:
            driver.close(deadline)
        with self._lock:
            live, self._live = list(self._live), {}
        for task in live:
            task.drop(deadline)  # nobody has waited for it, or it came too late
            if task.future is not None:
                kind = HookError if task.needs_future else ProgramError
                task.future.set_exception(kind(f"{task.label}: close() was called"))  # type: ignore[arg-type]
        if self._failure is None:
            self.transport.finish(deadline)
        else:
            self.transport.abort()
        pool.release()

    def _refuse_if_failed(self) -> None:
        if self._failure is not None or self._closed:
            why = self._failure or "close() was called"
            raise RuntimeError(f"the engine has failed or was closed, and reduces no more gradients: {why}")

    def _ended(self, task: Task, error: BaseException | None) -> BaseException | None:
        """A driver is done with a task; what to raise to whoever waits for it."""
        if error is not None:
            return self._fail(task.label, error)
        with self._lock:
            mine = task in self._live
            self._live.pop(task, None)
        if mine and task.future is not None:
            assert task.result is not None
            task.future.set_result(task.result)
        if not self._live:
            self._on_idle()
        return None

    def _fail(self, label: str, error: BaseException) -> ProgramError:
        """End all that is under way, with the first error, which is returned."""
        told = explained(error, self.transport.group) if isinstance(error, RuntimeError) else error
        with self._lock:
            if self._failure is None:
                self._failure = f"{label}: {type(error).__name__}: {told}"
            live, self._live = list(self._live), {}
        failure, for_hook = ProgramError(self._failure), HookError(self._failure)
        failure.__cause__ = for_hook.__cause__ = error
        for task in live:
            task.closed = True
            if task.future is not None:
                task.future.set_exception(for_hook if task.needs_future else failure)  # type: ignore[arg-type]
        self.transport.abort()  # after the futures: it may wait for what is in flight
        for task in live:
            try:
                task.close()
            except Exception:  # a program that objects to its end must not keep the others from theirs
                logger.warning("%s did not close", task.label, exc_info=True)
        self._on_idle()
        return failure
