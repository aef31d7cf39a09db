"""The times that a planner gets of a GPU's steps, on streams that are played through: each knows when it will be done.

The side stream comes to a reply behind the next gradient; what the link took must be told all the same.
"""

from datetime import timedelta

import pytest
import torch

from gradwire.compress import AllReduce, Ranks
from gradwire.ddp_core.engine.lanes import Task
from gradwire.ddp_core.engine.side_stream import SideStream
from gradwire.ddp_core.measure.clock import CudaClock
from gradwire.ddp_core.overlap.measured_step import Measurements, NotedStep
from gradwire.ddp_core.transport.protocol import Reply, Transport

from ..streams import StandIn

DEVICE, LIMIT = torch.device("cuda", 0), timedelta(seconds=1)
ALPHA, BETA = 0.25, 0.125  # seconds a collective and a byte
GRADIENT, LAYER, ENCODE = 10.0, 3.0, 0.5  # seconds of backward, of forward, and of a program's arithmetic


class Stream:
    """`done`: when all that was queued on it will be, in seconds."""

    device_index = 0

    def __init__(self, done=0.0):
        self.done = done


class Event:
    def __init__(self, enable_timing=False):
        self.at = None

    def record(self, stream):
        self.at = stream.done

    def wait(self, stream):
        stream.done = max(stream.done, self.at)

    def synchronize(self):
        assert self.at is not None

    def elapsed_time(self, other):
        return 1000 * (other.at - self.at)


class Streams(StandIn):
    """CUDA's, and its events."""

    Event = Event

    def __init__(self):
        super().__init__(Stream())
        self.backward = self.current

    def Stream(self, device, priority):
        return Stream()


class Wire(Transport):
    """A link with a stream of its own, on which requests follow each other."""

    ranks = Ranks(2)

    def __init__(self, streams):
        self.streams, self.link = streams, Stream()

    def start(self, request, channel):
        began = max(self.link.done, self.streams.current.done)
        self.link.done = began + ALPHA + BETA * request.sent_bytes(self.ranks.world_size)
        return Replied(self.streams, request.tensor, self.link.done)


class Replied(Reply):
    def __init__(self, streams, tensor, at):
        self.streams, self.tensor, self.at = streams, tensor, at

    def wait(self, timeout):
        self.streams.current.done = max(self.streams.current.done, self.at)
        return self.tensor

    def expect_late_wait(self, now):
        with self.streams.stream(Stream(self.at)):
            self.arrived = now()


@pytest.fixture
def streams(monkeypatch):
    stand_in = Streams()
    stand_in.take_the_place(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    return stand_in


def program(streams, tensor, rounds):
    """Arithmetic, then a request, in turns."""
    for _ in range(rounds):
        streams.current.done += ENCODE
        tensor = yield AllReduce(tensor)
    return tensor


def noted(streams, clock, sizes, rounds, computes):
    """A step with a bucket of each of so many bytes, which `computes` as many times as long as above."""
    driver, forward_end = SideStream(Wire(streams), DEVICE, lambda task, error: error), clock.now()
    ready, tasks, pendings = {}, [], []
    for bucket, size in enumerate(sizes):
        streams.backward.done += computes * GRADIENT
        ready[bucket] = clock.now()
        tasks.append(Task(program(streams, torch.zeros(size, dtype=torch.uint8), rounds), "", now=clock.now))
        pendings.append(driver.submit(tasks[-1]))
    driver.send_all()
    began, waits = clock.now(), {}
    for bucket in reversed(range(len(sizes))):
        streams.backward.done += computes * LAYER
        needed = clock.now()
        pendings[bucket].wait(LIMIT)
        waits[bucket] = needed, clock.now()
    records = [task.record for task in tasks]
    return NotedStep(forward_end, ready, (began, clock.now()), [waits[bucket] for bucket in range(len(sizes))], records)


@pytest.mark.parametrize("computes", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("rounds", [1, 2])
def test_a_model_has_the_computation_and_the_link_whichever_of_them_is_slower(streams, rounds, computes):
    clock, sizes = CudaClock(DEVICE), (16, 4, 64, 8)
    measurements = Measurements(clock)
    measurements.add(noted(streams, clock, sizes, rounds, computes))
    model = measurements.model(range(len(sizes)))
    assert model.backward == pytest.approx(computes * GRADIENT * len(sizes))
    assert model.forward == pytest.approx(computes * LAYER * len(sizes))
    for bucket, (piece, size) in enumerate(zip(model.pieces, sizes, strict=True)):
        assert piece.ready == pytest.approx(computes * GRADIENT * (bucket + 1))
        assert piece.needed == pytest.approx(computes * LAYER * (len(sizes) - bucket))
        assert piece.wire == pytest.approx(rounds * (ALPHA + BETA * size))
    if computes != 1.0:
        assert (measurements.exposed > 0) == (computes < 1)
