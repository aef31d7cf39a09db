"""Sums in memory that ranks share: their bits, and who ends them."""

import mmap
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib import import_module
from random import Random

import numpy
import pytest
import torch
import torch.distributed as dist

from gradwire.compress import AllReduce
from gradwire.ddp_core import ProcessGroup, obstacle
from gradwire.ddp_core.transport.host_memory import HostMemory

pytestmark = pytest.mark.skipif(bool(obstacle()), reason=obstacle())
NUMELS = [1, 2, 3, 7, 64, 1000, 65536, 65537, 262145, 1_500_007]
HEADER = 4 * mmap.PAGESIZE


class Rank:
    """One rank of several in this process: its memory, and its sums of float32 buckets."""

    def __init__(self, memories, rank, sizes):
        offsets = [HEADER + sum(sizes[:place]) * 4 for place in range(len(sizes))]
        spans = [(offset, size, 4) for offset, size in zip(offsets, sizes, strict=True)]
        self.sums = extension().SharedSums(memories, rank, spans)
        self.flats = [
            torch.frombuffer(numpy.asarray(memories[rank]), dtype=torch.float32, count=size, offset=offset)
            for offset, size, _ in spans
        ]


def extension():
    return import_module("gradwire.ddp_core.transport._shared_memory")


def memory_of(size):
    file = extension().memory_file("test")
    os.ftruncate(file, size)
    memory = extension().Memory(file, size)
    os.close(file)
    return memory


def ranks_of_one_process(count, sizes):
    memories = [memory_of(HEADER + sum(sizes) * 4) for _ in range(count)]
    return [Rank(memories, rank, sizes) for rank in range(count)]


def test_a_sum_is_there_once_all_have_arrived_and_again_in_every_step():
    group = ranks_of_one_process(3, [70_000])
    for step in range(1, 4):
        for number, rank in enumerate(group):
            rank.flats[0].fill_(number + step)
        for rank in group[:2]:
            rank.sums.arrive(0)
            assert not rank.sums.wait(0, 0.01)
            assert not rank.sums.is_there(0)
        assert group[0].sums.missing(0) == [2]
        began = time.perf_counter()
        group[2].sums.arrive(0)
        for rank in group:
            assert rank.sums.wait(0, 60.0)
            assert rank.sums.missing(0) == []
            assert began < rank.sums.since(0) <= time.perf_counter()
            assert torch.equal(rank.flats[0], torch.full((70_000,), 3.0 + 3 * step))


def test_buckets_are_independent_and_what_lies_beside_them_stays():
    first, second = ranks_of_one_process(2, [10, 6, 5])
    for rank in (first, second):
        for flat in rank.flats:
            flat.fill_(1.0)
        rank.sums.arrive(1)
    assert first.sums.wait(1, 60.0)
    assert [flat.tolist() for flat in second.flats] == [[1.0] * 10, [2.0] * 6, [1.0] * 5]


def hurried(rank, number):
    """Sums of all buckets again and again, in an order and after pauses that other ranks do not have; the wrong ones."""
    chance = Random(number)
    for step in range(100):
        for flat in rank.flats:
            flat.fill_(step + number)
        order = chance.sample(range(len(rank.flats)), len(rank.flats))
        for place in order:
            time.sleep(chance.choice((0.0, 0.0, 0.001)))
            rank.sums.arrive(place)
        for place in order:
            if not rank.sums.wait(place, 60.0) or rank.flats[place].ne(4 * step + 6).any():
                return [(number, step, place)]
    return []


def test_sums_come_out_whoever_is_first():
    group = ranks_of_one_process(4, [1, 100_000, 65_536, 300_001, 17])
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(hurried, group, range(4))) == [[]] * 4


def test_the_smallest_numbers_are_kept_whoever_adds_up():
    group = ranks_of_one_process(2, [300_000])
    for rank in group:
        rank.flats[0].copy_(torch.full((300_000,), 3, dtype=torch.int32).view(torch.float32))
    torch.set_flush_denormal(True)
    try:
        for rank in group:
            rank.sums.arrive(0)
        assert all(rank.sums.wait(0, 60.0) for rank in group)
    finally:
        torch.set_flush_denormal(False)
    assert group[0].flats[0].view(torch.int32).unique().tolist() == [6]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_share_is_the_scaled_sum_in_the_order_of_ranks_and_nothing_beside_it_changes(dtype):
    size, memories = 1000, [memory_of(HEADER + 1000 * dtype.itemsize) for _ in range(3)]
    shares = [extension().SharedShares(memories, rank, [(HEADER, size, dtype.itemsize)]) for rank in range(3)]
    flats = [torch.frombuffer(numpy.asarray(each), dtype=dtype, count=size, offset=HEADER) for each in memories]
    for first, count in ((0, 1000), (0, 1), (3, 15), (5, 16), (7, 17), (500, 500), (1000, 0)):
        expected = [flat.copy_(torch.randn(size, dtype=dtype)).clone() for flat in flats]
        shares[1].sum(0, first, count, 1 / 3)
        share, factor = slice(first, first + count), torch.tensor(1 / 3, dtype=dtype)
        expected[1][share] = sum(factor * each[share] for each in expected)
        assert all(map(torch.equal, flats, expected))


def test_who_gives_up_ends_the_wait_of_the_others_and_no_sum_begins_any_more():
    first, second = ranks_of_one_process(2, [10])
    first.sums.arrive(0)
    threading.Timer(0.1, second.sums.give_up).start()
    assert not first.sums.wait(0, 1000.0)
    assert first.sums.given_up() == 1
    second.sums.arrive(0)
    assert not second.sums.wait(0, 0.1)
    assert second.flats[0].tolist() == [0.0] * 10


def test_a_rank_that_is_gone_has_given_up():
    first, second = ranks_of_one_process(2, [10])
    first.sums.arrive(0)
    del second
    assert not first.sums.wait(0, 1000.0)
    assert first.sums.given_up() == 1


def numbers(rank, step, numel, dtype):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(numel, generator=generator, dtype=dtype) * 10 ** torch.randn(numel, generator=generator)


def sums_of_both_kinds(rank, world_size, dtype):
    """Of some sizes and steps: whether a shared sum has the bits of Gloo's."""
    parameters = [[torch.empty(numel, dtype=dtype)] for numel in NUMELS]
    limit = timedelta(seconds=20)
    transport = HostMemory(ProcessGroup(dist.group.WORLD, torch.device("cpu"), limit))
    shared = transport.allocate(parameters)
    same = []
    for step in range(2):
        given, started = [numbers(rank, step, flat.numel(), dtype) for flat in shared], []
        for flat, own in zip(shared, given, strict=True):
            flat.copy_(own)
            started.append(transport.start(AllReduce(flat, "sum"), 0))
        for flat, expected, pending in zip(shared, given, started, strict=True):
            dist.all_reduce(expected)
            same.append(pending.wait(limit) is flat and torch.equal(flat, expected))
    return same


@pytest.mark.parametrize(("world_size", "dtype"), [(2, torch.float64), (3, torch.float32), (5, torch.float32)])
def test_sums_have_the_bits_of_gloo_s_ring(ranks, world_size, dtype):
    assert ranks.run(sums_of_both_kinds, world_size, dtype) == [[True] * 2 * len(NUMELS)] * world_size
