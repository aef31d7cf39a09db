"""The side stream's order of events, with stand-ins for CUDA's streams that note what they are asked for."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from gradwire.compress import AllReduce, Ranks
from gradwire.ddp_core import Engine
from gradwire.ddp_core.engine import side_stream as side_stream_module
from gradwire.ddp_core.engine.lanes import Task
from gradwire.ddp_core.engine.side_stream import SideStream

from ..streams import StandIn

LIMIT = timedelta(seconds=20)
DEVICE = torch.device("cuda", 0)


class Streams(StandIn):
    """Streams and events by name. `log`: what was done, in order."""

    def __init__(self):
        super().__init__(self.named("backward"))
        self.log, self.events = [], 0

    def named(self, name):
        def wait_stream(other):
            self.log.append(f"{name} waits for all of {other.name}")

        return SimpleNamespace(name=name, device_index=0, wait_stream=wait_stream)

    def Stream(self, device, priority):
        return self.named("side")

    def Event(self):
        self.events += 1
        return Event(self.log, f"event {self.events}")


class Event:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def record(self, stream):
        self.log.append(f"{stream.name} records {self.name}")

    def wait(self, stream):
        self.log.append(f"{stream.name} waits for {self.name}")


class Wire:
    """A transport whose replies are there at once."""

    ranks = Ranks()

    def __init__(self, streams):
        self.streams = streams

    def open(self, channels):
        """As many as you like."""

    def start(self, request, channel):
        self.streams.log.append(f"{self.streams.current.name} sends {request.tensor.tolist()}")
        return SimpleNamespace(wait=lambda timeout: request.tensor, arrived=None, abandon=lambda: None)


@pytest.fixture
def streams(monkeypatch):
    stand_in = Streams()
    stand_in.take_the_place(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: stand_in.log.append("keeps memory"))
    return stand_in


def side_stream(streams, on_end=lambda task, error: error):
    return SideStream(Wire(streams), DEVICE, on_end)


def two_rounds(tensor):
    reply = yield AllReduce(tensor)
    return (yield AllReduce(reply + 10))


def one_round(tensor):
    return (yield AllReduce(tensor))


def sends(streams):
    return [int(float(line.split("[")[1][:-1])) for line in streams.log if "sends" in line]


def test_rounds_of_neighbouring_buckets_take_turns(streams):
    driver = side_stream(streams)
    pendings = [driver.submit(Task(two_rounds(torch.tensor([bucket])), f"bucket {bucket}")) for bucket in range(1, 5)]
    assert sends(streams) == [1, 2, 11, 3, 12, 4, 13]
    assert [pending.runs for pending in pendings] == [False, False, True, True]
    assert [pending.wait(LIMIT).item() for pending in pendings] == [11, 12, 13, 14]
    assert sends(streams)[7:] == [14]
    assert not driver._running


def test_whoever_waits_waits_for_his_bucket_and_not_for_later_ones(streams):
    driver = side_stream(streams)
    first, second = (driver.submit(Task(one_round(torch.tensor([bucket])), "bucket")) for bucket in range(2))
    first.wait(LIMIT)
    assert second.runs


def test_a_program_that_fails_ends_those_that_run_beside_it(streams):
    def fails():
        yield AllReduce(torch.tensor([7]))
        raise ArithmeticError("on purpose")

    driver = side_stream(streams, lambda task, error: error and RuntimeError(f"{task.label}: {error}"))
    programs = [fails(), two_rounds(torch.tensor([1]))]
    pendings = [driver.submit(Task(program, f"bucket {bucket}")) for bucket, program in enumerate(programs)]
    for pending in pendings:
        with pytest.raises(RuntimeError, match="bucket 0: on purpose"):
            pending.wait(LIMIT)
    assert sends(streams) == [7, 1]


def futures_of(driver, buckets):
    tasks = [Task(two_rounds(torch.tensor([bucket])), f"bucket {bucket}", needs_future=True) for bucket in buckets]
    return [driver.submit(task).future for task in tasks]


def filling(streams, monkeypatch):
    """A driver that fills futures, which are of no device."""
    init = torch.futures.Future.__init__
    monkeypatch.setattr(side_stream_module.Awaited, "__init__", lambda future, *, devices: init(future))
    return side_stream(streams, lambda task, error: task.future.set_result(task.result))


def test_buckets_of_torchs_hooks_take_turns_until_all_are_to_be_sent(streams, monkeypatch):
    driver = filling(streams, monkeypatch)
    futures = futures_of(driver, range(1, 4))
    assert sends(streams) == [1, 2, 11, 3, 12]
    assert [future.done() for future in futures] == [True, False, False]
    driver.send_all()
    assert sends(streams)[5:] == [13]
    assert [future.value().item() for future in futures] == [11, 12, 13]


def test_a_hook_may_wait_for_its_future(streams, monkeypatch):
    driver = filling(streams, monkeypatch)
    (first,) = futures_of(driver, [1])
    assert first.wait().item() == 11
    assert not driver._running


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


def test_replies_of_a_measured_step_are_noted_when_they_come_and_requests_when_they_could_start(streams, monkeypatch):
    def start(wire, request, channel):
        pending, name = began(wire, request, channel), f"reply to {request.tensor.tolist()}"
        pending.expect_late_wait = lambda now: streams.log.append(f"{name} will be noted") or notes.append(now)
        pending.arrived = 7.0
        return pending

    def now():
        streams.log.append(f"{streams.current.name} marks")
        return float(len(streams.log))

    notes, began = [], Wire.start
    monkeypatch.setattr(Wire, "start", start)
    driver, task = side_stream(streams), Task(one_round(torch.tensor([1.0])), "bucket 0", now=now)
    driver.submit(task)
    measured = streams.log[2:]
    driver.submit(Task(one_round(torch.tensor([2.0])), "bucket 1"))
    assert measured == ["side marks", "side marks", "side marks", "side sends [1.0]", "reply to [1.0] will be noted"]
    assert notes == [now]  # and of the task that is not measured nothing is
    assert ("wait", 5.0, 7.0) in task.record.spans


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


class NoGroup:
    """A process group of which nothing is known."""


def engine_on(streams):
    return Engine(Wire(streams), DEVICE, LIMIT)


def test_sums_go_on_the_stream_of_backward_and_make_no_events(streams):
    engine = engine_on(streams)
    pending = engine.submit(Task(one_round(torch.tensor([1.0])), "bucket 0"), on_wait=True)
    assert pending.wait(LIMIT).tolist() == [1.0]
    assert streams.log == ["backward sends [1.0]"]
    assert engine.idle


@pytest.mark.parametrize("on_wait", [True, False])
def test_a_wait_that_blocks_until_the_groups_time_limit_fails_with_the_bucket(streams, monkeypatch, on_wait):
    """As with TORCH_NCCL_BLOCKING_WAIT=1; else the watchdog ends the process, and no wait returns."""

    def late(timeout):
        raise RuntimeError("NCCL: the collective timed out")

    start = Wire.start
    monkeypatch.setattr(Wire, "start", lambda *given: setattr(pending := start(*given), "wait", late) or pending)
    monkeypatch.setattr(Wire, "group", NoGroup(), raising=False)
    monkeypatch.setattr(Wire, "abort", lambda wire: None, raising=False)
    engine = engine_on(streams)
    pending = engine.submit(Task(one_round(torch.tensor([1.0])), "bucket 0"), on_wait=on_wait)
    with pytest.raises(RuntimeError, match="bucket 0: RuntimeError: NCCL: the collective timed out"):
        pending.wait(LIMIT)
    with pytest.raises(RuntimeError, match="the engine has failed"):
        engine.submit(Task(one_round(torch.tensor([1.0])), "bucket 1"), on_wait=on_wait)


def test_weights_are_gathered_on_a_stream_of_their_own(streams):
    engine = engine_on(streams)
    engine._gathers._stream.name = "gathers"
    reduction = engine.submit(Task(two_rounds(torch.tensor([1.0])), "module 1"))
    gather = engine.submit(Task(one_round(torch.tensor([2.0])), "module 0"), gathers=True)
    gather.wait(LIMIT)
    assert "gathers sends [2.0]" in streams.log
    assert not any("side records" in line for line in streams.log)  # the reduction has not come to its end
    assert reduction.runs


def test_whoever_reads_a_state_waits_for_what_both_streams_were_given(streams):
    engine = engine_on(streams)
    engine._gathers._stream.name = "gathers"
    engine.follow()
    assert streams.log == ["backward waits for all of side", "backward waits for all of gathers"]


@pytest.mark.parametrize("lent", [False, True])
def test_memory_that_was_lent_is_its_owners_to_keep(streams, lent):
    side_stream(streams).submit(Task(one_round(torch.tensor([1.0])), "bucket 0", lent=lent)).wait(LIMIT)
    assert ("keeps memory" in streams.log) == (not lent)


def test_a_thread_that_saves_waits_for_programs_and_for_the_stream_of_training(streams):
    driver = side_stream(streams)
    driver.submit(Task(one_round(torch.tensor([1.0])), "bucket 0"))
    with streams.stream(streams.named("saver")):
        driver.follow()
    assert streams.log[-2:] == ["saver waits for all of side", "saver waits for all of backward"]
    driver.follow()  # as training itself
    assert streams.log[-1] == "backward waits for all of side"
