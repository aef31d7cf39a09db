"""Watching a training: what is told, to whom, how often; and that training does not notice."""

import io
import json
import logging
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.distributed.fsdp import fully_shard

import gradwire
from gradwire.ddp_core.averaging.engines import Engines
from gradwire.ddp_core.measure.clock import Clock
from gradwire.ddp_core.measure.stats import Measured, Stats, Totals, metrics
from gradwire.ddp_core.measure.step import BucketStats, Record, Step
from gradwire.ddp_core.watching.dense_step import dense_step_seconds
from gradwire.ddp_core.watching.report import Report
from gradwire.ddp_core.watching.sinks import sink_of
from gradwire.ddp_core.watching.watch import Watch
from gradwire.experiments.top import reports_in

from ..errors import logged
from ..wrapping import wrapped

MEGA = 10**6


def step_of(encode, compute=0.1, beta=1e-8, ratio=2):
    """Two buckets of 1 and 2 million floats, sent after `encode` seconds each over a link of `beta` seconds a byte."""
    free, programs = 0.0, []
    for number, elements in enumerate((MEGA, 2 * MEGA)):
        sent = 4 * elements / ratio
        given, begin = compute * (number + 1) / 2, max(free, compute * (number + 1) / 2) + encode
        free = begin + beta * sent
        spans = [("encode", begin - encode, begin), ("wait", begin, free)]
        record = Record([("all", int(sent), sent)], spans)
        programs.append(BucketStats((f"p{number}",), elements, record, None, 4, given))
    return Step(number=1, costs=programs, interval=free + compute)


def measured(*steps, **options):
    return Measured(steps, Stats(len(steps), (), Record()), len(steps), 2, **options)


def test_a_dense_step_is_replayed_on_the_link_that_was_measured():
    told = dense_step_seconds(measured(step_of(encode=0.05), step_of(encode=0.05)))
    wires = [4 * MEGA * 1e-8, 8 * MEGA * 1e-8]  # two ranks: a ring of two sends each byte once
    after = max(0.05 + wires[0], 0.1) + wires[1]  # the second bucket is ready at 0.1, the first at 0.05
    assert told == pytest.approx(0.1 + 0.1 + after - 0.1, rel=1e-6)


@pytest.mark.parametrize("options", [{"on_host": False}, {"sharded": True}])
def test_where_nothing_is_known_of_the_link_no_dense_step_is_told(options):
    assert dense_step_seconds(measured(step_of(0.05), **options)) is None
    assert dense_step_seconds(measured(step_of(0.05, beta=0.0))) is None
    assert dense_step_seconds(measured(step_of(0.05, ratio=1))) is None
    assert dense_step_seconds(measured()) is None


class Watching:
    """A watch of steps that a test makes up, on rank 0 of 2."""

    def __init__(self, *sinks, every=1, before=0):
        self.totals, self.steps, self.before = Totals(), [], before  # steps before a checkpoint
        engines = SimpleNamespace(clock=Clock())
        averager = SimpleNamespace(totals=self.totals, engines=engines, measured=lambda: measured(*self.steps))
        self.handle = SimpleNamespace(reported=averager, first=None, _what=lambda: "bf16")
        self.handle._metrics = lambda *given: metrics(averager.measured(), *given)
        self.watch = Watch(self.handle, every, list(sinks))
        self.totals.begin(Step(), before)

    def step(self, made):
        self.steps.append(made)
        self.totals.begin(Step(), self.before + len(self.steps))


def test_after_a_resume_the_first_report_is_of_a_step_that_ended_here():
    reports = []
    resumed = Watching(reports.append, every=2, before=4)
    for _ in range(2):
        resumed.step(step_of(encode=0.05))
    assert [report.step for report in reports] == [6]


def test_every_so_many_steps_whoever_raises_is_told_no_more_and_the_others_are(caplog):
    told, raised = [], []

    def broken(report):
        raised.append(report)
        raise OSError("no room")

    watching = Watching(broken, told.append, every=2)
    for _ in range(6):
        watching.step(step_of(0.01))
    assert [report.metrics["steps"] for report in told] == [2, 4, 6]
    assert len(raised) == 1
    assert len(caplog.records) == 1
    assert "no room" in caplog.text


def test_a_watch_closes_in_the_middle_of_a_report_and_twice_and_by_its_with():
    first, second, both = [], [], []
    one = Watching(lambda report: (first.append(report), one.watch.close()))
    other = Watch(one.handle, 1, [second.append])
    for _ in range(2):
        one.step(step_of(0.01))
    one.watch.close()
    with Watch(one.handle, 1, [both.append]):
        one.step(step_of(0.01))
    one.step(step_of(0.01))
    assert (len(first), len(second), len(both)) == (1, 4, 1)
    other.close()
    assert one.totals.watchers == []


class Tracker:
    """What a run of wandb, or a writer of TensorBoard, is asked."""

    def __init__(self, name):
        self.calls = []
        setattr(self, name, lambda *given, **options: self.calls.append((given, options)))


def test_each_kind_of_receiver_is_told_in_its_own_way(caplog):
    caplog.set_level(logging.INFO)
    text, run, writer, told = io.StringIO(), Tracker("log"), Tracker("add_scalar"), []
    logger, function = logging.getLogger("mine"), lambda numbers, step: told.append((numbers, step))
    assert str(Report(7, "topk", {"sent_bytes": 0, "ratio": 7.5})) == "step 7 | sent 0 bytes"
    report = Report(7, "topk", {"sent_bytes": 8}, "turn back")
    for to in (Console(file=text), logger, run, writer, function):
        sink_of(to)(report)
    logged = [record.getMessage() for record in caplog.records if record.name == "mine"]
    assert text.getvalue().splitlines() == logged == ["step 7 | sent 8 bytes", "turn back"]
    assert run.calls == [(({"gradwire/sent_bytes": 8, "gradwire/steps": 7},), {"commit": False})]
    assert writer.calls == [(("gradwire/sent_bytes", 8, 7), {})]
    assert told == [({"sent_bytes": 8}, 7)]
    with pytest.raises(TypeError, match="takes 'console', a rich Console"):
        sink_of(3)


def train(ddp, rank, steps):
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + rank)
        ddp(torch.randn(4, 32, generator=generator)).square().sum().backward()
        with torch.no_grad():
            for parameter in ddp.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
    return [parameter.detach().clone() for parameter in ddp.parameters()]


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))


def watched(rank, world_size, folder, own):
    """The parameters with and without a watch; what it told, across a swap and a checkpoint; and the folder's files."""
    results = []
    for looks in (False, True):
        torch.manual_seed(0)
        ddp, handle = wrapped(own, model(), "topk:ratio=0.1", bucket_cap_mb=0.004)
        told = []
        if looks:
            handle.watch(16, lambda numbers, step, told=told: told.append((step, numbers)))
            handle.watch(8, None, folder=folder)
        train(ddp, rank, 33)
        handle.load_state_dict(handle.state_dict())
        handle.swap("bf16")
        parameters = train(ddp, rank, 20)
        dist.barrier()
        if rank:
            handle.close()
        dist.barrier()
        if not rank:
            handle.close()
        results.append((parameters, told))
    return results


@pytest.mark.parametrize("own", [False, True], ids=["torch", "own"])
def test_nobody_who_trains_notices_a_watch_that_lives_through_a_swap_and_a_load(own, ranks, tmp_path):
    folder = tmp_path / "live"
    folder.mkdir()
    (folder / "rank-00007.json").write_text("{}")  # of an earlier training with more ranks
    for rank, ((alone, _), (seen, told)) in enumerate(ranks.run(watched, 2, str(folder), own)):
        assert all(map(torch.equal, alone, seen))
        assert [step for step, _ in told] == ([] if rank else [16, 32, 48])
        if not rank:
            assert told[1][1].keys() >= {"cosine", "residual_norm", "step_seconds", "exposed_seconds"}
            assert told[-1][1]["ratio"] == pytest.approx(2.0)
    assert sorted(path.name for path in folder.iterdir()) == ["rank-00000.json", "rank-00001.json"]
    reports = [report for report, _ in reports_in(folder)]
    assert [report["rank"] for report in reports] == [0, 1]
    assert [report["step"] for report in reports] == [48, 48]
    assert {report["compressor"] for report in reports} == {"bf16"}
    assert json.dumps(reports)


def watched_where_rank_0_cannot_write(rank, world_size, folder):
    """What is logged, and the steps that are made."""
    ddp, handle = wrapped(False, model(), "topk:ratio=0.1")
    with logged("training continues") as told:
        handle.watch(2, None, folder=folder)
        train(ddp, rank, 6)
        handle.close()
    return told, handle.stats().steps


def test_a_folder_that_rank_0_cannot_write_is_told_once_and_all_ranks_train_on(ranks, tmp_path):
    (tmp_path / "file").write_text("")
    ((told,), steps), others = ranks.run(watched_where_rank_0_cannot_write, 2, str(tmp_path / "file" / "live"))
    assert (steps, others) == (6, ([], 6))
    assert "rank 0 cannot write to" in told


@pytest.mark.usefixtures("group")
def test_a_watch_that_tells_nobody_is_refused():
    handle = gradwire.Handle("bf16")
    for every in (0, float("nan"), "100"):
        with pytest.raises(ValueError, match=f"every is a number of steps, at least 1; got {every!r}"):
            handle.watch(every)
    with pytest.raises(ValueError, match="reports to nobody"):
        handle.watch(to=None)
    handle.close()


class Slow(Clock):
    """The clock of a device at half the host's pace, which is past a step's marks once it was asked four times."""

    at_once = False

    class Mark(float):
        asked: list[int]

    def __init__(self):
        self.asked = [0]

    def now(self):
        mark = self.Mark(time.perf_counter())
        mark.asked = self.asked
        return mark

    def took(self, mark):
        return isinstance(mark, self.Mark)

    def reached(self, mark):
        if mark.asked is self.asked:
            self.asked = [0]  # of the next step
        mark.asked[0] += 1
        return mark.asked[0] > 3

    def seconds(self, since, until):
        return 2 * (until - since)


def marked_step(clock, number=1):
    """A step of one bucket with marks of a clock."""
    given, begin, end = (clock.now() for _ in range(3))
    record = Record([("all", 8, 8.0)], [("encode", given, begin), ("wait", begin, end)])
    return Step(number, costs=[BucketStats(("p",), 8, record, None, 4, given)])


def test_a_step_with_marks_of_two_clocks_is_not_read_and_what_others_ran_is_left_out():
    clock = Slow()
    step = marked_step(clock)
    step.costs.append(BucketStats(("q",), 8, Record([("all", 8, 8.0)])))  # of torch, with the host's time
    read = step.read(clock)
    assert read.costs[0].given == 0
    assert read.costs[0].record.wait == pytest.approx(2 * step.costs[0].record.wait)
    step.costs[0].record.spans.append(("decode", 1.0, 2.0))
    assert step.read(clock) is None
    assert Step().read(clock) is None


class Broken(Slow):
    def reached(self, mark):
        raise RuntimeError("the device is gone")


def on_a_device(clock, planned=None):
    """Reports of every second of 12 steps on a device, with a swap before the second report; and which steps it marks.

    `planned`: the clock of a planner, which marks step 6.
    """
    told, marks = [], []
    watching = Watching(told.append, every=2)
    watching.handle.reported.engines.clock = clock
    for ended in range(1, 12):
        watching.steps.append(step_of(0.01))
        step = Step(now=planned.now) if planned and ended == 5 else Step()
        if ended == 3:
            watching.handle._what = lambda: "none"
        watching.totals.begin(step, ended)
        marks += [ended + 1] if step.now == clock.now else []
        step.costs = marked_step(clock).costs
    return [(report.step, report.compressor, report.metrics["steps"]) for report in told], marks


def test_a_late_report_is_of_its_step_and_that_step_s_compressor():
    told, marks = on_a_device(Slow())
    assert told[:2] == [(2, "bf16", 2), (4, "none", 4)]
    assert marks == [2, 4, 6, 8, 10, 12]


def test_marks_of_a_planner_s_clock_stay_its_own():
    assert on_a_device(Slow(), planned=Slow())[1] == [2, 4, 8, 10, 12]


def test_no_training_ends_by_a_device_that_does_not_answer(caplog):
    assert on_a_device(Broken())[0] == []
    assert "training continues without the reports" in caplog.text


def watched_on_a_device(rank, world_size, wrap):
    """What is told of two steps, and the host's seconds of them."""
    device, told = Slow(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engines, "clock", device)
        patch.setattr(Engines, "on_host", False)
        ddp, handle = wrap(model())

        def tell(numbers, step):
            record = next(each for each in handle.averager.totals.recent if each.number == step)
            ends = [end for program in record.costs for _, _, end in program.record.spans]
            told.append((step, numbers, max(ends) - max(program.given for program in record.costs)))

        handle.watch(4, tell if rank == 0 else None, folder=None if rank == 0 else "unused")
        train(ddp, rank, 19)
        handle.close()
    return told


def hooked(module):
    return wrapped(False, module, "int8", bucket_cap_mb=0.004)


def own(module):
    return wrapped(True, module, "int8", bucket_cap_mb=0.004)


def overlapped(module):
    ddp, handle = own(module)
    gradwire.overlap(ddp, torch.optim.SGD(ddp.parameters()))
    return ddp, handle


def sharded(module):
    for layer in (module[0], module[2], module):
        fully_shard(layer)
    return module, gradwire.attach(module, reduce="int8")


@pytest.mark.parametrize("wrap", [hooked, own, sharded])
def test_a_device_s_clock_tells_of_each_step_once_the_device_is_past_it(ranks, wrap):
    told, _ = ranks.run(watched_on_a_device, 2, wrap)
    assert [step for step, _, _ in told] == [4, 8, 12]  # the last one is told of if training goes on
    for _, numbers, exposed in told:
        assert numbers["encode_seconds"] > 0
        assert numbers["wait_seconds"] > 0
        assert numbers["link_bytes_per_second"] > 0
        if wrap is sharded:
            assert "exposed_seconds" not in numbers
        else:
            assert numbers["exposed_seconds"] == pytest.approx(2 * exposed)
            assert "compute_seconds" in numbers


@pytest.mark.filterwarnings("ignore:.* reads parameters or gradients between backward")
def test_averages_that_come_after_backward_are_not_told_as_exposed_by_a_device_s_clock(ranks):
    told, _ = ranks.run(watched_on_a_device, 2, overlapped)
    assert [step for step, _, _ in told] == [4, 8, 12]
    assert all("exposed_seconds" not in numbers and numbers["wait_seconds"] > 0 for _, numbers, _ in told)


def watched_where_a_tracker_is(rank, world_size):
    """As people have it: a tracker on rank 0 alone."""
    (ddp, handle), told = wrapped(False, nn.Linear(2, 2), "bf16"), []
    with handle.watch(1, None if rank else lambda _, step: told.append(step)):
        for _ in range(3):
            ddp(torch.ones(1, 2)).sum().backward()
    handle.close()
    return told


def test_a_tracker_on_the_first_rank_is_enough(ranks):
    assert ranks.run(watched_where_a_tracker_is, 2) == [[1, 2], []]
