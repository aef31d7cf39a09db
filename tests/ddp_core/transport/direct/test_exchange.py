"""Large all-to-alls and all-gathers of programs: over a process group's transport, against what ranks gave."""

import os
import time
import weakref
from concurrent.futures import Future
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gradwire.compress import AllGather, AllReduce, AllToAll
from gradwire.ddp_core import ProcessGroup
from gradwire.ddp_core.transport.direct.collectives import GLOO, PINNED, Direct
from gradwire.ddp_core.transport.process_group import LARGE, GroupPending

LIMIT, SOON = timedelta(seconds=20), timedelta(seconds=1)
CPU = torch.device("cpu")


def rows(rank, count, dtype):
    """As many bytes as go directly, and some."""
    size = LARGE // dtype.itemsize // count + 7
    numbers = torch.randn(count, size, generator=torch.Generator().manual_seed(rank))
    return numbers.mul(50).abs().clamp(max=255).to(dtype)


def replies(rank, world_size, ranks_per_host, pinned):
    """By scope, dtype and request, the reply to this rank; and how many exchanges were begun."""
    os.environ.update({PINNED: pinned} if pinned else {})
    transport = ProcessGroup(dist.group.WORLD, CPU, LIMIT)
    transport.arrange(ranks_per_host)
    transport.open(2)
    found = {}
    for scope in ("all", "across"):
        count = len(transport.ranks.members(scope))
        for dtype in (torch.uint8, torch.float32):
            given = rows(rank, count, dtype)
            pending = {
                "AllToAll": transport.start(AllToAll(given, scope), 0),
                "AllGather": transport.start(AllGather(given[0], scope), 1),
                "AllReduce": transport.start(AllReduce(given.double(), "sum", scope), 0),
            }
            found |= {(scope, dtype, name): each.wait(LIMIT).clone() for name, each in pending.items()}
    begun = sum(exchange is not None for exchange in transport._exchanges.values())
    dist.barrier()
    transport.abort()
    os.environ.pop(PINNED, None)
    return found, begun


@pytest.mark.parametrize(
    ("world_size", "ranks_per_host", "pinned", "begun"), [(3, 1, "", 4), (4, 2, "", 4), (2, 1, GLOO, 0)]
)
def test_every_rank_gets_the_rows_and_blocks_that_others_gave_bit_by_bit(
    ranks, world_size, ranks_per_host, pinned, begun
):
    for rank, (found, made) in enumerate(ranks.run(replies, world_size, ranks_per_host, pinned)):
        assert made == begun
        for (scope, dtype, name), reply in found.items():
            group = range(world_size) if scope == "all" else range(rank % ranks_per_host, world_size, ranks_per_host)
            given = torch.stack([rows(other, len(group), dtype) for other in group])
            mine = group.index(rank)
            expected = {"AllToAll": given[:, mine], "AllGather": given[:, 0], "AllReduce": given.double().sum(0)}[name]
            if name == "AllReduce":
                torch.testing.assert_close(reply, expected)
            else:
                assert torch.equal(reply, expected)


def one_rank_dies(rank, world_size, met):
    transport = ProcessGroup(dist.group.WORLD, CPU, LIMIT)
    transport.open(1)
    given = rows(rank, world_size, torch.float32)
    if met:
        transport.start(AllToAll(given), 0).wait(LIMIT)
    dist.barrier()
    if rank == world_size - 1:
        os._exit(7)
    transport.start(AllToAll(given) if met else AllGather(given[0]), 0).wait(LIMIT)


@pytest.mark.parametrize("met", [True, False], ids=["after an exchange", "before they meet"])
def test_where_a_rank_dies_all_others_raise_at_once(ranks, met):
    *survivors, dead = ranks.run(one_rank_dies, 3, met, expect_errors=True)
    assert dead.fate == "died with exit code 7"
    for survivor in survivors:
        assert survivor.type_name == "RuntimeError"
        assert "onnection" in survivor.message
        assert survivor.seconds < 10


def one_rank_wants_gloo(rank, world_size):
    if rank == 1:
        os.environ[PINNED] = GLOO
    transport = ProcessGroup(dist.group.WORLD, CPU, LIMIT)
    transport.open(1)
    reply = transport.start(AllToAll(rows(rank, world_size, torch.float32)), 0).wait(LIMIT).clone()
    met = list(transport._exchanges.values())
    dist.barrier()
    transport.abort()
    os.environ.pop(PINNED, None)
    return reply, met


def test_where_one_rank_wants_gloo_it_carries_all(ranks):
    for rank, (reply, met) in enumerate(ranks.run(one_rank_wants_gloo, 2)):
        assert torch.equal(reply, torch.stack([rows(other, 2, torch.float32)[rank] for other in range(2)]))
        assert met == [None]


def test_a_wait_looks_around_before_it_says_that_a_connection_was_lost():
    lost: Future[None] = Future()
    lost.set_exception(RuntimeError("connection closed by peer"))

    def why():
        raise ValueError("the ranks were set up differently")

    with pytest.raises(ValueError, match="set up differently"):
        GroupPending(Direct(lost, []), torch.empty(0), check=why).wait(SOON)


def test_a_wait_ends_at_its_own_limit_and_looks_around_until_then():
    looks = []
    pending = GroupPending(Direct(Future(), []), torch.empty(0), check=lambda: looks.append(None))
    with pytest.raises(RuntimeError, match="did not come within"):
        pending.wait(timedelta(milliseconds=5))
    assert looks


def test_memory_of_a_reply_goes_with_its_last_holder_not_at_a_garbage_collection():
    begun, reply = Future(), torch.empty(1)
    memory = weakref.ref(reply.untyped_storage())
    pending = GroupPending(Direct(begun, [reply]), reply)
    pending.expect_late_wait(time.perf_counter)
    begun.set_result(None)
    pending.wait(SOON)
    del begun, reply, pending
    assert memory() is None
