"""Threads that save beside a training: one beside each request of a transport, or one again and again."""

import threading
import time

from gradwire.compress.protocol.requests import AllGather, AllReduce, AllToAll, ReduceScatter
from gradwire.ddp_core.transport.protocol import Decorated, Reply

ALL = (AllGather, AllReduce, AllToAll, ReduceScatter)


class Saves:
    """A decorator of transports: `save`, once it is given, runs on a thread of its own before each request and after.

    `kinds`: of requests. `waits`: the request waits for the save; else `join` does.
    """

    def __init__(self, *, waits=True):
        self.save, self.results, self.errors, self.kinds = None, [], [], ALL
        self.waits, self.threads = waits, []

    def __call__(self, transport):
        return SavingTransport(transport, self)

    def once(self):
        """One save on a thread of its own, which comes to its end."""
        if self.save is not None:
            thread = threading.Thread(target=self._saved, args=(self.save,))
            thread.start()
            self.threads.append(thread)
            if self.waits:
                self.join()

    def join(self):
        """Wait for all saves."""
        for thread in self.threads:
            thread.join(60)
            if thread.is_alive():
                self.errors.append(TimeoutError("a save waits for the step that waits for it"))
        self.threads = []

    def _saved(self, save):
        try:
            self.results.append(save())
        except Exception as error:
            self.errors.append(error)


class SavingTransport(Decorated):
    """Saves before each request starts, and when its reply is there."""

    def __init__(self, inner, saves):
        super().__init__(inner)
        self._saves = saves

    def start(self, request, channel):
        if not isinstance(request, self._saves.kinds):
            return self.inner.start(request, channel)
        self._saves.once()
        return SavingReply(self.inner.start(request, channel), self._saves)


class SavingReply(Reply):
    """A reply."""

    def __init__(self, inner, saves):
        self._inner, self._saves = inner, saves

    def wait(self, timeout):
        reply = self._inner.wait(timeout)
        self._saves.once()
        return reply

    def abandon(self):
        self._inner.abandon()


class Busy(threading.Thread):
    """Calls a function again and again until it is stopped; keeps what it returned, and what it raised."""

    def __init__(self, function):
        super().__init__(daemon=True)
        self.function, self.results, self.error, self.over = function, [], None, False

    def run(self):
        try:
            while not self.over:
                self.results.append(self.function())
        except Exception as error:
            self.error = error

    def once_more(self):
        """Wait until it has begun a call from now on, and ended it."""
        calls = len(self.results) + 2
        while len(self.results) < calls and self.is_alive():
            time.sleep(0.001)

    def stop(self):
        self.over = True
        self.join()
        return self.results
