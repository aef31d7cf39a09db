"""Traces of our DistributedDataParallel: files for a timeline viewer, of the steps inside a `with`."""

import json

import pytest
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire

from ..layers import CAP, Layers
from .test_timeline import alone, step


def traced(rank, world_size, folder):
    model = gradwire.DistributedDataParallel(Layers(), compressor="powersgd:rank=1", bucket_cap_mb=CAP)
    with gradwire.trace(model, folder / f"{rank}.json") as steps:
        for number in range(3):
            step(model, rank, number)
    step(model, rank, 3)
    return steps


def test_each_rank_writes_a_file_that_viewers_accept(ranks, tmp_path):
    for rank, steps in enumerate(ranks.run(traced, 2, tmp_path)):
        events = valid(tmp_path / f"{rank}.json")
        assert len(steps) == 3
        assert {event["pid"] for event in events} == {rank}
        named = {event["args"]["name"] for event in events if event["name"] in ("process_name", "thread_name")}
        assert named == {f"rank {rank}", "computation", *(f"bucket {index}" for index in range(4))}
        complete = [event for event in events if event["ph"] == "X"]
        assert len(complete) == sum(3 + sum(2 + len(b.spans) for b in times.buckets) for times in steps)
        assert {event["args"]["step"] for event in complete} == {1, 2, 3}
        forward = next(event for event in complete if event["name"] == "forward")
        assert forward["ts"] == pytest.approx(steps[0].began * 1e6, abs=1e-2)
        assert forward["dur"] == pytest.approx(steps[0].forward * 1e6, abs=1e-2)


def valid(path):
    """The events of a file, by the rules of the trace event format: events of a row nest or follow each other."""
    file = json.loads(path.read_text("utf-8"))
    rows = {}
    for event in file["traceEvents"]:
        assert event["ph"] in "XM"
        assert type(event["pid"]) is type(event["tid"]) is int
        assert isinstance(event["name"], str)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            rows.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
        else:
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
    for intervals in rows.values():
        open_until = []
        for begin, end in sorted(intervals, key=lambda interval: (interval[0], -interval[1])):
            while open_until and open_until[-1] <= begin + 1e-3:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-3
            open_until.append(end)
    return file["traceEvents"]


def overlapping_traces(model, folder):
    first, second = (gradwire.trace(model, folder / name) for name in "ab")
    mine = [first.__enter__(), second.__enter__()]
    step(model)
    first.__exit__(None, None, None)
    step(model)
    second.__exit__(None, None, None)
    step(model)
    return [[times.step for times in steps] for steps in mine]


def test_the_trace_that_ends_is_the_one_that_stops(ranks, tmp_path):
    assert ranks.run(alone, 1, overlapping_traces, tmp_path) == [[[1], [1, 2]]]


def raised(model, folder):
    step(model)
    handle = model.module.layers[1].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError), gradwire.trace(model, folder / "failed.json") as steps:
        step(model)
    handle.remove()
    after_failure = model.last_step()
    with pytest.raises(RuntimeError, match="Expected to have finished"):
        step(model)
    return steps, after_failure.step, model.last_step().step


def test_a_backward_that_raises_leaves_the_step_before_and_a_valid_file(ranks, tmp_path):
    assert ranks.run(alone, 1, raised, tmp_path) == [([], 1, 1)]
    valid(tmp_path / "failed.json")


def refused(rank, world_size, folder):
    theirs = TorchDDP(Layers())
    with pytest.raises(TypeError, match=r"gradwire\.Distr.*got Distr"), gradwire.trace(theirs, folder / "trace.json"):
        pass
    model = gradwire.DistributedDataParallel(Layers())
    with pytest.raises(FileNotFoundError), gradwire.trace(model, folder / "absent" / "trace.json"):
        pytest.fail("it was to be refused at once")
    return len(list(folder.iterdir()))


def test_trace_refuses_other_models_and_paths_that_cannot_be_written(ranks, tmp_path):
    assert ranks.run(refused, 1, tmp_path) == [0]
    with pytest.raises(TypeError, match="got Layers"), gradwire.trace(Layers(), tmp_path / "trace.json"):
        pass
