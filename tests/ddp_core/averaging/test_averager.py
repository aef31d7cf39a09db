"""Steps of torch's hook as their buckets tell them, and changes that other threads want in the middle of one."""

import logging
from dataclasses import dataclass, field
from datetime import timedelta
from unittest import mock

import pytest
import torch

import gradwire
from gradwire.compress import Layout, Ranks, all_to_all, compressor
from gradwire.ddp_core import Handle
from gradwire.ddp_core.averaging.averager import setup
from gradwire.ddp_core.memory.model_memory import ModelMemory
from gradwire.ddp_core.transport.rank_messages import shown
from gradwire.hooks.torch_ddp import compress_bucket
from gradwire.hooks.torch_steps import ByForward

LIMIT = timedelta(seconds=20)
SIZE = 8


class Bucket:
    """As much of torch's `dist.GradBucket` as an averager looks at."""

    def __init__(self, index, last):
        self._index, self._last = index, last
        self._parameters = [torch.zeros(SIZE)]
        self.give(0.0)

    def give(self, value):
        self._buffer = torch.full((SIZE,), value)
        return self

    def index(self):
        return self._index

    def is_last(self):
        return self._last

    def buffer(self):
        return self._buffer

    def parameters(self):
        return self._parameters


@pytest.fixture
def handle(group):
    made = Handle("topk:k=1", group, LIMIT)
    yield made
    made.close()


@pytest.fixture
def averager(handle):
    return handle.averager


BUCKETS = 3


def buckets():
    return [Bucket(index, index == BUCKETS - 1) for index in range(BUCKETS)]


def sent(handle, buckets, value=1.0):
    for bucket in buckets:
        compress_bucket(handle, bucket.give(value)).wait()


def test_a_step_begins_with_the_bucket_whose_index_does_not_rise(averager, handle):
    mine = buckets()
    for _ in range(3):
        sent(handle, mine)
    stats = averager.stats()
    assert stats.steps == 3
    assert [each.parameters for each in stats.buckets] == [("0",), ("1",), ("2",)]
    sent(handle, mine[:1])
    assert averager.stats().steps == 4
    assert averager.measured().begun == 4


def test_who_says_when_steps_begin_may_begin_one_with_any_bucket_and_end_it_with_any(averager, handle):
    mine, handle.step_detector = buckets(), ByForward()
    for bucket in mine:
        handle.step_detector.announce()
        sent(handle, [bucket])
    assert averager.stats().steps == BUCKETS
    assert [each.parameters for each in averager.stats().buckets] == [("2",)]


def test_what_is_taken_in_the_middle_of_a_step_is_from_before_it(averager, handle):
    mine = buckets()
    sent(handle, mine)
    averager.end_step()
    expected = averager.snapshot().state_dict()
    sent(handle, mine[:1], value=5.0)
    taken = averager.snapshot().state_dict()
    assert taken["step"] == expected["step"] == 1
    for name, fields in expected["parameters"].items():
        assert torch.equal(taken["parameters"][name]["residual"], fields["residual"])


def test_another_compressor_goes_on_with_all_that_was_held_back(averager, handle):
    (bucket,) = [Bucket(0, True)]
    sent(handle, [bucket])  # one of eight ones leaves
    averager.end_step()
    averager.replace(compressor("none"))
    assert averager.scale == 1.0  # gradients come undivided: something is owed
    average = compress_bucket(handle, bucket.give(0.0)).wait()
    assert sorted(average.tolist()) == [0.0] + [1.0] * (SIZE - 1)


@pytest.mark.parametrize("partial", [False, True])
def test_ranks_compare_compressor_step_shapes_and_where_asked_values(partial):
    memory = ModelMemory(compressor("none"), partial=partial)
    memory.step = 4
    layout = Layout(("a", "b"), ((2,), (7,)), torch.float32, torch.device("cpu"), Ranks(2))
    unused = " and find_unused_parameters=True" if partial else ""
    text = f"none at step 3{unused} with a first bucket of 2 parameters, 9 x torch.float32"
    assert shown(setup(memory, layout, None)) == text
    assert shown(setup(memory, layout, "their values x")) == f"{text}, their values x"


@dataclass(frozen=True)
class Counting:
    """A plug-in with a tensor as an option, which cannot say whether it equals another one, and with a memory of its own."""

    weights: torch.Tensor
    calls: list[int] = field(default_factory=list)
    __hash__ = object.__hash__

    def init(self, layout):
        self.calls.append(layout.ranks.world_size)

    def reduce(self, grad, state, residual=None):
        self.calls.append(grad.numel())
        if residual is not None:
            grad.add_(residual.before)
            residual.after.zero_()
        rows = yield from all_to_all(grad.expand(self.calls[0], -1).contiguous())
        return rows.mean(0)


def counted(rank, world_size):
    """The calls of two plug-ins, one swapped for the other, where a launcher says that two ranks share a host."""
    used = Counting(torch.ones(3)), Counting(torch.zeros(3))
    model = gradwire.DistributedDataParallel(torch.nn.Linear(4, 4), compressor=used[0])
    with mock.patch.dict("os.environ", LOCAL_WORLD_SIZE="2"):
        for following in used[::-1]:
            model(torch.ones(1, 4)).sum().backward()
            model.compression.swap(following)
    return [each.calls for each in used]


def test_every_rank_calls_a_plug_in_as_often_as_the_others(ranks):
    """Or what it draws at random would differ from there on."""
    first, *others = ranks.run(counted, 4)
    assert first[0]
    assert others == [first] * 3


def advised(rank, world_size):
    """The log's lines about what compressors send in vain, in steps with int4, bf16, and int4 again."""
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("gradwire").addHandler(handler)
    model = gradwire.DistributedDataParallel(torch.nn.Linear(64, 64, dtype=torch.bfloat16), compressor="int4")
    with mock.patch.dict("os.environ", WORLD_SIZE="4", LOCAL_WORLD_SIZE="2"):
        for following in ("bf16", "int4", "none"):
            model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
            model.compression.swap(following)
    logging.getLogger("gradwire").removeHandler(handler)
    return [line for line in lines if "hosts+int4" in line or "bfloat16 already" in line]


def test_rank_zero_says_once_what_a_compressor_sends_in_vain(ranks):
    first, *others = ranks.run(advised, 4)
    assert ["hosts+int4" in line for line in first] == [True, False]
    assert others == [[], [], []]
