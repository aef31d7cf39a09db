"""Tasks on the CPU: so many are on their way that a network is busy, and no more, since each has work memory."""

import threading
from datetime import timedelta

import pytest
import torch

from gradwire.compress import AllReduce, Ranks, all_reduce
from gradwire.compress.simulate import Traffic, traffic
from gradwire.ddp_core import Engine
from gradwire.ddp_core.engine import in_flight
from gradwire.ddp_core.engine.lanes import Task
from gradwire.ddp_core.transport.protocol import Reply, Transport

LIMIT = timedelta(seconds=20)
TASKS = 8


class Held(Transport):
    """Replies come when they are let go, one for each release."""

    ranks, group = Ranks(), None

    def __init__(self):
        self.released = threading.Semaphore(0)

    def start(self, request, channel):
        return HeldReply(self, request.tensor)


class HeldReply(Reply):
    def __init__(self, transport, tensor):
        self.transport, self.tensor = transport, tensor

    def wait(self, timeout):
        if not self.transport.released.acquire(timeout=timeout.total_seconds()):
            raise TimeoutError("nobody let it go")
        return self.tensor


class Begun:
    """The tasks that have begun."""

    def __init__(self):
        self.changed, self.count = threading.Condition(), 0

    def program(self, fails=False):
        with self.changed:
            self.count += 1
            self.changed.notify_all()
        reply = yield AllReduce(torch.ones(1))
        if fails:
            raise ArithmeticError("on purpose")
        return reply

    def await_count(self, count):
        with self.changed:
            assert self.changed.wait_for(lambda: self.count >= count, LIMIT.total_seconds())


@pytest.mark.parametrize(("nbytes", "limit", "expected"), [(8, 7, 3), (8, 40, 5), (1, 1000, TASKS)])
def test_tasks_begin_while_their_gradients_are_few_and_another_one_for_each_that_ends(
    monkeypatch, nbytes, limit, expected
):
    monkeypatch.setattr(in_flight, "MOST_BYTES", limit)
    transport, begun = Held(), Begun()
    engine = Engine(transport, torch.device("cpu"), LIMIT)
    pendings = [engine.submit(Task(begun.program(), str(number), nbytes=nbytes)) for number in range(TASKS)]
    begun.await_count(expected)
    for ended, pending in enumerate(pendings, 1):
        assert begun.count <= min(TASKS, expected + ended - 1)
        transport.released.release()
        pending.wait(LIMIT)
        begun.await_count(min(TASKS, expected + ended))
    engine._beside.close(0)


def test_tasks_that_wait_for_their_turn_end_with_the_error_of_one_that_failed(monkeypatch):
    monkeypatch.setattr(in_flight, "MOST_BYTES", 0)
    transport, begun = Held(), Begun()
    engine = Engine(transport, torch.device("cpu"), LIMIT)
    pendings = [engine.submit(Task(begun.program(fails=True), str(number), nbytes=1)) for number in range(TASKS)]
    transport.released.release(TASKS)
    for pending in pendings:
        with pytest.raises(RuntimeError, match="on purpose"):
            pending.wait(LIMIT)
    engine._beside.close(0)


def test_a_task_that_waits_for_its_turn_waits_no_longer_than_the_limit(monkeypatch):
    monkeypatch.setattr(in_flight, "MOST_BYTES", 0)
    waiting = in_flight.InFlight()
    for _ in range(in_flight.FEWEST):
        waiting.enter(1, LIMIT.total_seconds())
    with pytest.raises(RuntimeError, match=f"none of {in_flight.FEWEST} buckets that are on their way arrived within"):
        waiting.enter(1, 0.01)
    for _ in range(in_flight.FEWEST + 1):  # it counts, and leaves as others do
        waiting.leave(1)
    assert (waiting._tasks, waiting._bytes) == (0, 0)


@pytest.mark.parametrize(
    ("scope", "counted"),
    [
        ("all", Traffic(1, 16, 2 * 16 * 5 / 6, 0.0)),
        ("host", Traffic(1, 16, 0.0, 2 * 16 / 2)),
        ("across", Traffic(1, 16, 2 * 16 * 2 / 3, 0.0)),
        ("self", Traffic(1)),
    ],
)
def test_the_traffic_of_a_request_is_what_a_plan_says(scope, counted):
    transport, numbers = Held(), torch.ones(4)
    transport.ranks = Ranks(6, 1, per_host=2)
    task = Task(all_reduce(numbers, scope=scope), "")
    task.advance(transport, 0, LIMIT)
    assert task.record.traffic == traffic(AllReduce(numbers, scope=scope), transport.ranks) == counted
