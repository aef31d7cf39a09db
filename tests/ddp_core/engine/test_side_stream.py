"""The side stream's order of events, with stand-ins for CUDA's streams that note what they are asked for."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from gradwire.compress import AllReduce
from gradwire.ddp_core.engine.side_stream import SideStream
from gradwire.ddp_core.engine.task import Task

LIMIT = timedelta(seconds=1)
DEVICE = torch.device("cuda", 0)


class Streams:
    """Streams and events by name. `log`: what was done, in order."""

    def __init__(self):
        self.log = []
        self.events = 0
        self.current = SimpleNamespace(name="backward", device_index=0)

    def Stream(self, device, priority):
        return SimpleNamespace(name="side", device_index=device.index)

    def Event(self):
        self.events += 1
        return Event(self.log, f"event {self.events}")

    def set_stream(self, stream):
        self.current = stream


class Event:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def record(self, stream):
        self.log.append(f"{stream.name} records {self.name}")

    def wait(self, stream):
        self.log.append(f"{stream.name} waits for {self.name}")


class Wire:
    """A transport whose replies are there at once."""

    world_size = 1

    def __init__(self, streams):
        self.streams = streams

    def open(self, channels):
        """As many as you like."""

    def start(self, request, channel):
        self.streams.log.append(f"{self.streams.current.name} sends {request.tensor.tolist()}")
        return SimpleNamespace(wait=lambda timeout: request.tensor, arrived_at=lambda: None, abandon=lambda: None)


@pytest.fixture
def streams(monkeypatch):
    stand_in = Streams()
    monkeypatch.setattr(torch.cuda, "Stream", stand_in.Stream)
    monkeypatch.setattr(torch.cuda, "Event", stand_in.Event)
    monkeypatch.setattr(torch.cuda, "set_stream", stand_in.set_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: stand_in.current)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: stand_in.log.append("keeps memory"))
    return stand_in


def side_stream(streams, on_end=lambda task, error: error):
    return SideStream(Wire(streams), DEVICE, on_end)


def two_rounds(tensor):
    reply = yield AllReduce(tensor)
    return (yield AllReduce(reply + 10))


def test_a_program_runs_behind_the_gradients_and_whoever_waits_runs_behind_it(streams):
    pending = side_stream(streams).submit(Task(two_rounds(torch.tensor([1.0])), "bucket 0"))
    assert streams.current.name == "backward"
    assert pending.wait(LIMIT).tolist() == [11.0]
    assert streams.log == [
        "backward records event 1",
        "side waits for event 1",
        "side sends [1.0]",
        "side sends [11.0]",
        "side records event 2",
        "backward waits for event 2",
        "keeps memory",
    ]


def test_a_program_that_raises_gives_the_stream_back_and_raises_where_it_is_waited_for(streams):
    def fails():
        raise ArithmeticError("on purpose")
        yield

    pending = side_stream(streams, lambda task, error: RuntimeError(f"{task.label}: {error}")).submit(
        Task(fails(), "bucket 0")
    )
    assert streams.current.name == "backward"
    with pytest.raises(RuntimeError, match="bucket 0: on purpose"):
        pending.wait(LIMIT)


def test_a_backward_inside_autocast_does_not_cast_what_a_program_computes(streams):
    def asks():
        seen.append(torch.is_autocast_enabled("cuda"))
        return (yield AllReduce(torch.zeros(1)))

    seen = []
    torch.set_autocast_enabled("cuda", True)
    try:
        side_stream(streams).submit(Task(asks(), "bucket 0"))
        assert torch.is_autocast_enabled("cuda")
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert seen == [False]
