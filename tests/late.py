"""A transport whose replies come late, from behind a stream or a thread of its own, and are NaN until then.

Whoever reads a reply before he has waited for it computes NaN, and whoever writes to a request's tensor too early changes
what is sent: nothing is read from it at once.
"""

import dataclasses
import time
from queue import SimpleQueue
from threading import Event, Thread

import torch

from gradwire.compress import AllReduce
from gradwire.ddp_core.transport.protocol import Decorated

CYCLES = 4_000_000  # of a GPU: two milliseconds
SECONDS = 0.002


def poisoned(tensor):
    """The same memory, of NaN, or of the largest numbers where there is none."""
    return tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)


class Late(Decorated):
    """Carries requests by another transport, and delivers what it replies late."""

    def __init__(self, inner, limit):
        super().__init__(inner)
        self._limit = limit
        self._streams, self._queues = {}, {}

    @property
    def carried(self):
        """Whether anything was."""
        return bool(self._streams or self._queues)

    def start(self, request, channel):
        """Where it lies decides who delivers it."""
        return (self._on_stream if request.tensor.is_cuda else self._on_thread)(request, channel)

    def _on_stream(self, request, channel):
        device = request.tensor.device
        stream = self._streams.setdefault((device, channel), torch.cuda.Stream(device))
        request.tensor.record_stream(stream)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            torch.cuda._sleep(CYCLES)
            reply = self._carried(request, channel, lambda: torch.cuda._sleep(CYCLES))
            return OnStream(reply, stream.record_event())

    def _on_thread(self, request, channel):
        if channel not in self._queues:
            self._queues[channel] = SimpleQueue()
            Thread(target=self._deliver, args=(channel,), daemon=True).start()
        pending = OnThread(request)
        self._queues[channel].put(pending)
        return pending

    def _deliver(self, channel):
        while (pending := self._queues[channel].get()) is not None:
            time.sleep(SECONDS)
            try:
                pending.reply = self._carried(pending.request, channel, lambda: time.sleep(SECONDS))
            finally:
                pending.there.set()

    def _carried(self, request, channel, sleep):
        """The reply: NaN while `sleep` lasts. Of an all-reduce it takes the place of what was sent."""
        sent = dataclasses.replace(request, tensor=request.tensor.clone())
        if isinstance(request, AllReduce):
            poisoned(request.tensor)
        answer = self.inner.start(sent, channel).wait(self._limit)
        reply = request.tensor if isinstance(request, AllReduce) else poisoned(torch.empty_like(answer))
        sleep()
        return reply.copy_(answer)

    def abort(self):
        """The threads end, and the inner transport."""
        for queue in self._queues.values():
            queue.put(None)
        self.inner.abort()


class OnStream:
    """A reply that a stream delivers: whoever waits orders his own behind it."""

    arrived = None

    def __init__(self, reply, delivered):
        self.reply, self._delivered = reply, delivered

    def wait(self, timeout):
        """The reply, maybe before it is there."""
        stream = torch.cuda.current_stream(self.reply.device)
        stream.wait_event(self._delivered)
        self.reply.record_stream(stream)
        return self.reply

    def expect_late_wait(self, now):
        """Nobody notes when it is there."""

    def abandon(self):
        """It comes anyway."""


class OnThread:
    """A reply that a thread delivers."""

    arrived = None

    def __init__(self, request):
        self.request, self.reply, self.there = request, None, Event()

    def wait(self, timeout):
        """The reply when it is there."""
        assert self.there.wait(timeout.total_seconds())
        return self.reply

    def expect_late_wait(self, now):
        """Nobody notes when it is there."""

    def abandon(self):
        """It comes anyway."""
