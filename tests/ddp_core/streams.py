"""What stands in for CUDA's streams where there is no GPU."""

from contextlib import contextmanager

import torch


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
