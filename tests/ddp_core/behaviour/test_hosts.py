"""Hosts of several ranks: exact sums inside them, overlap, failures, states; four ranks of one machine are two hosts."""

import os
import re
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.ddp_core import obstacle
from gradwire.ddp_core.transport import host_memory, host_places

from ...faulty import Throughout
from ...hooks.given import Given, average, gradients
from ...ranks import LostRank

pytestmark = pytest.mark.skipif(bool(obstacle()), reason=obstacle())
SHAPES = ((40, 30), (40,), (10, 200), (3,), (50, 20))
LIMIT = timedelta(seconds=20)


def model_of(spec, **options):
    options |= {"bucket_cap_mb": 0.008, "timeout": LIMIT}
    return gradwire.DistributedDataParallel(Given(SHAPES), compressor=spec, **options)


def averages(rank, spec, steps=3, **options):
    model = model_of(spec, **options)
    found = [average(model, gradients(rank, step, SHAPES)) for step in range(steps)]
    shared = model.reducer.assignment.shared
    model.compression.swap("none")  # what has been sent remains as it was
    assert "none" not in spec or model.compression.metrics()["ratio"] == pytest.approx(1, rel=0.01)  # odd shares
    return found, shared


def plainly(rank, world_size):
    """Averages in shared memory, and where one rank does without."""
    with_memory, shared = averages(rank, "hosts:ranks=2+none", gradient_as_bucket_view=True)
    with pytest.MonkeyPatch.context() as patch:
        if rank == world_size - 1:
            patch.setenv(host_memory.SWITCH, "0")
        without, used = averages(rank, "hosts:ranks=2+none")
    assert (shared, used) == (True, False)
    return with_memory, without


def test_plain_sums_are_the_mean_and_have_the_same_bits_everywhere(ranks):
    answers = ranks.run(plainly, 4)
    for step in range(3):
        given = [gradients(rank, step, SHAPES) for rank in range(4)]
        for index in range(len(SHAPES)):
            found = [way[step][f"p{index}"] for answer in answers for way in answer]
            assert all(torch.equal(each, found[0]) for each in found)
            expected = sum(mine[index].double() for mine in given) / 4
            torch.testing.assert_close(found[0].double(), expected, rtol=0, atol=1e-6)


def found_by_themselves(rank, world_size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_places, "host_name", lambda: f"host {rank // 2}")
        found, shared = averages(rank, "hosts+topk:ratio=0.1")
    given, _ = averages(rank, "hosts:ranks=2+topk:ratio=0.1")
    return shared, all(torch.equal(a[name], b[name]) for a, b in zip(found, given, strict=True) for name in a)


def test_hosts_are_found_by_themselves(ranks):
    assert ranks.run(found_by_themselves, 4) == [(True, True)] * 4


def on_hosts(rank, world_size, hosts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_places, "host_name", lambda: hosts[rank])
        with pytest.raises(ValueError, match="hosts") as refusal:
            model_of("hosts+topk")
    return str(refusal.value)


@pytest.mark.parametrize(
    ("hosts", "words"), [("aaab", "different numbers of ranks: [3, 1]"), ("abab", "do not follow each other")]
)
def test_hosts_of_another_kind_are_refused_with_the_way_out(ranks, hosts, words):
    for message in ranks.run(on_hosts, 4, hosts):
        assert words in message
        assert "hosts:ranks=2+" in message


class Held(Throughout):
    """Keeps back the first bucket's reply from the other hosts until the second bucket has asked these for its own."""

    asked = 0

    def start(self, request, channel):
        pending = self.inner.start(request, channel)
        if request.scope != "across":
            return pending
        self.asked += 1
        if self.asked == 1:
            self.second = threading.Event()
            return Waiting(pending, self.second)
        self.second.set()
        return pending


class Waiting:
    def __init__(self, pending, event):
        self.pending, self.event = pending, event

    def wait(self, timeout):
        assert self.event.wait(timeout.total_seconds())
        return self.pending.wait(timeout)

    def __getattr__(self, name):
        return getattr(self.pending, name)


def overlapping(rank, world_size):
    found, _ = averages(rank, "hosts:ranks=2+none", steps=1, transport=Held)
    return found[0]["p0"]


def test_the_next_bucket_is_summed_in_the_host_while_the_last_one_is_on_the_wire(ranks):
    mean = sum(gradients(rank, 0, SHAPES)[0].double() for rank in range(4)) / 4
    for found in ranks.run(overlapping, 4):
        torch.testing.assert_close(found.double(), mean, rtol=0, atol=1e-6)


def beside_a_death(rank, world_size, spec):
    model = model_of(spec)
    for step in range(2):  # after the first the order of buckets is agreed on
        average(model, gradients(rank, step, SHAPES))
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        average(model, gradients(rank, 2, SHAPES))
    finally:
        seconds, files = time.monotonic() - began, os.listdir("/dev/shm")
        assert seconds < LIMIT.total_seconds() + 5
        assert not any("gradwire" in file for file in files)


@pytest.mark.parametrize("spec", ["hosts:ranks=2+none", "hosts:ranks=2+powersgd:rank=2"])
def test_where_a_rank_dies_all_others_raise_in_time_and_nothing_is_left(ranks, spec):
    for rank, failure in enumerate(ranks.run(beside_a_death, 4, spec, expect_errors=True)):
        if rank == 1:
            assert isinstance(failure, LostRank)
        else:  # the next bucket may notice first, by its rank of the host that has given up
            assert re.match(r"bucket \d \(parameters p", failure.message), failure


def refused_elsewhere(rank, world_size):
    """A state of hosts of two ranks, where all ranks are one host."""
    first, second = (model_of("hosts:ranks=2+topk:ratio=0.05") for _ in range(2))
    average(first, gradients(rank, 0, SHAPES))
    state = first.compression.state_dict()
    assert state["ranks_per_host"] == 2
    second.compression.load_state_dict({**state, "ranks_per_host": 4})
    average(second, gradients(rank, 1, SHAPES))


def test_a_state_of_other_hosts_is_refused_with_the_way_out(ranks):
    for failure in ranks.run(refused_elsewhere, 4, expect_errors=True):
        assert "saved on hosts of 4 ranks, here they have 2: load the states of all ranks" in failure.message
