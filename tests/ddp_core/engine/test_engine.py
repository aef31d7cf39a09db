"""The engine by itself: a program that misbehaves ends all programs with its error, and nothing hangs."""

import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gradwire.compress import AllReduce
from gradwire.ddp_core import Engine, ProcessGroup
from gradwire.ddp_core.engine.lanes import Task
from gradwire.ddp_core.transport import private_group
from gradwire.ddp_core.transport.protocol import Decorated

from ..errors import message_of

LIMIT = timedelta(seconds=20)
CPU = torch.device("cpu")


def engine_of(rounds=2, group=None, around=lambda transport: transport):
    group = group or dist.group.WORLD
    engine = Engine(around(ProcessGroup(group, CPU, LIMIT)), CPU, LIMIT)
    engine.prepare(rounds)
    return engine


def submitted(engine, program, label="bucket 0"):
    return engine.submit(Task(program, label))


def stubborn(tensor):
    """Goes on when it is told to end."""
    try:
        yield AllReduce(tensor)
    except GeneratorExit:
        yield AllReduce(tensor)


def objects(tensor):
    """Raises when it is told to end."""
    try:
        yield AllReduce(tensor)
        yield AllReduce(tensor)
    finally:
        raise KeyError("on purpose")


def fails(tensor):
    yield AllReduce(tensor)
    raise ArithmeticError("on purpose")


def well(tensor):
    first = yield AllReduce(tensor)
    return (yield AllReduce(first))


PROGRAMS = {"stubborn": stubborn, "objects": objects, "well": well}


def run_beside_a_failure(rank, world_size, other):
    engine = engine_of()
    programs = [fails(torch.ones(8)), *(PROGRAMS[other](torch.ones(200_000)) for _ in range(3))]
    futures = []
    for index, program in enumerate(programs):
        try:
            futures.append(submitted(engine, program, f"bucket {index}"))
        except RuntimeError as error:
            return [str(error)] * (index + 1)
    return [message_of(future.wait, LIMIT) for future in futures]


@pytest.mark.parametrize("other", list(PROGRAMS))
def test_a_failure_reaches_the_futures_of_all_programs_that_are_live(ranks, other):
    for messages in ranks.run(run_beside_a_failure, 2, other, timeout=30):
        assert "on purpose" in messages[0]
        assert all(message == "" or "on purpose" in message for message in messages)


class Broken(Decorated):
    """A transport whose replies do not arrive."""

    def start(self, request, channel):
        return BrokenPending(self.inner.start(request, channel))


class BrokenPending:
    arrived = None

    def __init__(self, real):
        self.real = real
        alive.add(self)

    def wait(self, timeout):
        raise RuntimeError("on purpose")

    def abandon(self):
        self.real.abandon()


alive = weakref.WeakSet()  # those of BrokenPending that someone still holds


def work_after_a_failure(rank, world_size):
    engine = engine_of(around=Broken)
    message = message_of(submitted(engine, well(torch.ones(4))).wait, LIMIT)
    deadline = time.monotonic() + LIMIT.total_seconds()
    while any(each.real.work is not None for each in alive) and time.monotonic() < deadline:
        time.sleep(0.01)  # its future has the error a moment before it lets go
    return message, sum(each.real.work is not None for each in alive)


def test_an_engine_that_failed_holds_no_work_and_so_no_connection_for_which_others_would_wait(ranks):
    ((message, held),) = ranks.run(work_after_a_failure, 1)
    assert "on purpose" in message
    assert held == 0


def test_a_device_that_is_neither_cpu_nor_cuda_is_refused():
    with pytest.raises(ValueError, match="reduced on cpu and cuda, not on meta"):
        Engine(None, torch.device("meta"))


def test_a_group_whose_ranks_have_not_met_in_a_store_is_refused(monkeypatch):
    monkeypatch.setattr(private_group, "store_of", lambda group: dist.Store())
    with pytest.raises(RuntimeError, match="an MPI group has none"):
        private_group.private_group(None, LIMIT, "1")


def submit_during_close(rank, world_size):
    """What comes of a task that another thread submits once the lanes are told to end."""
    engine = engine_of()
    submitted(engine, well(torch.ones(1))).wait(LIMIT)
    dist.barrier()
    ends = engine._beside.close

    def ends_beside_a_task(deadline):
        ends(deadline)
        try:
            late.append(submitted(engine, well(torch.ones(1))).future)
        except RuntimeError as error:
            late.append(error)

    late, engine._beside.close = [], ends_beside_a_task
    engine.close()
    return str(late[0] if isinstance(late[0], RuntimeError) else late[0].exception(timeout=5))


def test_a_task_that_is_submitted_while_the_engine_closes_is_not_waited_for_without_an_end(ranks):
    assert all("close() was called" in text for text in ranks.run(submit_during_close, 2))
