"""Direct collectives: each rank's blocks and sums against float64 by hand, and against Gloo's bits."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gradwire.ddp_core.transport.direct.collectives import Collectives
from gradwire.ddp_core.transport.direct.hosts import hosts_of
from gradwire.ddp_core.transport.direct.rails import rails
from gradwire.ddp_core.transport.direct.wire import CHUNK_BYTES, Staggered
from gradwire.ddp_core.transport.lost_ranks import Processes
from gradwire.ddp_core.transport.torch_groups import store_of

LIMIT = timedelta(seconds=20)
CHUNK = CHUNK_BYTES // 4
EVEN = CHUNK  # of which Gloo gives each of two or four ranks as much as a direct reduce-scatter does
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)
KINDS = ("all_gather", "all_to_all", "reduce_scatter")
CASES = [(1, torch.float32), (5 * CHUNK + 3, torch.float32), *((EVEN, dtype) for dtype in DTYPES)]


def numbers(rank, size, dtype=torch.float32):
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)).mul(100).to(dtype)


def collectives(make_way=Staggered, limit=LIMIT):
    group, store = dist.group.WORLD, dist.PrefixStore("test", store_of(dist.group.WORLD))
    return Collectives(store, group.rank(), group.size(), limit, lambda wire: dict.fromkeys(KINDS, make_way(wire)))


def one_host(wire):
    return rails(wire, hosts_of(wire))


def two_hosts(wire):
    """Ranks 0 and 2 on one, 1 and 3 on another."""
    return rails(wire, [[0, 2], [1, 3]])


def gathered_and_summed(rank, world_size, way):
    """By size and dtype: what direct collectives give, and what Gloo's do."""
    direct, found = collectives(way), {}
    for size, dtype in CASES:
        rows = numbers(rank, world_size * size, dtype).view(world_size, size)
        mine, theirs = torch.empty(2, world_size, size, dtype=dtype)
        swapped = torch.empty(world_size, size, dtype=dtype)
        direct.all_to_all(swapped.unbind(), rows.unbind())
        total, expected = torch.empty(2, size, dtype=dtype)
        gather, reduce = (direct.all_gather(mine.unbind(), rows[0]), direct.reduce_scatter(total, rows.unbind()))
        dist.all_gather_into_tensor(theirs.view(-1), rows[0])
        dist.reduce_scatter_tensor(expected, rows.clone().view(-1))
        gather.result(20)
        reduce.result(20)
        found[size, dtype] = (mine, theirs, swapped, total, expected)
    direct.close()
    return found


KEPT = []
WAYS = [(Staggered, 2), (one_host, 3), (two_hosts, 4)]


@pytest.mark.parametrize(("way", "world_size"), WAYS)
def test_every_rank_gets_all_blocks_and_the_sum_of_its_row(ranks, way, world_size):
    for rank, found in enumerate(ranks.run(gathered_and_summed, world_size, way)):
        for (size, dtype), (mine, theirs, swapped, total, expected) in found.items():
            given = [numbers(other, world_size * size, dtype).view(world_size, size) for other in range(world_size)]
            assert torch.equal(mine, torch.stack([rows[0] for rows in given]))
            assert torch.equal(mine, theirs)
            assert torch.equal(swapped, torch.stack([rows[rank] for rows in given]))
            exact = torch.stack([rows[rank].double() for rows in given]).sum(0)
            torch.testing.assert_close(total.double(), exact, rtol=0, atol=8 if dtype == torch.bfloat16 else 1e-3)
            assert size != EVEN or way in (one_host, two_hosts) or torch.equal(total, expected)


def ranks_as_threads(size, work):
    """What `work(rank, collectives)` gives, rank by rank, of threads in this process."""
    store = dist.HashStore()

    def run_rank(rank):
        direct = Collectives(store, rank, size, LIMIT, lambda wire: dict.fromkeys(KINDS, Staggered(wire)))
        try:
            return work(rank, direct)
        finally:
            direct.close()

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run_rank, range(size)))


@pytest.mark.parametrize("made", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_whoever_asks_may_be_in_any_mode_and_give_parameters(made):
    def work(rank, direct):
        with made():
            block, rows = torch.nn.Parameter(numbers(rank, 8)), torch.nn.Parameter(numbers(rank, 2 * 8).view(2, 8))
            gathered, total = torch.empty(2, 8), torch.empty(8)
            direct.all_gather(gathered.unbind(), block).result(20)
            direct.reduce_scatter(total, rows.unbind()).result(20)
            direct.all_gather(rows.unbind(), block).result(20)
            return gathered, total, rows.detach()

    blocks = torch.stack([numbers(rank, 8) for rank in range(2)])
    sums = sum(numbers(rank, 2 * 8).view(2, 8) for rank in range(2))
    for (gathered, total, rows), expected in zip(ranks_as_threads(2, work), sums, strict=True):
        for given in (gathered, rows):
            assert torch.equal(given, blocks)
        assert torch.equal(total, expected)


class LateSend:
    """A message that leaves only when it is waited for, as behind a full link."""

    def __init__(self, begin):
        self._begin = begin

    def wait(self, timeout):
        time.sleep(0.2)
        self._begin().wait(timeout)


def late_sums(wire):
    """Ranks 0 and 1 on one host, 2 and 3 on another; what 0 sends to 2 is late."""
    way, send = rails(wire, [[0, 1], [2, 3]]), wire.send
    if wire.rank == 0:
        wire.send = lambda tensor, to: LateSend(lambda: send(tensor, to))
    return way


def summed_then_gathered(rank, world_size):
    direct, block = collectives(late_sums), numbers(rank, 4 * CHUNK)
    rows, total = block.view(2, -1)[[0, 1, 0, 1]], torch.empty(2 * CHUNK)
    gathered = torch.empty(world_size, 4 * CHUNK)
    pending = direct.reduce_scatter(total, rows.unbind())
    direct.all_gather(gathered.unbind(), block).result(20)
    pending.result(20)
    direct.close()
    return total, gathered


def test_a_sum_that_is_still_on_its_way_is_not_written_over_by_the_next_collective(ranks):
    given = torch.stack([numbers(rank, 4 * CHUNK) for rank in range(4)])
    for rank, (total, gathered) in enumerate(ranks.run(summed_then_gathered, 4)):
        exact = given.double().sum(0).view(2, -1)[rank % 2]
        torch.testing.assert_close(total.double(), exact, rtol=0, atol=1e-3)
        assert torch.equal(gathered, given)


def one_rank_dies(rank, world_size, way):
    direct = collectives(way)
    output, block = torch.empty(world_size, 100 * CHUNK), torch.ones(100 * CHUNK)
    direct.all_gather(output.unbind(), block).result(20)
    if rank == world_size - 1:
        os._exit(7)
    pending = direct.reduce_scatter(block, output.unbind())
    later = direct.all_gather(output.unbind(), block)
    with pytest.raises(RuntimeError, match="an earlier collective of this group has failed"):
        later.result(20)
    pending.result(0)


@pytest.mark.parametrize(("way", "world_size"), [(Staggered, 3), (two_hosts, 4)])
def test_where_a_rank_dies_all_others_raise_at_once(ranks, way, world_size):
    *survivors, dead = ranks.run(one_rank_dies, world_size, way, expect_errors=True)
    assert dead.fate == "died with exit code 7"
    for survivor in survivors:  # on rails some wait for others, which have raised
        assert survivor.type_name == "RuntimeError"
        assert "onnection" in survivor.message
        assert survivor.seconds < 10


def one_rank_is_gone(rank, world_size):
    """Before the others begin the next collective, which some of them fail to; they keep what it raises."""
    direct, dead, processes = collectives(two_hosts), world_size - 1, [0] * world_size
    KEPT.append(direct)
    dist.all_gather_object(processes, os.getpid())
    died = Processes({dead: processes[dead]})
    output, block = torch.empty(world_size, CHUNK), torch.ones(CHUNK)
    direct.all_gather(output.unbind(), block).result(20)
    if rank == dead:
        os._exit(7)
    assert died.ended(20) == [dead]
    KEPT.append(pending := direct.all_gather(output.unbind(), block))
    pending.result(30)


def one_rank_has_no_room(rank, world_size):
    """Its receive fails, and it keeps what that raises."""
    direct, output, block = collectives(), torch.empty(world_size, 8), torch.ones(8)
    KEPT.append(direct)
    direct.all_gather(output.unbind(), block).result(20)
    rows = output if rank == 0 else torch.empty(world_size, 1).expand(world_size, 8)
    KEPT.append(pending := direct.all_gather(rows.unbind(), block))
    pending.result(30)


@pytest.mark.parametrize(("fails", "world_size"), [(one_rank_is_gone, 4), (one_rank_has_no_room, 2)])
def test_where_a_rank_keeps_what_it_raised_those_that_wait_for_it_raise_at_once(ranks, fails, world_size):
    for rank in ranks.run(fails, world_size, expect_errors=True)[:-1]:
        assert (rank.type_name, "onnection" in rank.message) == ("RuntimeError", True)
        assert rank.seconds < 10


def one_rank_dies_while_hosts_meet(rank, world_size):
    """The others raise which files of shared memory they still have open."""

    def dies_once_hosts_are_known(wire):
        hosts = hosts_of(wire)
        return os._exit(7) if wire.rank == world_size - 1 else rails(wire, hosts)

    direct = collectives(dies_once_hosts_are_known)
    with pytest.raises(RuntimeError, match="onnection"):
        direct.kinds()
    raise ValueError([link for file in os.listdir("/proc/self/fd") if "memfd:gradwire" in (link := target(file))])


def target(file):
    try:
        return os.readlink(f"/proc/self/fd/{file}")
    except FileNotFoundError:  # that of the listing
        return ""


def test_where_a_rank_dies_while_hosts_meet_no_file_is_left_open(ranks):
    *survivors, dead = ranks.run(one_rank_dies_while_hosts_meet, 3, expect_errors=True)
    assert dead.fate == "died with exit code 7"
    assert [(survivor.type_name, survivor.message) for survivor in survivors] == [("ValueError", "[]")] * 2


def one_rank_stays_away(rank, world_size, way):
    direct = collectives(way)
    KEPT.append(direct)  # or its connections close
    output, block = torch.empty(world_size, 8), torch.ones(8)
    direct.all_gather(output.unbind(), block).result(20)
    if rank == 0:
        direct.timeout = timedelta(seconds=1)
        direct.all_gather(output.unbind(), block).result(20)


@pytest.mark.parametrize("way", [Staggered, one_host])
def test_a_rank_that_waits_for_one_which_stays_away_raises_at_the_time_limit(ranks, way):
    waiting, _ = ranks.run(one_rank_stays_away, 2, way, expect_errors=True)
    assert "timed out" in waiting.message.lower()
    assert 0.9 < waiting.seconds < 15


def test_what_is_asked_for_while_they_close_comes_to_an_end():
    direct = Collectives(dist.HashStore(), 0, 1, LIMIT, lambda wire: {})
    start, closed, closer = direct._thread.start, threading.Event(), []

    def close():
        direct.close()
        closed.set()

    def start_after_close():
        """Between the look whether they are closed and the job, another thread closes them, if that does not wait."""
        closer.append(threading.Thread(target=close))
        closer[0].start()
        closed.wait(0.1)
        start()

    direct._thread.start = start_after_close
    asked = direct._submit(lambda ways: None)
    assert asked.result(20) is None
    closer[0].join(20)
    assert closed.is_set()
    with pytest.raises(RuntimeError, match="was shut down: its collectives have ended"):
        direct.kinds()
