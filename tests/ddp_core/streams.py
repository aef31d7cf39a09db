"""What stands in for CUDA's streams where there is no GPU."""

from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace

import torch

from gradwire.ddp_core.engine import engine, side_stream

LIMIT = timedelta(seconds=20)


class StandIn:
    """In the place of torch.cuda's streams and events. `current`: the stream of the moment. Subclasses make the others."""

    def __init__(self, current):
        self.current = current

    def take_the_place(self, monkeypatch):
        for name in ("Stream", "Event", "stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda index: self.current)

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class Idle(StandIn):
    """Streams of one name each, and events of which nothing is noted."""

    def __init__(self):
        super().__init__(self.Stream())

    def Stream(self, device=None, priority=0):
        return SimpleNamespace(device_index=0, wait_stream=lambda other: None)

    def Event(self):
        return SimpleNamespace(record=lambda stream: None, wait=lambda stream: None)


class SideStreamOnCpu(side_stream.SideStream):
    def __init__(self, transport, timeout, on_end):
        super().__init__(transport, torch.device("cuda", 0), on_end)

    def close(self, deadline):
        """It may outlive the stand-ins."""


def side_streams_on_cpu(monkeypatch):
    """Have engines on the CPU carry their tasks as those on a GPU do."""
    Idle().take_the_place(monkeypatch)
    monkeypatch.setattr(engine, "Lanes", SideStreamOnCpu)
    monkeypatch.setattr(side_stream, "NO_LIMIT", LIMIT)  # which holds on the CPU
    init = torch.futures.Future.__init__
    monkeypatch.setattr(side_stream.Awaited, "__init__", lambda future, *, devices: init(future))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
