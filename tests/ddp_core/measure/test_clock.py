"""Marks of the host's clock and of a GPU's, with stand-ins for CUDA's events that know their time once they are reached."""

import copy
import pickle
import time
from types import SimpleNamespace

import pytest
import torch

from gradwire.ddp_core.measure.clock import Clock, CudaClock, clock_of

SECOND = 1000.0  # in milliseconds


class Device:
    """A GPU that reaches events when it is waited for. `log`: what was done; `duration`: of the work before each event."""

    def __init__(self):
        self.log, self.time, self.duration, self.capturing = [], 0.0, 2 * SECOND, False

    def Event(self, enable_timing=False):
        return Event(self, enable_timing)

    def current_stream(self, index):
        return f"current stream of {index}"

    def is_current_stream_capturing(self):
        return self.capturing


class Event:
    """As CUDA's, it raises where it is asked too early."""

    def __init__(self, device, enable_timing):
        self.device, self.enable_timing, self.recorded, self.reached = device, enable_timing, False, None

    def record(self, stream):
        self.recorded = True
        self.device.log.append(f"recorded on {stream}")

    def synchronize(self):
        assert self.recorded
        if self.reached is None:
            self.device.time += self.device.duration
            self.reached = self.device.time
        self.device.log.append("waited for")

    def query(self):
        return self.reached is not None

    def elapsed_time(self, other):
        for event in (self, other):
            if not event.enable_timing or event.reached is None:
                raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return other.reached - self.reached


@pytest.fixture
def device(monkeypatch):
    stand_in = Device()
    for name in ("Event", "current_stream", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, getattr(stand_in, name))
    return stand_in


def test_each_device_has_its_clock():
    assert isinstance(clock_of(torch.device("cpu")), Clock)
    assert isinstance(clock_of(torch.device("cuda", 1)), CudaClock)


def test_the_host_s_marks_are_its_time_and_cost_no_call_of_ours():
    clock = Clock()
    assert clock.now is time.perf_counter
    assert clock.took(1.5)
    assert clock.seconds(1.5, 4.0) == 2.5


def test_taking_marks_waits_for_nothing_and_goes_by_the_model_s_device(device):
    clock, before = CudaClock(torch.device("cuda", 1)), time.perf_counter()
    marks = [clock.now() for _ in range(3)]
    assert device.log == ["recorded on current stream of 1"] * 3
    assert before <= marks[0] <= marks[1] <= marks[2] <= time.perf_counter()
    assert all(map(clock.took, marks))


def test_seconds_are_the_device_s_and_both_marks_are_waited_for(device):
    clock = CudaClock(torch.device("cuda", 0))
    first, second, third = (clock.now() for _ in range(3))
    assert clock.seconds(first, second) == 2.0
    assert clock.seconds(second, first) == -2.0
    assert clock.seconds(first, third) == 4.0
    assert device.log.count("waited for") == 6


def test_whether_a_mark_was_reached_is_known_without_a_wait(device):
    clock = CudaClock(torch.device("cuda", 0))
    mark = clock.now()
    assert not clock.reached(mark)
    assert "waited for" not in device.log
    mark.event.synchronize()
    assert clock.reached(mark)
    assert clock.reached(1.5)
    assert Clock().reached(1.5)
    device.capturing = True  # where a question to an event of before the graph is an error
    assert not clock.reached(mark)


def test_a_mark_in_a_cuda_graph_has_no_event_and_is_not_taken_for_the_device_s(device):
    clock, device.capturing = CudaClock(torch.device("cuda", 0)), True
    mark = clock.now()
    assert type(mark) is float
    assert not clock.took(mark)
    assert not device.log


def test_who_reads_the_host_s_time_reads_any_mark_and_copies_know_it_alone(device):
    mark = CudaClock(torch.device("cuda", 0)).now()
    for other in (copy.deepcopy(mark), copy.copy(mark), pickle.loads(pickle.dumps(mark)), mark + 0.0):
        assert type(other) is float
        assert other == mark
    assert str(SimpleNamespace(at=mark)) == f"namespace(at={float(mark)!r})"
